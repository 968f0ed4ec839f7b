"""Keeping prompts from beginning while an order works, without a lock of ComfyUI's.

The thread that runs prompts waits for the next one on a condition of the queue. While an order
works, that condition is a ``PromptGate``, which this thread does not leave before the order has
ended. The queue's lock is free meanwhile: prompts arrive, are shown and are taken off as ever. As
soon as the order has ended, the queue has its own condition again. None of its methods is replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_POLL_SECONDS = 0.02
_TIDYING_SECONDS = 30.0


class PromptRunsError(Exception):
    """A prompt runs."""


class PromptGate(threading.Condition):
    """What the thread that runs prompts waits on while an order works.

    Once it is open it is a condition like any other: it may have been put back into a queue by
    somebody who found it there.

    Threads: as a condition.
    """

    def __init__(self, lock: Any) -> None:
        """``lock``: the queue's own, so that whoever holds that may wait and notify here."""
        super().__init__(lock)
        self.is_reached = threading.Event()
        """Set once the thread that runs prompts waits here, where it does nothing else."""
        self._is_open = False

    def wait(self, timeout: float | None = None) -> bool:
        """As a condition's; before the gate is open, until it is."""
        if self._is_open:
            return super().wait(timeout)
        self.is_reached.set()
        while not self._is_open:
            super().wait()
        return True

    def open(self) -> None:
        """Let it go on. The lock is held."""
        self._is_open = True
        self.notify_all()


class PromptHold:
    """Sees to it that no prompt begins while an order works. One order at a time.

    Threads: any but the one that runs prompts; not twice by one thread.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()

    @contextmanager
    def held(
        self, queue: Any, wait: bool, check: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """While this is entered, the thread that runs prompts waits for the end of it.

        That no prompt is running is not enough. Between two prompts, and for ``/free``, that thread
        unloads models and cleans up; so it has to be where it waits for the next prompt.

        Args:
            queue: ComfyUI's ``PromptQueue``.
            wait: until the queue is empty; otherwise PromptRunsError while there is a prompt.
            check: called while this waits; what it raises ends the wait.
        """
        while not self._turn.acquire(timeout=_POLL_SECONDS):
            # An order that waits for the queue has its turn meanwhile.
            if not wait:
                refuse_prompts(queue)
            check()
        try:
            gate, before = _close(queue, wait)
            try:
                _wait_for_rest(queue, gate, wait, check)
                yield
            finally:
                _open(queue, gate, before)
        finally:
            self._turn.release()


def refuse_prompts(queue: Any) -> None:
    """Raises: PromptRunsError while there is a prompt."""
    if queue.currently_running or queue.queue:
        raise PromptRunsError


def _close(queue: Any, wait: bool) -> tuple[PromptGate, Any]:
    gate = PromptGate(queue.mutex)
    with queue.mutex:
        if not wait:
            refuse_prompts(queue)
        before, queue.not_empty = queue.not_empty, gate
        # Who waits there comes here.
        before.notify_all()
    return gate, before


def _open(queue: Any, gate: PromptGate, before: Any) -> None:
    with queue.mutex:
        if queue.not_empty is gate:
            queue.not_empty = before
        gate.open()


def _wait_for_rest(queue: Any, gate: PromptGate, wait: bool, check: Callable[[], None]) -> None:
    started = time.monotonic()
    while True:
        if gate.is_reached.wait(_POLL_SECONDS):
            if not queue.currently_running:
                return
            time.sleep(_POLL_SECONDS)  # somebody has several such threads
        elif not wait:
            refuse_prompts(queue)
            # Without a prompt it is tidying up, and comes to rest in a moment.
            if time.monotonic() - started >= _TIDYING_SECONDS:
                raise PromptRunsError
        check()
