"""Copy lanes: threads that carry bytes which no device can read by itself, each through its own
page-locked chunks.

One thread's ``memmove`` is slower than the link, so several run side by side, each with chunks that
no other touches: there is nothing to hand over and no thread waits for another. Several jobs may be
out at once: a lane that finds nothing left of one goes on with the next, so the last pieces of a
layer overlap with the first of the layer behind it.
"""

from __future__ import annotations

import itertools
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..values import EXIT_SECONDS, StateError
from .backend import CopyPiece, DeviceEvent


class Lane(Protocol):
    """One lane's chunks and its own stream. Threads: the lane's thread, but ``settle`` any."""

    def enter_thread(self) -> None:
        """Make device and stream current for the calling thread."""

    def begin(self, after: DeviceEvent | None) -> None:
        """What is carried from here on starts once ``after`` has passed."""

    def carry(self, destination: torch.Tensor, address: int) -> DeviceEvent:
        """Fill ``destination`` (uint8, 1-d, on the device, at most a chunk) from host memory.

        Returns: an event that passes when the bytes are there; the host bytes were read by then.
        """

    def settle(self) -> None:
        """Wait until nothing that was begun is under way."""

    def close(self) -> None:
        """Give the chunks back. Only after the thread has ended."""


Join = Callable[[Sequence[DeviceEvent]], DeviceEvent]
"""One event that passes once all of those have. Called in a lane's thread."""

Settle = Callable[[], None]
"""Waits for what the shipment has under way beside the lanes. Called before an error is told."""


@dataclass(eq=False)
class _Job:
    """Pieces of one shipment. All fields from ``taken`` on are guarded by the owner's lock."""

    number: int
    pieces: tuple[CopyPiece, ...]
    after: DeviceEvent | None
    segments: list[tuple[int, int, int]]
    """(piece, start, length), each within one chunk."""
    future: Future[DeviceEvent]
    join: Join
    settle: Settle | None
    taken: int = 0
    unfinished: int = 0
    is_answered: bool = False
    error: BaseException | None = None
    events: dict[int, DeviceEvent] = field(default_factory=dict)
    """The last one of each lane that took part: its stream passes them in order."""


class CopyLanes:
    """The threads. They are started by the first job.

    Every job's future is answered exactly once, after all that was issued for it either has an
    event or has been waited for. A lane survives whatever its work raises: the error belongs to
    the job.

    Threads: ``submit`` and ``close`` from any, never both at once. Fields under ``_wake``:
    ``_jobs``, ``_closed``, ``_threads``, and what ``_Job`` says.
    """

    def __init__(self, lanes: Sequence[Lane], chunk_bytes: int) -> None:
        self._lanes = tuple(lanes)
        self._chunk_bytes = chunk_bytes
        self._wake = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._numbers = itertools.count(1)
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(
        self,
        pieces: Sequence[CopyPiece],
        after: DeviceEvent | None,
        join: Join,
        settle: Settle | None = None,
    ) -> Future[DeviceEvent]:
        """Have the lanes carry ``pieces``; the future's event is what ``join`` makes of theirs.

        Raises: StateError once closed.
        """
        future: Future[DeviceEvent] = Future()
        segments = [
            (index, start, min(self._chunk_bytes, piece.source.numel() - start))
            for index, piece in enumerate(pieces)
            for start in range(0, piece.source.numel(), self._chunk_bytes)
        ]
        job = _Job(next(self._numbers), tuple(pieces), after, segments, future, join, settle)
        job.unfinished = len(segments)
        if not segments:
            self._answer(job)
            return future
        with self._wake:
            if self._closed:
                raise StateError("the copy lanes were closed; load the model again")
            if not self._threads:
                self._start()  # first: where no thread can be had, no job may be left behind
            self._jobs.append(job)
            self._wake.notify_all()
        return future

    def close(self, patience_seconds: float) -> None:
        """End the threads, then give the chunks back. Raises StateError if one will not end; then
        nothing is freed."""
        with self._wake:
            self._closed = True
            unserved, threads = list(self._jobs), self._threads
            self._jobs.clear()
            self._wake.notify_all()
        for job in unserved:
            # What lanes have in hand is finished by them; the rest is answered here.
            self._finish(job, None, None, StateError("the copy lanes were closed"))
        for thread in threads:
            thread.join(patience_seconds)
            if thread.is_alive():
                raise StateError(
                    f"{thread.name} did not end its copy within {patience_seconds:g} s; its memory "
                    "is kept. The file it reads may be on a drive that stopped answering"
                )
        self._threads = []
        for lane in self._lanes:
            lane.close()

    def _start(self) -> None:
        # Daemons: a copy stuck on a dead network drive must not keep the process from ending.
        for number in range(len(self._lanes)):
            thread = threading.Thread(
                target=self._work, args=(number,), name=f"courier-lane-{number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                break  # the system has no more threads to give; fewer lanes carry as well
            self._threads.append(thread)
        # Of a thread and not of self, which the threads hold: it goes when they have been ended.
        weakref.finalize(self._threads[0], _end_at_exit, self)

    def _work(self, number: int) -> None:
        lane = self._lanes[number]
        begun = 0
        with torch.inference_mode(False), torch.no_grad():
            cannot = _error_of(lane.enter_thread)
            while (taken := self._take()) is not None:
                job, segment = taken
                event, error = None, cannot
                if error is None:
                    try:
                        if job.number != begun:
                            lane.begin(job.after)
                            begun = job.number
                        event = _carry(lane, job, segment)
                    except BaseException as problem:
                        error = problem
                self._finish(job, number, event, error)
                # Or the idle thread would keep the last job's memory, and its error's frames.
                del job, taken, event, error

    def _take(self) -> tuple[_Job, tuple[int, int, int]] | None:
        """The next segment of the oldest job; waits for one. None when closed."""
        with self._wake:
            while not self._jobs:
                if self._closed:
                    return None
                self._wake.wait()
            job = self._jobs[0]
            segment = job.segments[job.taken]
            job.taken += 1
            if job.taken == len(job.segments):
                self._jobs.popleft()
            return job, segment

    def _finish(
        self,
        job: _Job,
        lane: int | None,
        event: DeviceEvent | None,
        error: BaseException | None,
    ) -> None:
        """One segment (of ``lane``), or with an error all that nobody took, is done with."""
        with self._wake:
            if lane is not None:
                job.unfinished -= 1
                if event is not None:
                    job.events[lane] = event
            if error is not None:
                job.error = job.error or error
                job.unfinished -= len(job.segments) - job.taken
                job.taken = len(job.segments)
                if job in self._jobs:
                    self._jobs.remove(job)
            if job.unfinished or job.is_answered:
                return
            job.is_answered = True
        self._answer(job)

    def _answer(self, job: _Job) -> None:
        error, job.pieces = job.error, ()
        if error is None:
            try:
                job.future.set_result(job.join([*job.events.values()]))
                return
            except BaseException as problem:
                error = problem
        # No event tells when what was issued is done, and its memory is about to be taken for free.
        for lane in self._lanes:
            _error_of(lane.settle)
        if job.settle is not None:
            _error_of(job.settle)
        # They hold the job, and with it the future that is about to hold the error.
        traceback.clear_frames(error.__traceback__)
        job.error = None
        job.future.set_exception(error)


def _carry(lane: Lane, job: _Job, segment: tuple[int, int, int]) -> DeviceEvent:
    index, start, length = segment
    piece = job.pieces[index]
    destination = piece.destination[start : start + length]
    return lane.carry(destination, piece.source.data_ptr() + start)


def _error_of(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def _end_at_exit(lanes: CopyLanes) -> None:
    """Runs when the interpreter ends; when the thread object merely went, it does nothing."""
    with lanes._wake:
        lanes._closed = True
        lanes._jobs.clear()
        lanes._wake.notify_all()
        threads = list(lanes._threads)
    for thread in threads:
        thread.join(EXIT_SECONDS / len(threads))
