"""What clients are told: what changed, at most five times a second, and nobody waits for it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
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


def test_only_who_asked_is_told_and_the_list_does_not_grow(events: Any) -> None:
    listeners = events.Listeners()
    for client_id in ("page", "", "x" * 300, "other", "page"):
        listeners.add(client_id)
    assert listeners.among(["page", "script", "other"]) == ["other", "page"]
    assert listeners.among([]) == []
    for number in range(1000):
        listeners.add(str(number))
    assert len(listeners.among(map(str, range(1000)))) == events.MOST_LISTENERS
    assert listeners.among(["page", "999"]) == ["999"]
