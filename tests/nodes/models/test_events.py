"""What clients are told: what changed, at most five times a second, and nobody waits for it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest


@pytest.fixture
def events(pack: Any) -> Any:
    return pack.module("nodes.models.events")


class Wire:
    """A server's clients, and what they got."""

    def __init__(self, events: Any) -> None:
        self.body: dict[str, Any] = {"models": []}
        self.sent: list[dict[str, Any]] = []
        self.clients = 1
        self.reads = 0
        self.feed = events.Feed(self._read, lambda: self.clients > 0, self.sent.append)

    def _read(self) -> dict[str, Any]:
        self.reads += 1
        return dict(self.body)


@pytest.fixture
def wire(events: Any) -> Wire:
    return Wire(events)


def test_what_did_not_change_is_not_sent(wire: Wire) -> None:
    for second in range(20):
        wire.feed.look(float(second))
    assert wire.sent == [{"models": []}]
    wire.body["busy"] = True
    wire.feed.look(21.0)
    wire.feed.look(22.0)
    assert wire.sent[1:] == [{"models": [], "busy": True}]


def test_nothing_is_even_read_while_nobody_is_connected(wire: Wire, events: Any) -> None:
    wire.clients = 0
    assert wire.feed.look(0.0) == events.REST_SECONDS
    assert (wire.reads, wire.sent) == (0, [])
    wire.clients = 1
    wire.feed.look(1.0)
    assert len(wire.sent) == 1


def test_at_most_five_a_second_and_seldom_at_rest(wire: Wire, events: Any) -> None:
    now, sent_at = 0.0, []
    while now < 3.0:
        wire.body["number"] = now
        before = len(wire.sent)
        seconds = wire.feed.look(now)
        sent_at += [now] * (len(wire.sent) - before)
        assert seconds >= events.LEAST_SECONDS
        now += seconds
    gaps = [later - sooner for sooner, later in itertools.pairwise(sent_at)]
    assert min(gaps) == pytest.approx(events.LEAST_SECONDS)
    assert 14 <= len(sent_at) <= 16
    assert wire.feed.look(now) == events.LEAST_SECONDS, "it may go on"
    assert wire.feed.look(now + 10.0) == events.REST_SECONDS
    assert wire.feed.look(now + 11.0, begins=True) == events.LEAST_SECONDS
    assert wire.feed.look(now + 12.0) == events.LEAST_SECONDS


@pytest.mark.parametrize(
    ("state", "moves"),
    [
        ("loaded", False),
        ("asleep", False),
        ("unloaded", False),
        ("running", True),
        ("loading", True),
    ],
)
def test_who_moves_is_watched_closely(wire: Wire, events: Any, state: str, moves: bool) -> None:
    wire.body["models"] = [{"state": state}]
    wire.feed.look(0.0)
    found = wire.feed.look(100.0)
    assert found == (events.LEAST_SECONDS if moves else events.REST_SECONDS)


def test_an_event_of_a_model_follows_its_layers(
    events: Any, make_engine: Callable[..., Any], pack: Any
) -> None:
    values = pack.module("offload_core.values")
    engine = make_engine()
    before = events.model_event("m-1", "awake", engine.snapshot(), None)
    json.dumps(before, allow_nan=False)
    assert (before["state"], before["placements"], before["activity"]) == (
        "unloaded",
        "aaaaa",
        ".....",
    )
    engine.load(values.Budget())
    loaded = events.model_event("m-1", "awake", engine.snapshot(), None)
    assert (loaded["placements"], loaded["activity"]) == ("rrrrr", "yyyyy")
    assert loaded["plan"] != before["plan"]
    assert loaded["measured"]["device_bytes"] == engine.device_bytes > 0
    assert events.model_event("m-1", "awake", engine.snapshot(), None) == loaded


def test_all_states_have_a_letter(events: Any, pack: Any) -> None:
    values = pack.module("offload_core.values")
    assert set(events._PLACES) == set(values.Placement)
    assert set(events._ACTIVITIES) == set(values.LayerState)
    assert len({*events._PLACES.values()}) == len(values.Placement)
    assert len({*events._ACTIVITIES.values()}) == len(values.LayerState)


def test_an_event_of_300_layers_takes_next_to_nothing(
    events: Any, make_engine: Callable[..., Any], pack: Any
) -> None:
    """Five of them a second are what the compute thread's interpreter has to share."""
    engine = make_engine(300)
    engine.load(pack.module("offload_core.values").Budget())
    seconds = []
    for _ in range(20):
        started = time.thread_time()
        events.model_event("m-1", "awake", engine.snapshot(), None)
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.02


def listeners_of(events: Any, connected: Sequence[str]) -> Any:
    return events.Listeners(lambda client_id: client_id in connected)


def test_only_who_asked_and_is_connected_is_told(events: Any) -> None:
    listeners = listeners_of(events, ["page", "script", "other"])
    for client_id in ("page", "", "made up", "other", "page"):
        listeners.add(client_id, "::1")
    assert listeners.among(["page", "script", "other"]) == ["page", "other"]
    assert listeners.among([]) == []


def test_made_up_ids_take_nobodys_place(events: Any) -> None:
    listeners = listeners_of(events, ["page"])
    listeners.add("page", "::1")
    for number in range(1000):
        listeners.add(str(number), "10.0.0.9")
    assert listeners.among(["page", *map(str, range(1000))]) == ["page"]


def test_one_address_has_a_bounded_number_of_places_and_no_page_loses_its_own(events: Any) -> None:
    connected = ["page", *map(str, range(1000)), "late"]
    listeners = listeners_of(events, connected)
    listeners.add("page", "10.0.0.1")
    for number in range(1000):
        listeners.add(str(number), f"10.0.0.{2 + number % 3}")
    told = listeners.among(connected)
    assert told[0] == "page"
    assert len(told) == events.MOST_LISTENERS
    listeners.add("late", "10.0.0.9")
    told = listeners.among(connected)
    assert {"page", "late"} <= set(told), "who has none yet takes one of those who have many"
    assert len(told) == events.MOST_LISTENERS


def test_the_place_of_a_client_that_is_gone_is_free(events: Any) -> None:
    connected = [str(number) for number in range(events.MOST_OF_ADDRESS)]
    listeners = listeners_of(events, connected)
    for client_id in connected:
        listeners.add(client_id, "::1")
    connected.append("new")
    listeners.add("new", "::1")
    assert "new" not in listeners.among(connected)
    connected.remove("0")
    listeners.add("new", "::1")
    assert "new" in listeners.among(connected)


def test_who_does_not_read_is_passed_over_alone_and_gets_the_last_when_it_reads(
    events: Any,
) -> None:
    full, sent = {"slow"}, []
    mail = events.Deliveries(lambda i: i not in full, lambda i, body: sent.append((i, body["n"])))
    for number in range(3):
        mail.send(["page", "slow"], {"n": number})
        mail.send_owed(["page", "slow"])
    assert sent == [("page", 0), ("page", 1), ("page", 2)]
    full.clear()
    mail.send_owed(["page", "slow"])
    mail.send_owed(["page", "slow"])
    assert sent[3:] == [("slow", 2)]


def test_who_went_away_while_it_did_not_read_is_owed_nothing(events: Any) -> None:
    sent: list[str] = []
    full = {"slow"}
    mail = events.Deliveries(lambda i: i not in full, lambda i, body: sent.append(i))
    mail.send(["slow"], {})
    mail.send_owed([])
    full.clear()
    mail.send_owed(["slow"])
    assert sent == []


def test_the_feed_looks_after_those_it_owes_where_nothing_is_new(events: Any) -> None:
    looked: list[str] = []
    body = {"models": []}
    feed = events.Feed(
        lambda: body, lambda: True, lambda _: looked.append("new"), lambda: looked.append("owed")
    )
    for second in range(3):
        feed.look(float(second))
    assert looked == ["new", "owed", "owed"]
