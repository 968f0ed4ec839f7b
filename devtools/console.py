"""Lines for people: progress that redraws on a terminal and stays readable in a pipe."""

from __future__ import annotations

import sys
import time
from typing import TextIO

BAR_WIDTH = 28
PIPE_INTERVAL_SECONDS = 5.0  # the first; each line in a pipe doubles the wait for the next


class DevError(Exception):
    """Something the reader of the terminal can act on; printed without a traceback."""


def say(text: str) -> None:
    """Print one line at once, also where the output is a pipe."""
    print(text, flush=True)  # noqa: T201 - a command line speaks by printing


def mib(count_bytes: int) -> str:
    return f"{count_bytes / 2**20:.1f} MiB"


class Progress:
    """One long step: ``advance`` it, and it shows a bar (terminal) or a line now and then (pipe).

    Threads: one at a time.
    """

    def __init__(self, title: str, total: int = 0, stream: TextIO | None = None) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self._stream = stream if stream is not None else sys.stdout
        self._live = self._stream.isatty()
        self._started = time.monotonic()
        self._next_line = self._started + PIPE_INTERVAL_SECONDS
        self._width = 0
        if not self._live:
            self._line(f"{title} ...")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        seconds = time.monotonic() - self._started
        outcome = "done" if kind is None else "failed"
        if self._live:
            self._redraw("")
            self._stream.write("\r")
        self._line(f"{self.title}: {outcome} in {seconds:.1f} s")

    def advance(self, note: str = "", steps: int = 1) -> None:
        self.done = min(self.done + steps, self.total) if self.total else self.done + steps
        self.show(note)

    def show(self, note: str = "") -> None:
        """Draw again without moving on; for waits whose length nobody knows."""
        now = time.monotonic()
        if self._live:
            self._redraw(f"{self.title} {self._bar()} {now - self._started:4.0f} s  {note}")
        elif now >= self._next_line:
            self._next_line = now + (now - self._started)
            seconds = f"{now - self._started:.0f} s"
            self._line(f"  {self.title}: {self._count()}{seconds}  {note}".rstrip())

    def _count(self) -> str:
        return f"{self.done}/{self.total}, " if self.total else ""

    def _bar(self) -> str:
        if not self.total:
            return ""
        filled = BAR_WIDTH * self.done // self.total
        return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {self.done}/{self.total}"

    def _redraw(self, text: str) -> None:
        text = text[:110]
        self._stream.write("\r" + text.ljust(self._width))
        self._width = len(text)
        self._stream.flush()

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()
