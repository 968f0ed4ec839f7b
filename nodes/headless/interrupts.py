"""Ctrl-C, and being told to end, at a moment that is safe."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

HANG_UP = getattr(signal, "SIGHUP", None)
"""The terminal is gone; None where systems have no such thing."""
_SAME_WISH_SECONDS = 0.3
"""A terminal and a program that passes signals on make two of one Ctrl-C; the second must not end
what the first has begun, which is to cancel."""
_wished_at = -1.0


def _is_new_wish() -> bool:
    global _wished_at
    now = time.monotonic()
    is_new = now - _wished_at > _SAME_WISH_SECONDS
    if is_new:
        _wished_at = now
    return is_new


def stop(*_: object) -> None:
    """A handler: to be told to end is the same as Ctrl-C. Raises: KeyboardInterrupt."""
    if _is_new_wish():
        raise KeyboardInterrupt


def hang_up(*_: object) -> None:
    """A handler: the terminal is gone, so nobody reads what we write. Raises: KeyboardInterrupt."""
    leave_terminal()
    stop()


def leave_terminal() -> None:
    """What is written to it from now on goes nowhere, and is no error."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        with contextlib.suppress(OSError):
            if os.isatty(number):
                os.dup2(nothing, number)
    os.close(nothing)


@contextmanager
def held_back() -> Iterator[list[int]]:
    """Have Ctrl-C wait: in the middle of beginning something, nobody knows yet what to end.

    Gives a list with something in it if there was one; it is for the caller to raise it. The
    second is not held back, for where what was begun gives no answer.

    Threads: the main one.
    """
    asked: list[int] = []

    def ask(number: int, _: object) -> None:
        if not _is_new_wish():
            return
        if number == HANG_UP:
            leave_terminal()
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    # nohup's wish is that this one is not heard.
    hears_hang_up = HANG_UP is not None and signal.getsignal(HANG_UP) is not signal.SIG_IGN
    ends = [signal.SIGINT, signal.SIGTERM, *([HANG_UP] if hears_hang_up else [])]
    before = [signal.signal(number, ask) for number in ends]
    try:
        yield asked
    finally:
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)
