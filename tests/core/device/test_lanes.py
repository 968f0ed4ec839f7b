"""Copy lanes: every byte once, every job answered once, and nothing left when they are closed."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_core.device import CopyPiece
from offload_core.device.lanes import CopyLanes
from offload_core.values import StateError

ROOT = Path(__file__).parents[3]
CHUNK = 64
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Event:
    """What a lane gives for a segment: which lane, and its how-many-eth."""

    lane: int
    number: int


class FakeLane:
    """Copies at once; ``on_carry`` may hold it at a gate or raise.

    ``started`` are the ``after`` of each ``begin``; ``open`` is what was carried and not settled.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.carried = 0
        self.started: list[object] = []
        self.open = 0
        self.settled = 0
        self.closed = False
        self.thread: threading.Thread | None = None
        self.on_enter: Callable[[], None] = lambda: None
        self.on_begin: Callable[[object], None] = lambda after: None
        self.on_carry: Callable[[FakeLane], None] = lambda lane: None
        self.on_settle: Callable[[], None] = lambda: None

    def enter_thread(self) -> None:
        assert self.thread is None
        self.thread = threading.current_thread()
        self.on_enter()

    def begin(self, after: object) -> None:
        assert threading.current_thread() is self.thread
        self.on_begin(after)
        self.started.append(after)

    def carry(self, destination: torch.Tensor, address: int) -> Event:
        assert threading.current_thread() is self.thread
        assert not self.closed
        assert 0 < destination.numel() <= CHUNK
        self.carried += 1
        self.open += 1
        self.on_carry(self)
        ctypes.memmove(destination.data_ptr(), address, destination.numel())
        return Event(self.index, self.carried)

    def settle(self) -> None:
        self.on_settle()
        self.settled += 1
        self.open = 0

    def close(self) -> None:
        assert self.thread is None or not self.thread.is_alive()
        assert not self.closed
        self.closed = True


class Gate:
    """Holds whoever comes while it is shut; tells when so many are inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_open = False

    def __call__(self, *_: object) -> None:
        with self._changed:
            self._inside += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_open, PATIENCE_SECONDS), "never opened"
            self._inside -= 1

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def shut(self) -> None:
        with self._changed:
            self._is_open = False

    def await_inside(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._inside >= count, PATIENCE_SECONDS), (
                f"{self._inside} of {count} came"
            )


@dataclass
class Setup:
    """Fake lanes under test."""

    fakes: list[FakeLane]
    lanes: CopyLanes

    def submit(
        self, *sizes: int, after: object = None, join: Any = None, settle: Any = None
    ) -> Job:
        sources = [torch.randint(1, 256, (size,), dtype=torch.uint8) for size in sizes]
        destinations = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        joined: list[Sequence[Event]] = []

        def keep(events: Sequence[Event]) -> object:
            joined.append(events)
            return tuple(events)

        pieces = [
            CopyPiece(destination, source, False)
            for destination, source in zip(destinations, sources, strict=True)
        ]
        future = self.lanes.submit(pieces, after, join or keep, settle)
        return Job(sources, destinations, future, joined)


@dataclass
class Job:
    """What was given to the lanes and what came of it."""

    sources: list[torch.Tensor]
    destinations: list[torch.Tensor]
    future: Future[Any]
    joined: list[Sequence[Event]]

    def arrived(self) -> bool:
        """Every byte is there, and the join was asked once, for one event a lane."""
        assert self.future.exception(PATIENCE_SECONDS) is None
        assert len(self.joined) == 1
        assert self.future.result() == tuple(self.joined[0])
        lanes = [event.lane for event in self.joined[0]]
        assert len(lanes) == len(set(lanes))
        pairs = zip(self.destinations, self.sources, strict=True)
        return all(torch.equal(destination, source) for destination, source in pairs)


@pytest.fixture
def make() -> Iterator[Callable[..., Setup]]:
    made: list[Setup] = []

    def of(count: int = 2) -> Setup:
        fakes = [FakeLane(index) for index in range(count)]
        made.append(Setup(fakes, CopyLanes(fakes, CHUNK)))
        return made[-1]

    yield of
    for setup in made:
        setup.lanes.close(PATIENCE_SECONDS)
        for fake in setup.fakes:
            assert fake.closed
            assert fake.thread is None or not fake.thread.is_alive()


# Bytes


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0,),
        (1,),
        (CHUNK - 1,),
        (CHUNK,),
        (CHUNK + 1,),
        (10 * CHUNK + 3,),
        (0, 1, 0, CHUNK + 1, CHUNK - 1, 0, 7 * CHUNK),
        tuple(range(2 * CHUNK)),
    ],
    ids=lambda sizes: str(sizes)[:20] if isinstance(sizes, tuple) else None,
)
def test_every_byte_arrives_whatever_the_sizes(
    make: Callable[..., Setup], count: int, sizes: tuple[int, ...]
) -> None:
    setup = make(count)
    for _ in range(3):
        assert setup.submit(*sizes).arrived()
    assert sum(fake.carried for fake in setup.fakes) == 3 * sum(-(-n // CHUNK) for n in sizes)


def test_what_lies_beside_a_piece_is_left_alone(make: Callable[..., Setup]) -> None:
    setup = make(3)
    memory = torch.zeros(300, dtype=torch.uint8)
    source = torch.full((100,), 7, dtype=torch.uint8)
    piece = CopyPiece(memory[100:200], source, False)
    setup.lanes.submit([piece], None, lambda events: Event(0, 0)).result(PATIENCE_SECONDS)
    assert memory.tolist() == [0] * 100 + [7] * 100 + [0] * 100


def test_nothing_to_carry_is_answered_at_once_and_needs_no_thread(
    make: Callable[..., Setup],
) -> None:
    setup = make(2)
    threads = threading.active_count()
    job = setup.submit(0, 0)
    assert job.future.done()
    assert job.future.result() == ()
    assert threading.active_count() == threads


# Jobs side by side


@pytest.mark.parametrize("fails", ["lane", "join", ""])
def test_what_is_under_way_beside_the_lanes_is_settled_before_an_error_is_told(
    make: Callable[..., Setup], fails: str
) -> None:
    setup = make(2)
    was_told: list[bool] = []
    jobs: list[Job] = []
    is_given = threading.Event()

    def fail(*_: object) -> None:
        raise ValueError("broken")

    def settle() -> None:
        assert is_given.wait(PATIENCE_SECONDS)
        was_told.append(jobs[0].future.done())
        raise OSError("even if it cannot")

    if fails == "lane":
        setup.fakes[0].on_carry = setup.fakes[1].on_carry = fail
    join = fail if fails == "join" else None
    jobs.append(setup.submit(5 * CHUNK, join=join, settle=settle))
    is_given.set()
    error = jobs[0].future.exception(PATIENCE_SECONDS)
    assert was_told == ([False] if fails else [])
    assert isinstance(error, ValueError) is bool(fails)


def test_all_lanes_work_on_one_job_at_once(make: Callable[..., Setup]) -> None:
    setup = make(3)
    barrier = threading.Barrier(3)
    for fake in setup.fakes:
        fake.on_carry = lambda lane: lane.carried == 1 and barrier.wait(PATIENCE_SECONDS)
    job = setup.submit(3 * CHUNK)
    assert job.arrived()
    assert sorted(event.lane for event in job.joined[0]) == [0, 1, 2]


def test_a_lane_that_finds_nothing_left_goes_on_with_the_next_job(
    make: Callable[..., Setup],
) -> None:
    setup = make(2)
    gate = Gate()
    for fake in setup.fakes:
        fake.on_carry = gate
    first, second = setup.submit(CHUNK, after="a"), setup.submit(CHUNK, after="b")
    # Both are inside, each with the whole of one job: the second does not wait for the first.
    gate.await_inside(2)
    assert sorted(after for fake in setup.fakes for after in fake.started) == ["a", "b"]
    gate.open()
    assert first.arrived()
    assert second.arrived()


def test_a_job_behind_one_that_is_held_up_is_answered_first(make: Callable[..., Setup]) -> None:
    setup = make(2)
    gate, held = Gate(), threading.Event()

    def hold_the_first(lane: FakeLane) -> None:
        if not held.is_set():
            held.set()
            gate()

    for fake in setup.fakes:
        fake.on_carry = hold_the_first
    first = setup.submit(CHUNK)
    gate.await_inside(1)
    others = [setup.submit(5 * CHUNK + 1) for _ in range(5)]
    assert all(job.arrived() for job in others)
    assert not first.future.done()
    gate.open()
    assert first.arrived()


def test_every_job_is_joined_once_from_its_own_lanes_last_events(
    make: Callable[..., Setup],
) -> None:
    setup = make(3)
    seen: list[tuple[torch.Tensor, Event]] = []
    lock = threading.Lock()
    for fake in setup.fakes:
        carry = fake.carry

        def noted(
            destination: torch.Tensor, address: int, carry: Callable[..., Event] = carry
        ) -> Event:
            event = carry(destination, address)
            with lock:
                seen.append((destination, event))
            return event

        fake.carry = noted  # type: ignore[method-assign]
    jobs = [setup.submit(CHUNK * (1 + number % 5), 3) for number in range(40)]
    assert all(job.arrived() for job in jobs)
    for job in jobs:
        last: dict[int, Event] = {}
        storages = {tensor.untyped_storage().data_ptr() for tensor in job.destinations}
        for destination, event in seen:
            if destination.untyped_storage().data_ptr() in storages:
                last[event.lane] = max(
                    event, last.get(event.lane, event), key=lambda event: event.number
                )
        assert set(job.joined[0]) == set(last.values())


def test_a_lane_waits_for_the_memory_before_its_first_segment_of_a_job_and_only_then(
    make: Callable[..., Setup],
) -> None:
    setup = make(1)
    for number in range(3):
        assert setup.submit(5 * CHUNK, CHUNK, after=number).arrived()
    assert setup.fakes[0].started == [0, 1, 2]


# Errors


class Broken(Exception):
    pass


class BrokenForGood(BaseException):
    pass


@pytest.mark.parametrize("kind", [Broken, BrokenForGood])
@pytest.mark.parametrize("segment", [1, 3, 8])
def test_a_segment_that_fails_fails_its_job_alone_and_drops_the_rest(
    make: Callable[..., Setup], kind: type[BaseException], segment: int
) -> None:
    setup = make(1)
    (fake,) = setup.fakes
    error = kind("no")

    def fail(lane: FakeLane) -> None:
        if lane.carried == segment:
            raise error

    fake.on_carry = fail
    job = setup.submit(8 * CHUNK)
    behind = setup.submit(2 * CHUNK)
    assert job.future.exception(PATIENCE_SECONDS) is error
    assert job.joined == []
    assert behind.arrived()
    assert fake.carried == segment + 2
    assert setup.submit(3 * CHUNK).arrived()


@pytest.mark.parametrize("kind", [Broken, BrokenForGood])
def test_a_job_fails_only_once_all_its_lanes_are_done_with_it_and_settled(
    make: Callable[..., Setup], kind: type[BaseException]
) -> None:
    setup = make(3)
    gate, failed = Gate(), threading.Event()
    others = threading.Barrier(3)

    def one_fails_and_two_are_held(lane: FakeLane) -> None:
        if lane.carried > 1:
            return
        others.wait(PATIENCE_SECONDS)
        if lane.index == 1:
            raise kind("no")
        gate()

    def settled_before_it_is_told() -> None:
        assert not job.future.done()
        assert failed.is_set()

    for fake in setup.fakes:
        fake.on_carry = one_fails_and_two_are_held
        fake.on_settle = settled_before_it_is_told
    job = setup.submit(300 * CHUNK)
    gate.await_inside(2)
    # Lane 1 is free for this one only after it has failed that one.
    assert setup.submit(CHUNK).arrived()
    assert not job.future.done()
    failed.set()
    gate.open()
    assert isinstance(job.future.exception(PATIENCE_SECONDS), kind)
    # One segment a lane was in hand; the other 297 were dropped.
    assert [fake.carried for fake in setup.fakes] == [1, 2, 1]
    assert [fake.settled for fake in setup.fakes] == [1, 1, 1]
    assert setup.submit(9 * CHUNK).arrived()


def test_the_first_of_several_errors_is_the_jobs(make: Callable[..., Setup]) -> None:
    setup = make(2)
    inside, gate = threading.Barrier(2), Gate()

    def fail_in_turn(lane: FakeLane) -> None:
        inside.wait(PATIENCE_SECONDS)
        if lane.index == 1:
            gate()
        raise Broken(lane.index)

    for fake in setup.fakes:
        fake.on_carry = fail_in_turn
    answers = []
    job = setup.submit(2 * CHUNK)
    job.future.add_done_callback(answers.append)
    gate.await_inside(1)
    # Lane 0 failed, or will before lane 1 may: it is asked for another job's segment meanwhile.
    setup.fakes[0].on_carry = lambda lane: None
    assert setup.submit(CHUNK).arrived()
    gate.open()
    error = job.future.exception(PATIENCE_SECONDS)
    assert isinstance(error, Broken)
    assert error.args == (0,)
    assert answers == [job.future]


@pytest.mark.parametrize("kind", [Broken, BrokenForGood])
def test_a_wait_that_cannot_be_begun_fails_its_job_and_is_begun_anew_for_the_next(
    make: Callable[..., Setup], kind: type[BaseException]
) -> None:
    setup = make(1)
    (fake,) = setup.fakes
    refusing = [True]

    def refuse(after: object) -> None:
        if refusing.pop():
            raise kind("no event")

    fake.on_begin = refuse
    job = setup.submit(4 * CHUNK, after="x")
    assert isinstance(job.future.exception(PATIENCE_SECONDS), kind)
    assert fake.carried == 0
    refusing.append(False)
    assert setup.submit(4 * CHUNK, after="y").arrived()
    assert fake.started == ["y"]


@pytest.mark.parametrize("kind", [Broken, BrokenForGood])
def test_a_join_that_fails_settles_and_answers_with_its_error(
    make: Callable[..., Setup], kind: type[BaseException]
) -> None:
    setup = make(2)

    def join(events: Sequence[Event]) -> Event:
        raise kind("no join")

    for sizes in ((5 * CHUNK,), (0,)):
        settled = [fake.settled for fake in setup.fakes]
        job = setup.submit(*sizes, join=join)
        assert isinstance(job.future.exception(PATIENCE_SECONDS), kind)
        assert [fake.settled for fake in setup.fakes] == [count + 1 for count in settled]
    assert setup.submit(5 * CHUNK).arrived()


def test_a_lane_that_cannot_settle_does_not_keep_the_error_from_its_owner(
    make: Callable[..., Setup],
) -> None:
    setup = make(2)

    def raises(*_: object) -> None:
        raise Broken("no")

    for fake in setup.fakes:
        fake.on_carry = raises
        fake.on_settle = raises
    assert isinstance(setup.submit(CHUNK).future.exception(PATIENCE_SECONDS), Broken)
    for fake in setup.fakes:
        fake.on_carry = lambda lane: None
    assert setup.submit(CHUNK).arrived()


@pytest.mark.parametrize("kind", [Broken, BrokenForGood])
def test_a_thread_that_cannot_enter_its_device_says_why_for_every_job_it_takes(
    make: Callable[..., Setup], kind: type[BaseException]
) -> None:
    setup = make(1)

    def refuse() -> None:
        raise kind("no such device")

    setup.fakes[0].on_enter = refuse
    for _ in range(3):
        error = setup.submit(5 * CHUNK).future.exception(PATIENCE_SECONDS)
        assert isinstance(error, kind)
    assert setup.fakes[0].carried == 0


# The end


def test_closing_ends_the_threads_and_gives_the_chunks_back(make: Callable[..., Setup]) -> None:
    setup = make(4)
    assert setup.submit(40 * CHUNK).arrived()
    threads = [fake.thread for fake in setup.fakes]
    setup.lanes.close(PATIENCE_SECONDS)
    assert not any(thread is not None and thread.is_alive() for thread in threads)
    assert all(fake.closed for fake in setup.fakes)
    with pytest.raises(StateError, match="the copy lanes were closed; load the model again"):
        setup.submit(CHUNK)
    for fake in setup.fakes:
        fake.closed = False  # the fixture closes once more, which is allowed


def test_jobs_that_wait_when_the_lanes_are_closed_are_answered(make: Callable[..., Setup]) -> None:
    setup = make(2)
    gate = Gate()
    for fake in setup.fakes:
        fake.on_carry = gate
    jobs = [setup.submit(5 * CHUNK) for _ in range(4)]
    gate.await_inside(2)
    closer = threading.Thread(target=setup.lanes.close, args=(PATIENCE_SECONDS,))
    closer.start()
    # Those that no lane has in hand are answered while the others are still held.
    for job in jobs[1:]:
        error = job.future.exception(PATIENCE_SECONDS)
        assert isinstance(error, StateError)
        assert "the copy lanes were closed" in str(error)
    assert not jobs[0].future.done()
    gate.open()
    assert isinstance(jobs[0].future.exception(PATIENCE_SECONDS), StateError)
    closer.join(PATIENCE_SECONDS)
    assert [fake.carried for fake in setup.fakes] == [1, 1]
    for fake in setup.fakes:
        assert fake.closed
        fake.closed = False


def test_a_stuck_lane_keeps_its_memory_and_can_be_closed_later(make: Callable[..., Setup]) -> None:
    setup = make(2)
    gate = Gate()
    setup.fakes[1].on_carry = gate
    setup.fakes[0].on_carry = lambda lane: lane.carried == 1 and gate.await_inside(1)
    job = setup.submit(10 * CHUNK)
    gate.await_inside(1)
    for _ in range(2):
        with pytest.raises(StateError, match=r"courier-lane-1 did not end its copy within 0\.01 s"):
            setup.lanes.close(0.01)
        assert not any(fake.closed for fake in setup.fakes)
    assert not job.future.done()
    gate.open()
    setup.lanes.close(PATIENCE_SECONDS)
    assert job.future.done()
    for fake in setup.fakes:
        assert fake.closed
        fake.closed = False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_fails_while_the_lanes_are_being_closed_is_answered_once(
    make: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, answered = Gate(), threading.Event()
    closing: list[threading.Thread] = []

    class LyingCondition(threading.Condition):
        """Lets the lane fail, and its job be answered, as soon as the closer lets go of it."""

        def __exit__(self, *details: Any) -> None:
            super().__exit__(*details)
            if threading.current_thread() in closing and not answered.is_set():
                fails.open()
                assert answered.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(threading, "Condition", LyingCondition)
    setup = make(1)
    monkeypatch.undo()

    def fail(lane: FakeLane) -> None:
        fails()
        raise Broken("no")

    setup.fakes[0].on_carry = fail
    job = setup.submit(5 * CHUNK)
    job.future.add_done_callback(lambda future: answered.set())
    fails.await_inside(1)
    closing.append(threading.current_thread())
    try:
        setup.lanes.close(PATIENCE_SECONDS)
    finally:
        setup.fakes[0].closed = False
    assert isinstance(job.future.exception(PATIENCE_SECONDS), Broken)


@pytest.mark.parametrize("outcome", ["arrives", "fails"])
def test_an_idle_lane_keeps_nothing_of_its_last_job(
    make: Callable[..., Setup], outcome: str
) -> None:
    setup = make(2)
    if outcome == "fails":

        def fail(lane: FakeLane) -> None:
            raise Broken("no")

        for fake in setup.fakes:
            fake.on_carry = fail
    gc.disable()
    try:
        job = setup.submit(5 * CHUNK)
        assert (job.future.exception(PATIENCE_SECONDS) is None) is (outcome == "arrives")
        watched = [weakref.ref(tensor) for tensor in (*job.sources, *job.destinations)]
        watched.append(weakref.ref(job.future))
        del job
        # Each goes back to its wait before it can be asked: nothing here is timed.
        deadline = time.monotonic() + 10
        while any(ref() is not None for ref in watched) and time.monotonic() < deadline:
            os.sched_yield()
        assert [ref() for ref in watched] == [None] * 3
    finally:
        gc.enable()
        gc.collect()


def test_closed_lanes_are_kept_by_nobody() -> None:
    fakes = [FakeLane(index) for index in range(2)]
    lanes = CopyLanes(fakes, CHUNK)
    Setup(fakes, lanes).submit(5 * CHUNK).future.result(PATIENCE_SECONDS)
    gone = weakref.ref(lanes)
    gc.disable()
    try:
        lanes.close(PATIENCE_SECONDS)
        del lanes
        for fake in fakes:
            fake.thread = None
        assert gone() is None
    finally:
        gc.enable()


EXIT = """
import sys, threading
import torch
from offload_core.device import CopyPiece
from offload_core.device.lanes import CopyLanes

count, kind = int(sys.argv[1]), sys.argv[2]
held, never = threading.Semaphore(0), threading.Event()

class Lane:
    def enter_thread(self): pass
    def begin(self, after): pass
    def carry(self, destination, address):
        if kind == "stuck":
            held.release()
            never.wait()
        if kind == "busy":
            held.release()
            ending.wait()
            if threading.current_thread().name.endswith(sys.argv[3]):
                never.wait(0.3)  # so long takes the copy
            print("carried ", end="", flush=True)
        return 1
    def settle(self): pass
    def close(self): pass

memory = torch.zeros(count * 10, dtype=torch.uint8)
ending = threading.Event()
lanes = CopyLanes([Lane() for _ in range(count)], 10)
future = lanes.submit([CopyPiece(memory, memory.clone(), False)], None, len)
if kind == "idle":
    future.result()
else:
    for _ in range(count):
        held.acquire()
threading._register_atexit(ending.set)
"""


def ended(code: str, count: int, kind: str, slow: str = "") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code, str(count), kind, slow],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("count", [1, 3])
def test_idle_lanes_do_not_hold_up_the_exit(count: int) -> None:
    done = ended(timed(), count, "idle")
    assert (done.returncode, done.stderr) == (0, b"")
    assert float(done.stdout) < 1


def timed() -> str:
    # Handlers run last in, first out, so this one, put before torch's and ours, runs after them.
    clock = "import atexit, time\natexit.register(lambda: print(time.monotonic() - start))\n"
    return clock + EXIT + "\nstart = time.monotonic()\n"


@pytest.mark.parametrize("count", [1, 2, 8])
def test_lanes_that_are_stuck_for_ever_hold_up_the_exit_for_about_a_second_together(
    count: int,
) -> None:
    done = ended(timed(), count, "stuck")
    assert (done.returncode, done.stderr) == (0, b"")
    assert float(done.stdout) < 3


@pytest.mark.parametrize(("count", "slow"), [(1, "0"), (3, "0"), (3, "1"), (3, "2")])
def test_the_exit_waits_for_a_segment_under_way(count: int, slow: str) -> None:
    done = ended(EXIT, count, "busy", slow)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"carried " * count
