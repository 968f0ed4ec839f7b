"""Child processes that are spoken to in lines. Standard library only."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

END_SECONDS = 20.0
"""How long a child that was told to end may take; tearing down a large model takes seconds."""
TAIL_LINES = 12


class ChildError(Exception):
    """A child failed or took too long. ``tail`` is the end of what it wrote to stderr."""

    def __init__(self, message: str, tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tail = tuple(tail)


class LineProcess:
    """One child: lines to its stdin, lines from its stdout; its stderr goes to a file.

    It is gone, and what it held with it, when the ``with`` block ends.
    Threads: one; a thread of its own reads the child's lines.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
    ) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                list(command),
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="bench-lines")
        self._reader.start()

    def __enter__(self) -> LineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(kill=kind is not None)

    def say(self, line: str) -> None:
        """Raises: ChildError if the child is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._gone() from None

    def hear(self, seconds: float) -> str:
        """The child's next line. Raises: ChildError if none comes in time, or it ended."""
        try:
            line = self._lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise ChildError(f"gave no answer within {seconds:.0f} s", self.tail()) from None
        if line is None:
            raise self._gone()
        return line

    def close(self, kill: bool = False) -> None:
        """End the child: by the end of its input, or at once."""
        assert self._process.stdin is not None
        if kill:
            self._process.kill()
        with contextlib.suppress(OSError):  # a broken pipe: the child was faster
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def tail(self) -> list[str]:
        """The last lines that the child wrote to stderr."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]

    def _gone(self) -> ChildError:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return ChildError("closed its output and went on", self.tail())
        return ChildError(f"ended with status {code}", self.tail())

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


class Deadline:
    """Seconds that are left of a limit."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()
