"""What the client gives: a run as it is at one moment."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from ..errors import HeadlessError, RefusedError


class Keep(enum.Enum):
    """A figure that stays as it is. Not None: that is "automatic"."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP
Gib: TypeAlias = "float | Literal[Keep.KEEP] | None"

ENDS = ("done", "failed", "cancelled")


@dataclass(frozen=True)
class RunOptions:
    """How a workflow is run; the fields of ``POST /courier/v1/runs``.

    Attributes:
        name: what people call it.
        workflow: as the page saves it; ComfyUI writes it into pictures.
        sleep_after: the level at which all models sleep afterwards; 0: they stay awake.
        on_use: after that, what a prompt finds that needs one: ``"wake"`` or ``"refuse"``.
        time_limit_seconds: of the run itself, not of its time in the queue.
    """

    name: str | None = None
    workflow: Mapping[str, Any] | None = None
    wake_before: bool = False
    sleep_after: int = 0
    on_use: str = "wake"
    time_limit_seconds: float | None = None


@dataclass(frozen=True)
class OutputFile:
    """A file that a node wrote, by ComfyUI's own names for it."""

    node_id: str
    filename: str
    subfolder: str = ""
    type: str = "output"


@dataclass(frozen=True)
class Run:
    """A run as the server told it. Sizes are bytes, times seconds; see docs/headless.md.

    Attributes:
        state: ``queued``, ``running``, ``done``, ``failed``, ``cancelled``.
        ahead: prompts before it; None once it runs.
        node: ``id``, ``class_type``, ``title``, ``step``, ``steps`` of the node that runs.
        error: ``code``, ``message``, ``node``, ``class_type``, ``title``, ``exception``.
        raw: the answer itself, with everything that is not an attribute.
    """

    id: str
    state: str
    name: str | None = None
    ahead: int | None = None
    node: Mapping[str, Any] | None = None
    nodes_done: int = 0
    nodes: int = 0
    error: Mapping[str, Any] | None = None
    outputs: Mapping[str, Any] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Run:
        """Of an answer or of an event. Unknown fields are left in ``raw``.

        Raises: RefusedError where it is no run.
        """
        try:
            return cls._read(value)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
            raise not_understood("something that is no run") from None

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Run:
        return cls(
            id=str(value["id"]),
            state=str(value["state"]),
            name=value.get("name"),
            ahead=value.get("ahead"),
            node=_mapping(value, "node"),
            nodes_done=int(value.get("nodes_done") or 0),
            nodes=int(value.get("nodes") or 0),
            error=_mapping(value, "error"),
            outputs=_mapping(value, "outputs") or {},
            raw=value,
        )

    @property
    def has_ended(self) -> bool:
        """Whether the workflow is done, failed or cancelled; models may still be falling asleep."""
        return self.state in ENDS

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens, ``sleep_after`` included."""
        sleep = self.raw.get("sleep_after") or {}
        return self.has_ended and sleep.get("state") != "waiting"

    def files(self) -> Iterator[OutputFile]:
        """Every picture, video and sound that it wrote, by what each node showed."""
        for node_id, shown in self.outputs.items():
            for entries in shown.values() if isinstance(shown, Mapping) else ():
                for entry in entries if isinstance(entries, list) else ():
                    if isinstance(entry, Mapping) and isinstance(entry.get("filename"), str):
                        yield OutputFile(
                            str(node_id),
                            entry["filename"],
                            str(entry.get("subfolder") or ""),
                            str(entry.get("type") or "output"),
                        )


def _mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    found = value.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise TypeError(name)
    return found


@dataclass(frozen=True)
class RunEvent:
    """One server-sent event. ``kind``: ``state``, ``progress``, or at last ``end``."""

    number: int
    kind: str
    run: Run


class RunFailedError(HeadlessError):
    """A node failed. ``run`` has everything."""

    exit_status = 6
    code = "run_failed"

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


class RunCancelledError(RunFailedError):
    """The run was cancelled, interrupted by somebody else, or its time was up."""

    exit_status = 7
    code = "run_cancelled"


def not_understood(what: str) -> RefusedError:
    """For an answer that is JSON, and not of the form that this client knows."""
    text = f"the server answered with {what}; is its ComfyUI-Courier as new as this client?"
    return RefusedError(text, 200, "not_understood")
