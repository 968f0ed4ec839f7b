"""Runs on a queue that does what the test says: states, events, cancel, sleep, forgetting."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

PROMPT = {
    "1": {"class_type": "Load", "inputs": {}, "_meta": {"title": "The loader"}},
    "2": {"class_type": "Save", "inputs": {"images": ["1", 0]}},
}


class FakeHost:
    """ComfyUI's queue as a list of places that the test moves prompts between."""

    def __init__(self, records: Any) -> None:
        self.records = records
        self.refuse: Exception | None = None
        self.places: dict[str, Any] = {}
        self.progress: Any = None
        self.stopped: list[str] = []

    async def submit(self, prompt_id: str, order: Any) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.places[prompt_id] = self.records.Look(self.records.Place.QUEUED, len(self.places))

    def look(self, prompt_ids: Any) -> dict[str, Any]:
        gone = self.records.Look(self.records.Place.GONE)
        return {i: self.places.get(i, gone) for i in prompt_ids}

    def steps(self, prompt_id: str) -> Any:
        return self.progress

    def stop(self, prompt_id: str) -> None:
        self.stopped.append(prompt_id)


class Studio:
    """A service, and the words to drive it."""

    def __init__(self, pack: Any, control: Any) -> None:
        self.records = pack.module("nodes.runs.records")
        self.module = pack.module("nodes.runs.service")
        self.wire = pack.module("nodes.runs.run_json")
        self.host = FakeHost(self.records)
        self.now = 100.0
        self.models: Any = ((), None)
        self.service = self.module.RunService(
            self.host, control, lambda: self.models, clock=lambda: self.now
        )

    def start(self, **more: Any) -> str:
        order = self.records.RunOrder(PROMPT, **more)
        return str(asyncio.run(self.service.start(order)).id)

    def move(self, run_id: str, place: str, **more: Any) -> bool:
        """Put it there, a second later, and look."""
        self.now += 1.0
        self.host.places[run_id] = self.records.Look(self.records.Place[place], **more)
        return bool(self.service.look())

    def end(self, run_id: str, error: str | None = None, interrupted: bool = False) -> bool:
        found = None if error is None else self.records.RunError(error, "because", "2", "Save")
        outcome = self.records.Outcome({"2": {"images": []}}, found, interrupted)
        return self.move(run_id, "ENDED", outcome=outcome)

    def json(self, run_id: str) -> Any:
        return self.wire.run_json(self.service.record(run_id))

    def kinds(self, run_id: str) -> list[str]:
        return [event.kind for event in self.service.events(run_id, 0)[0]]


@pytest.fixture
def studio(pack: Any, control: Any) -> Studio:
    return Studio(pack, control)


def test_a_run_is_followed_from_the_queue_to_its_outputs(studio: Studio) -> None:
    run_id = studio.start(name="morning")
    assert studio.json(run_id)["state"] == "queued"
    assert studio.move(run_id, "QUEUED", ahead=2) is True
    assert studio.json(run_id)["ahead"] == 2
    studio.host.progress = studio.records.Steps("1", 3, 20, nodes_done=1)
    assert studio.move(run_id, "RUNNING") is True
    told = studio.json(run_id)
    assert (told["state"], told["ahead"], told["nodes_done"], told["nodes"]) == (
        "running",
        None,
        1,
        2,
    )
    assert told["node"] == {
        "id": "1", "class_type": "Load", "title": "The loader", "step": 3, "steps": 20,
    }  # fmt: skip
    assert studio.end(run_id) is False
    told = studio.json(run_id)
    assert (told["state"], told["node"], told["error"]) == ("done", None, None)
    assert told["outputs"] == {"2": {"images": []}}
    assert told["seconds"] == {"queued": 2.0, "running": 1.0}
    assert told["nodes_done"] == 2
    assert studio.kinds(run_id) == ["state", "progress", "state", "end"]


def test_what_wakes_the_models_is_a_node_of_the_run(studio: Studio) -> None:
    run_id = studio.start(wake_before=True)
    studio.host.progress = studio.records.Steps("courier_wake_before", 0, 3, nodes_done=0)
    assert studio.move(run_id, "RUNNING") is True
    told = studio.json(run_id)
    assert (told["node"]["class_type"], told["node"]["title"]) == ("CourierWakeModel", "Wake Model")
    assert told["nodes"] == 3
    studio.end(run_id)
    assert studio.json(run_id)["nodes_done"] == 3


def test_what_wakes_the_models_takes_no_id_of_the_users(studio: Studio) -> None:
    mine = {"class_type": "SaveImage", "inputs": {}}
    order = studio.records.RunOrder({"courier_wake_before": mine}, wake_before=True)
    queued = order.queued_prompt
    assert queued["courier_wake_before"] == mine
    assert queued["courier_wake_before_"]["class_type"] == "CourierWakeModel"


def test_a_run_that_has_ended_keeps_no_workflow(studio: Studio) -> None:
    run_id = studio.start(workflow={"nodes": []}, name="x")
    studio.end(run_id)
    order = studio.service.record(run_id).order
    assert (order.prompt, order.workflow, order.name) == ({}, None, "x")
    assert studio.json(run_id)["nodes"] == 2


def test_events_are_only_of_what_changed_and_go_on_from_a_number(studio: Studio) -> None:
    run_id = studio.start()
    for _ in range(5):
        studio.move(run_id, "RUNNING")
    assert studio.kinds(run_id) == ["state", "state"]
    studio.end(run_id)
    events, is_over = studio.service.events(run_id, 2)
    assert ([event.number for event in events], is_over) == ([3], True)
    assert json.loads(events[0].text)["outputs"] == {"2": {"images": []}}
    assert studio.service.events(run_id, 3) == ([], True)


def test_events_that_nobody_reads_do_not_grow(studio: Studio, pack: Any) -> None:
    kept = pack.module("nodes.runs.state").KEPT_EVENTS
    run_id = studio.start()
    for step in range(kept + 50):
        studio.host.progress = studio.records.Steps("1", step, 1000)
        studio.move(run_id, "RUNNING")
    events, _ = studio.service.events(run_id, 0)
    assert len(events) == kept
    assert events[-1].number == kept + 51


def test_a_node_that_failed_is_told_with_its_id(studio: Studio) -> None:
    run_id = studio.start()
    studio.end(run_id, "node_failed")
    told = studio.json(run_id)
    assert told["state"] == "failed"
    assert told["error"] == {
        "code": "node_failed", "message": "because", "node": "2", "class_type": "Save",
        "title": None, "exception": None,
    }  # fmt: skip


def test_cancel_stops_it_until_it_has_stopped(studio: Studio) -> None:
    run_id = studio.start()
    studio.move(run_id, "RUNNING")
    assert studio.service.cancel(run_id).state.value == "running"
    # ComfyUI clears an interrupt that comes just before a prompt begins, so it is told again.
    told = len(studio.host.stopped)
    studio.service.look()
    assert len(studio.host.stopped) > told
    studio.end(run_id, "interrupted", interrupted=True)
    assert studio.json(run_id)["error"]["code"] == "cancelled"
    assert studio.json(run_id)["state"] == "cancelled"
    stopped = list(studio.host.stopped)
    assert studio.service.cancel(run_id).state.value == "cancelled"
    assert studio.host.stopped == stopped


def test_a_run_that_was_faster_than_its_cancel_is_done(studio: Studio) -> None:
    run_id = studio.start()
    studio.move(run_id, "RUNNING")
    studio.service.cancel(run_id)
    studio.end(run_id)
    assert studio.json(run_id)["state"] == "done"


def test_an_interrupt_of_somebody_else_is_told_as_such(studio: Studio) -> None:
    run_id = studio.start()
    studio.move(run_id, "RUNNING")
    studio.end(run_id, "interrupted", interrupted=True)
    assert studio.json(run_id)["state"] == "cancelled"
    assert studio.json(run_id)["error"]["code"] == "interrupted"


def test_a_time_limit_counts_from_the_beginning_of_the_run(studio: Studio) -> None:
    run_id = studio.start(time_limit_seconds=2.5)
    for _ in range(10):
        studio.move(run_id, "QUEUED", ahead=1)
    assert studio.host.stopped == []
    for _ in range(3):
        studio.move(run_id, "RUNNING")
    assert studio.host.stopped == []
    studio.move(run_id, "RUNNING")
    assert studio.host.stopped == [run_id]
    studio.end(run_id, "interrupted", interrupted=True)
    error = studio.json(run_id)["error"]
    assert error["code"] == "time_limit"
    assert "2.5 s" in error["message"]


@pytest.mark.parametrize(("began", "code", "state"), [
    (False, "removed", "cancelled"), (True, "unknown", "failed"),
])  # fmt: skip
def test_a_prompt_that_is_in_no_list_any_more_ends(
    studio: Studio, began: bool, code: str, state: str
) -> None:
    run_id = studio.start()
    if began:
        studio.move(run_id, "RUNNING")
    assert studio.move(run_id, "GONE") is False
    assert studio.json(run_id)["state"] == state
    assert studio.json(run_id)["error"]["code"] == code


def test_sleep_after_comes_when_the_queue_is_empty_and_before_the_end(
    studio: Studio, control: Any, pack: Any
) -> None:
    words = pack.module("nodes.requests.records")
    run_id = studio.start(sleep_after=2, on_use=words.OnUse.REFUSE)
    control.fail_with = words.BusyError("a prompt runs")
    control.is_busy = lambda: True
    studio.move(run_id, "RUNNING")
    assert studio.end(run_id) is True
    asked, sleep = [], control.sleep
    control.sleep = lambda order: asked.append(order) or sleep(order)
    studio.service.look()
    assert asked == []
    control.is_busy = lambda: False  # and yet a prompt begins before the order is carried out
    assert studio.service.look() is True
    assert len(asked) == 1
    told = studio.json(run_id)
    assert (told["state"], told["sleep_after"]["state"]) == ("done", "waiting")
    assert studio.kinds(run_id)[-1] == "state"
    assert studio.service.events(run_id, 0)[1] is False
    control.fail_with = None
    assert studio.service.look() is False
    order = control.orders[-1]
    assert (order.models, order.level, order.when, order.on_use) == (
        None, 2, words.When.NOW, words.OnUse.REFUSE,
    )  # fmt: skip
    told = studio.json(run_id)
    assert told["sleep_after"]["state"] == "done"
    assert told["sleep_after"]["receipt"]["action"] == "sleep"
    assert studio.kinds(run_id)[-1] == "end"


def test_models_sleep_also_after_a_run_that_failed_but_not_after_one_that_never_began(
    studio: Studio, control: Any
) -> None:
    failed = studio.start(sleep_after=1)
    studio.move(failed, "RUNNING")
    studio.end(failed, "node_failed")
    assert studio.json(failed)["sleep_after"]["state"] == "done"
    count = len(control.orders)
    never = studio.start(sleep_after=1)
    studio.service.cancel(never)
    studio.move(never, "GONE")
    assert studio.json(never)["sleep_after"]["state"] == "skipped"
    assert studio.json(never)["error"]["code"] == "cancelled"
    assert len(control.orders) == count


def test_a_sleep_that_fails_is_told_and_ends(studio: Studio, control: Any, pack: Any) -> None:
    words = pack.module("nodes.requests.records")
    run_id = studio.start(sleep_after=1)
    control.fail_with = words.OrderFailedError("half-way", {"ok": False})
    studio.end(run_id)
    told = studio.json(run_id)["sleep_after"]
    assert (told["state"], told["problem"], told["receipt"]) == (
        "failed",
        "half-way",
        {"ok": False},
    )
    control.fail_with = RuntimeError("/home/secret/path")
    other = studio.start(sleep_after=1)
    assert studio.end(other) is False
    told = studio.json(other)["sleep_after"]
    assert told["state"] == "failed"
    assert "secret" not in told["problem"]


def test_a_workflow_that_is_refused_leaves_nothing(studio: Studio) -> None:
    studio.host.refuse = studio.records.PromptRefusedError("no", {})
    with pytest.raises(studio.records.PromptRefusedError, match="no"):
        studio.start()
    assert studio.service.records() == []
    assert studio.service.look() is False


def test_so_many_unfinished_runs_and_no_more(studio: Studio) -> None:
    runs = [studio.start() for _ in range(studio.module.MOST_UNFINISHED)]
    with pytest.raises(studio.module.QueueFullError, match="unfinished"):
        studio.start()
    studio.end(runs[0])
    studio.start()


def test_the_history_is_bounded_and_the_unfinished_are_never_forgotten(studio: Studio) -> None:
    waiting = studio.start()
    ended = []
    for _ in range(studio.module.KEPT_RUNS + 20):
        run_id = studio.start()
        studio.end(run_id)
        ended.append(run_id)
    ids = [record.id for record in studio.service.records()]
    assert len(ids) <= studio.module.KEPT_RUNS + 2
    assert waiting in ids
    assert ended[-1] in ids
    with pytest.raises(studio.module.UnknownRunError, match="forgotten"):
        studio.service.record(ended[0])


def test_what_the_models_hold_and_the_peak_of_the_card_are_kept(studio: Studio) -> None:
    run_id = studio.start()
    for used in (5, 9, 7):
        studio.models = (({"id": "wan-1"},), used)
        studio.move(run_id, "RUNNING")
    studio.models = (({"id": "wan-1", "state": "loaded"},), 1)
    studio.end(run_id)
    told = studio.json(run_id)
    assert told["device_peak_bytes"] == 9
    assert told["models"] == [{"id": "wan-1", "state": "loaded"}]


def test_models_that_cannot_be_looked_at_do_not_end_a_run(studio: Studio) -> None:
    def fails() -> Any:
        raise RuntimeError("a driver in trouble")

    studio.service._models = fails
    run_id = studio.start()
    studio.end(run_id)
    assert studio.json(run_id)["state"] == "done"


def test_what_a_node_showed_is_made_json(studio: Studio, pack: Any) -> None:
    plain = pack.module("nodes.runs.run_json").plain
    shown = plain({1: [float("nan"), 2.5, ("a", {"b": object})], "x": "\ud800"})
    assert json.loads(json.dumps(shown, allow_nan=False))["1"][:2] == [None, 2.5]
    json.dumps(shown, ensure_ascii=False).encode()


def join_follower() -> None:
    """Wait for its end, where it has not ended yet."""
    for thread in threading.enumerate():
        if thread.name == "courier-runs":
            thread.join(30)


def test_the_follower_ends_with_the_last_run_and_begins_again(studio: Studio, pack: Any) -> None:
    module = pack.module("nodes.runs.follower")
    ended = threading.Event()
    look = studio.service.look

    def looked() -> bool:
        more = bool(look())
        if not more:
            ended.set()
        return more

    studio.service.look = looked
    follower = module.RunFollower(studio.service)
    for _ in range(2):
        run_id = studio.start()
        outcome = studio.records.Outcome({})
        studio.host.places[run_id] = studio.records.Look(
            studio.records.Place.ENDED, outcome=outcome
        )
        ended.clear()
        follower.wake()
        assert ended.wait(30)
        join_follower()
        assert studio.json(run_id)["state"] == "done"
        assert not any(t.name == "courier-runs" for t in threading.enumerate())


def test_a_follower_that_could_not_begin_begins_with_the_next_word(
    studio: Studio, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = pack.module("nodes.runs.follower").RunFollower(studio.service)
    run_id = studio.start()
    studio.host.places[run_id] = studio.records.Look(
        studio.records.Place.ENDED, outcome=studio.records.Outcome({})
    )

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        follower.wake()
    assert studio.json(run_id)["state"] == "queued"
    follower.wake()
    join_follower()
    assert studio.json(run_id)["state"] == "done"
