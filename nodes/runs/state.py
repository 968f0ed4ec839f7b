"""A run on its way: what a look at ComfyUI's lists makes of it. Arithmetic only."""

from __future__ import annotations

import itertools
import json
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from .records import (
    RUN_MOVES,
    Look,
    NodeStep,
    Outcome,
    Place,
    RunError,
    RunRecord,
    RunState,
    SleepState,
    Steps,
    StopReason,
)
from .run_json import brief_json, run_json

KEPT_EVENTS = 200


@dataclass(frozen=True)
class Event:
    """One thing that happened to a run, ready to be sent. ``text`` is JSON."""

    number: int
    kind: str
    text: str


class Run:
    """A run and what is kept beside its record.

    Threads: whoever holds the service's lock.
    """

    def __init__(self, record: RunRecord, now: float) -> None:
        self.record = record
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self.stop: StopReason | None = None
        self.queued_at = now
        self.began_at: float | None = None
        self.models_at: float | None = None
        self._numbers = itertools.count(1)

    def tell(self, kind: str) -> None:
        """Add an event: "state", "progress", or "end", which has everything in it."""
        whole = kind == "end"
        value = run_json(self.record) if whole else brief_json(self.record)
        self.events.append(Event(next(self._numbers), kind, json.dumps(value, allow_nan=False)))


def bring_up_to_date(run: Run, look: Look, steps: Steps | None, now: float) -> None:
    """Take in a look at a run that has not ended. ``now``: monotonic seconds."""
    before = run.record
    if look.place is Place.RUNNING and run.began_at is None:
        run.began_at = now
    began = run.began_at
    run.record = replace(
        before,
        ahead=look.ahead,
        queued_seconds=(now if began is None else began) - run.queued_at,
        running_seconds=0.0 if began is None else now - began,
    )
    if look.place is Place.RUNNING:
        _step(run, steps)
        limit = before.order.time_limit_seconds
        if limit is not None and run.record.running_seconds >= limit:
            run.stop = run.stop or StopReason.TIME_LIMIT
    elif look.place is Place.ENDED:
        _end(run, look.outcome or Outcome({}))
    elif look.place is Place.GONE:
        _end(run, _gone(run))
    if run.record.state is not before.state:
        run.tell("end" if run.record.is_over else "state")
    elif _place_of(run.record) != _place_of(before):
        run.tell("progress")


def _step(run: Run, steps: Steps | None) -> None:
    node = None
    if steps is not None and steps.node_id is not None:
        class_type, title = names_of(run.record.order.queued_prompt, steps.node_id)
        node = NodeStep(steps.node_id, class_type, title, steps.step, steps.steps)
    done = run.record.nodes_done if steps is None else steps.nodes_done
    _move(run, RunState.RUNNING, node=node, nodes_done=done)


def _end(run: Run, outcome: Outcome) -> None:
    state, error = _verdict(run, outcome)
    sleep = run.record.sleep
    if sleep is SleepState.WAITING and run.began_at is None and state is RunState.CANCELLED:
        sleep = SleepState.SKIPPED
    # What ComfyUI had in its cache is done too.
    done = run.record.nodes if state is RunState.DONE else run.record.nodes_done
    order = replace(run.record.order, prompt={}, workflow=None)
    change = {"node": None, "nodes_done": done, "outputs": outcome.outputs, "error": error}
    _move(run, state, order=order, sleep=sleep, **change)


def _verdict(run: Run, outcome: Outcome) -> tuple[RunState, RunError | None]:
    error = outcome.error
    if error is None:
        # Also where we wanted it stopped: it was faster.
        return RunState.DONE, None
    if not outcome.interrupted:
        return RunState.FAILED, error
    if run.stop is StopReason.TIME_LIMIT:
        limit = run.record.order.time_limit_seconds
        text = f"it ran longer than its time limit of {limit:g} s and was stopped"
        return RunState.CANCELLED, replace(error, code="time_limit", message=text)
    if run.stop is StopReason.CANCELLED:
        text = "it was cancelled"
        return RunState.CANCELLED, replace(error, code="cancelled", message=text)
    return RunState.CANCELLED, error


def _gone(run: Run) -> Outcome:
    """In no list of ComfyUI's: somebody took it off the queue, or cleared the history."""
    if run.began_at is None:
        text = "it was taken off the queue before it began, by somebody else"
        return Outcome({}, RunError("removed", text), interrupted=True)
    text = "how it ended is not known: ComfyUI's history was cleared before it was read"
    return Outcome({}, RunError("unknown", text))


def _move(run: Run, state: RunState, **more: Any) -> None:
    assert state is run.record.state or state in RUN_MOVES[run.record.state]
    run.record = replace(run.record, state=state, **more)


def _place_of(record: RunRecord) -> tuple[Any, ...]:
    return record.ahead, record.node, record.nodes_done


def names_of(prompt: dict[str, Any], node_id: str) -> tuple[str, str]:
    """(class, title) of a node; nodes that ComfyUI made on the way are in no prompt."""
    node = prompt.get(node_id)
    if not isinstance(node, dict):
        return "", ""
    class_type = str(node.get("class_type", ""))
    meta = node.get("_meta")
    title = meta.get("title") if isinstance(meta, dict) else None
    return class_type, title if isinstance(title, str) else class_type
