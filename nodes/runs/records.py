"""What is known of a run: one workflow on ComfyUI's own queue, from its order to its end."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..requests.records import OnUse


class RunState(enum.Enum):
    """Where a run is. See RUN_MOVES."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether nothing more happens to the workflow."""
        return not RUN_MOVES[self]


RUN_MOVES: Mapping[RunState, frozenset[RunState]] = {
    # A short run may begin and end between two looks.
    RunState.QUEUED: frozenset(
        {RunState.RUNNING, RunState.DONE, RunState.FAILED, RunState.CANCELLED}
    ),
    RunState.RUNNING: frozenset({RunState.DONE, RunState.FAILED, RunState.CANCELLED}),
    RunState.DONE: frozenset(),
    RunState.FAILED: frozenset(),
    RunState.CANCELLED: frozenset(),
}


class SleepState(enum.Enum):
    """What became of ``sleep_after``."""

    NOT_ASKED = "not asked"
    WAITING = "waiting"
    """For the end of the run, or for the end of other prompts."""
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"
    """The run was cancelled before it began."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is to come."""
        return self is not SleepState.WAITING


class StopReason(enum.Enum):
    """Why we had a run stopped."""

    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"


WAKE_NODE = "courier_wake_before"
"""The id of what ``wake_before`` adds."""


@dataclass(frozen=True)
class RunOrder:
    """One workflow to run, in API form, and what goes with it.

    Attributes:
        workflow: as the page saves it; ComfyUI writes it into pictures. None: pictures have none.
        sleep_after: the level at which all models sleep afterwards; 0: they stay awake.
        on_use: what the next prompt finds that needs one of them.
        time_limit_seconds: counted from the beginning of the run, not from its place in the queue.
    """

    prompt: dict[str, Any]
    name: str | None = None
    workflow: dict[str, Any] | None = None
    wake_before: bool = False
    sleep_after: int = 0
    on_use: OnUse = OnUse.WAKE
    time_limit_seconds: float | None = None

    @property
    def queued_prompt(self) -> dict[str, Any]:
        """What goes into the queue: with a Wake Model that has no links, and so runs first, where
        that was asked."""
        if not self.wake_before:
            return self.prompt
        free = WAKE_NODE
        while free in self.prompt:
            free += "_"
        wake = {"class_type": "CourierWakeModel", "inputs": {}, "_meta": {"title": "Wake Model"}}
        return {**self.prompt, free: wake}


@dataclass(frozen=True)
class NodeStep:
    """The node that runs, and how far it is. ``steps`` is 1 where it does not say."""

    id: str
    class_type: str
    title: str
    step: int = 0
    steps: int = 1


@dataclass(frozen=True)
class RunError:
    """Why a run did not end well. ``code`` is for programs, ``message`` for people."""

    code: str
    message: str
    node_id: str | None = None
    class_type: str | None = None
    title: str | None = None
    exception: str | None = None


@dataclass(frozen=True)
class RunRecord:
    """A run as it is now. Times are seconds; ``created_at`` counts from 1970.

    Attributes:
        order: without the workflows, once it has ended: a hundred of them may be large.
        nodes: how many the prompt has.
        ahead: prompts before it in the queue; None once it runs.
        models: what the status says of Courier's models, looked at while it ran.
        device_peak_bytes: the most that the driver counted in use meanwhile, by everybody.
    """

    id: str
    order: RunOrder
    created_at: float
    nodes: int
    state: RunState = RunState.QUEUED
    ahead: int | None = None
    node: NodeStep | None = None
    nodes_done: int = 0
    queued_seconds: float = 0.0
    running_seconds: float = 0.0
    models: tuple[dict[str, Any], ...] = ()
    device_peak_bytes: int | None = None
    outputs: dict[str, Any] = field(default_factory=dict)
    error: RunError | None = None
    sleep: SleepState = SleepState.NOT_ASKED
    receipt: dict[str, Any] | None = None
    sleep_problem: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens: it ended, and the models sleep if they were to."""
        return self.state.is_end and self.sleep.is_settled


class Place(enum.Enum):
    """Where ComfyUI has a prompt."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    GONE = "gone"
    """In no list of its."""


@dataclass(frozen=True)
class Outcome:
    """How ComfyUI's history says that a prompt ended. ``error`` None: well."""

    outputs: dict[str, Any]
    error: RunError | None = None
    interrupted: bool = False


@dataclass(frozen=True)
class Look:
    """One prompt in ComfyUI's lists at one moment."""

    place: Place
    ahead: int | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Steps:
    """How far the prompt that runs is."""

    node_id: str | None = None
    step: int = 0
    steps: int = 1
    nodes_done: int = 0


class PromptRefusedError(Exception):
    """ComfyUI does not take the workflow. ``node_errors`` is its own account, by node."""

    def __init__(self, message: str, node_errors: dict[str, Any]) -> None:
        super().__init__(message)
        self.node_errors = node_errors


class RunHost(Protocol):
    """ComfyUI's queue, as runs need it. Threads: any, but for ``submit``."""

    async def submit(self, prompt_id: str, order: RunOrder) -> None:
        """Check the prompt and queue it. In the server's event loop.

        Raises: PromptRefusedError, with nothing queued.
        """

    def look(self, prompt_ids: Sequence[str]) -> dict[str, Look]:
        """Where they are, all at one moment."""

    def steps(self, prompt_id: str) -> Steps | None:
        """Of the prompt that runs; None if it is another one."""

    def stop(self, prompt_id: str) -> None:
        """Take it off the queue, or interrupt it if it is the one that runs; else nothing."""
