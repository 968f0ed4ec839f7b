"""What the command shows: a bar on a terminal, plain lines in a pipe, JSON where it is asked for.

Results go to standard output, everything on the way to standard error.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any, TextIO

from ..client.records import Run
from ..errors import HeadlessError
from ..text import one_line, plain

_BAR_CELLS = 24
_WIDTH = 100
_LINE_SECONDS = 10.0
"""In a pipe, the same node is told that often at most."""


class Console:
    """Where a command's words go.

    Threads: one.
    """

    def __init__(self, as_json: bool, quiet: bool = False, error: TextIO | None = None) -> None:
        self.as_json = as_json
        self._quiet = quiet
        self._error = error or sys.stderr
        self._is_terminal = self._error is not None and self._error.isatty()
        self._bar = ""
        self._told: tuple[Any, ...] = ()
        self._told_at = 0.0

    def note(self, text: str) -> None:
        """Something on the way."""
        if not self._quiet:
            self.clear()
            self._say(f"{plain(text)}\n")

    def progress(self, run: Run) -> None:
        """Where a run is: the bar, or a line where it is somewhere else than before."""
        if self._quiet:
            return
        if self._is_terminal:
            self._draw(one_line(progress_text(run, with_bar=True))[:_WIDTH])
            return
        place = (run.state, run.ahead, (run.node or {}).get("id"))
        now = time.monotonic()
        if place != self._told or now - self._told_at >= _LINE_SECONDS:
            self._told, self._told_at = place, now
            self._say(f"{one_line(progress_text(run, with_bar=False))}\n")

    def clear(self) -> None:
        """Take the bar away."""
        if self._bar:
            self._draw("")
            self._say("\r")

    def result(self, value: Any, text: str) -> None:
        """What the command was for."""
        self.clear()
        # ASCII: whatever reads it, in whatever encoding, reads the same.
        shown = json.dumps(value, indent=2) if self.as_json else plain(text)
        _write_out(shown)

    def failure(self, error: HeadlessError, more: dict[str, Any] | None = None) -> None:
        """Why there is no result."""
        self.clear()
        if not self.as_json:
            self._complain(error)
            return
        described = {"code": error.code, "message": str(error), **(more or {})}
        value = {"error": described, "exit_status": error.exit_status}
        try:
            _write_out(json.dumps(value, indent=2))
        except HeadlessError as lost:
            self._complain(error)
            if str(lost) != str(error):
                self._complain(lost)

    def _complain(self, error: HeadlessError) -> None:
        self._say(f"courier: {plain(str(error))}\n")

    def _draw(self, text: str) -> None:
        self._say(f"\r{text.ljust(len(self._bar))}")
        self._bar = text

    def _say(self, text: str) -> None:
        """What cannot be said is no reason to leave a run to itself."""
        if self._error is None:
            return  # Python has none where it was closed
        with contextlib.suppress(OSError, ValueError):
            self._error.write(text)
            self._error.flush()


def _write_out(text: str) -> None:
    if sys.stdout is None:
        raise HeadlessError("standard output is closed")
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise HeadlessError(f"standard output cannot be written: {error.strerror}") from None


def progress_text(run: Run, with_bar: bool) -> str:
    """One line on where a run is."""
    if run.state == "queued":
        ahead = run.ahead or 0
        return f"queued, {ahead} before it" if ahead else "queued"
    if run.has_ended:
        return run.state
    node = run.node
    where = f"{run.nodes_done}/{run.nodes} nodes"
    if node is None:
        return f"running  {where}"
    step, steps = int(node.get("step") or 0), max(1, int(node.get("steps") or 1))
    name = one_line(str(node.get("title") or node.get("class_type") or f"node {node.get('id')}"))
    of_steps = f" {step}/{steps}" if steps > 1 else ""
    if not with_bar:
        return f"running  {where}  node {node.get('id')} {name}{of_steps}"
    # Steps of the node that runs count as parts of it.
    share = min(1.0, (run.nodes_done + step / steps) / max(1, run.nodes))
    filled = int(share * _BAR_CELLS)
    return f"[{'#' * filled}{'.' * (_BAR_CELLS - filled)}] {where}  {name}{of_steps}"
