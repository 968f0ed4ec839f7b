"""What may go wrong without a browser, and the exit status of the command for each.

HeadlessError            1  anything else of ours
  UsageError             2  an option or an override that cannot be meant
  WorkflowFileError      3  the file is no workflow, or cannot be converted
  CheckError             4  the workflow does not fit this ComfyUI
  ConnectionLostError    5  nobody answers, or no longer
  RunFailedError         6  a node failed (beside Run, which it holds: client/records.py)
    RunCancelledError    7  cancelled, interrupted, or its time was up
  RefusedError           8  the server said no: busy, full, asleep, not allowed
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN_NODES = 8
STOPPED_STATUS = 130
"""Of the command, after Ctrl-C."""


class HeadlessError(Exception):
    """``str`` is the sentence for people: what failed, and what to do."""

    exit_status = 1
    code = "error"


class UsageError(HeadlessError):
    """An option or an override that cannot be meant."""

    exit_status = 2
    code = "usage"


class WorkflowFileError(HeadlessError):
    """What was given is no workflow."""

    exit_status = 3
    code = "not_a_workflow"


class FaultKind(enum.Enum):
    """What it is. The values are for programs and stay as they are."""

    MALFORMED = "malformed_node"
    MISSING_CLASS = "missing_class"
    MISSING_MODEL = "missing_model"
    MISSING_FILE = "missing_file"
    MISSING_INPUT = "missing_input"
    BAD_LINK = "bad_link"
    BAD_VALUE = "bad_value"
    CYCLE = "cycle"
    NO_OUTPUT = "no_output"


@dataclass(frozen=True)
class Fault:
    """``message`` says it in words, with what would do instead."""

    kind: FaultKind
    message: str
    node_id: str | None = None
    class_type: str | None = None
    title: str | None = None
    input: str | None = None
    nearest: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.node_id is None:
            return self.message
        return f"node {self.node_id} ({self.name}): {self.message}"

    @property
    def has_own_title(self) -> bool:
        """Whether people call it something else than its class."""
        return self.title not in (None, "", self.class_type)

    @property
    def name(self) -> str:
        """The class, and the title where it is another."""
        kind = self.class_type or "no class"
        return f"{kind} {self.title!r}" if self.has_own_title else kind

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "kind": self.kind.value,
            "message": self.message,
            "node": self.node_id,
            "class_type": self.class_type,
            "title": self.title,
            "input": self.input,
            "nearest": list(self.nearest),
        }


def grouped(faults: Sequence[Fault]) -> list[str]:
    """A line for each, and one for all nodes of a class of which the same is to be said."""
    alike: dict[Any, list[Fault]] = {}
    for place, fault in enumerate(faults):
        key = place if fault.node_id is None else (fault.kind, fault.class_type, fault.message)
        alike.setdefault(key, []).append(fault)
    return [str(group[0]) if len(group) == 1 else _line_of(group) for group in alike.values()]


def _line_of(faults: Sequence[Fault]) -> str:
    named = [
        f"{fault.node_id} {fault.title!r}" if fault.has_own_title else str(fault.node_id)
        for fault in faults
    ]
    shown = ", ".join(named[:_SHOWN_NODES])
    more = len(named) - _SHOWN_NODES
    shown += f" and {more} more" if more > 0 else ""
    return f"nodes {shown} ({faults[0].class_type or 'no class'}): {faults[0].message}"


class CheckError(HeadlessError):
    """The workflow does not fit this ComfyUI. ``faults`` has all that is wrong with it."""

    exit_status = 4
    code = "check_failed"

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = faults
        count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
        lines = "\n".join(f"  {line}" for line in grouped(faults))
        super().__init__(f"the workflow does not fit this ComfyUI, {count}:\n{lines}")


class ConnectionLostError(HeadlessError):
    """Nobody answers at the address, or no longer."""

    exit_status = 5
    code = "no_answer"


class RefusedError(HeadlessError):
    """The server answered, and said no.

    Attributes:
        status: of HTTP.
        code: the server's word for it, such as ``busy``; it stays as it is.
        body: the whole answer: a receipt, or what is wrong with each node.
    """

    exit_status = 8

    def __init__(self, message: str, status: int, code: str, body: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.body = body
