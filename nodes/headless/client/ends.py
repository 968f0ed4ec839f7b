"""What an end means, in words and as an exception. Pure."""

from __future__ import annotations

from .records import Run, RunCancelledError, RunFailedError


def check_ended_well(run: Run) -> Run:
    """``run``, where it is done. Raises: RunFailedError, RunCancelledError."""
    if run.state == "done":
        return run
    error = run.error or {}
    message = str(error.get("message") or "it ended without a reason")
    if run.state == "cancelled":
        # Of a time limit the server's sentence says so itself.
        is_limit = error.get("code") == "time_limit"
        text = f"the run has ended: {message}" if is_limit else f"the run was stopped: {message}"
        raise RunCancelledError(text, run)
    node = error.get("node")
    if node is None:
        raise RunFailedError(f"the run failed: {message}", run)
    kind, title = error.get("class_type"), error.get("title")
    name = kind if title in (None, "", kind) else f"{kind} {title!r}"
    exception = str(error.get("exception") or "an error").rpartition(".")[2]
    raise RunFailedError(f"node {node} ({name}) failed with {exception}: {message}", run)


def unreachable_text(address: str, error: Exception) -> str:
    """Nobody answers."""
    reason = getattr(error, "reason", None) or error
    what = str(reason) or type(reason).__name__
    return (
        f"no answer from {address} ({what}); is ComfyUI running there? Start it, name another with "
        "--server, or let this command start one with --comfyui PATH"
    )


def lost_text(address: str, run_id: str) -> str:
    """Nobody answers any more."""
    return (
        f"{address} does not answer any more; what became of run {run_id} is not known. If ComfyUI "
        "was stopped, the run is lost; if it still runs, so does the run"
    )
