"""What may go wrong without a browser, and the exit status of the command for each.

HeadlessError            1  anything else of ours
  UsageError             2  an option or an override that cannot be meant
  WorkflowFileError      3  the file is no workflow, or cannot be converted
    ConverterMissingError   comfy-cli is not installed
  CheckError             4  the workflow does not fit this ComfyUI
  ConnectionLostError    5  nobody answers, or no longer
  RunFailedError         6  a node failed
  RunCancelledError      7  cancelled, interrupted, or its time was up
  RefusedError           8  the server said no: busy, full, asleep, not allowed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .faults import Fault
    from .records import Run

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


class ConverterMissingError(WorkflowFileError):
    """The workflow is as the page saves it, and nothing here can convert that."""

    code = "no_converter"


class CheckError(HeadlessError):
    """The workflow does not fit this ComfyUI. ``faults`` has all that is wrong with it."""

    exit_status = 4
    code = "check_failed"

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = faults
        count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
        lines = "\n".join(f"  {fault}" for fault in faults)
        super().__init__(f"the workflow does not fit this ComfyUI, {count}:\n{lines}")


class ConnectionLostError(HeadlessError):
    """Nobody answers at the address, or no longer."""

    exit_status = 5
    code = "no_answer"


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


def not_understood(what: str) -> RefusedError:
    """For an answer that is JSON, and not of the form that this client knows."""
    text = f"the server answered with {what}; is its ComfyUI-Courier as new as this client?"
    return RefusedError(text, 200, "not_understood")
