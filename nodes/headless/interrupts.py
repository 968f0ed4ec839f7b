"""Ctrl-C, and being told to end, at a moment that is safe."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_ENDS = (signal.SIGINT, signal.SIGTERM)


def stop(*_: object) -> NoReturn:
    """A handler: to be told to end is the same as Ctrl-C."""
    raise KeyboardInterrupt


@contextmanager
def held_back() -> Iterator[list[int]]:
    """Have Ctrl-C wait: in the middle of beginning something, nobody knows yet what to end.

    Gives a list with something in it if there was one; it is for the caller to raise it. The
    second is not held back, for where what was begun gives no answer.

    Threads: the main one.
    """
    asked: list[int] = []

    def ask(number: int, _: object) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    before = [signal.signal(number, ask) for number in _ENDS]
    try:
        yield asked
    finally:
        for number, handler in zip(_ENDS, before, strict=True):
            signal.signal(number, handler)
