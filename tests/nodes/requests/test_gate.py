"""No prompt begins while an order works, and the queue's lock is free all that time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

SECONDS = 20.0


class Queue:
    """ComfyUI's queue, as far as its lock, its condition and its lists go."""

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self.not_empty = threading.Condition(self.mutex)
        self.queue: list[str] = []
        self.currently_running: dict[str, str] = {}
        self.flags: dict[str, bool] = {}

    def put(self, prompt: str) -> None:
        with self.mutex:
            self.queue.append(prompt)
            self.not_empty.notify()

    def get(self, timeout: float) -> str | None:
        with self.not_empty:
            while not self.queue:
                self.not_empty.wait(timeout=timeout)
                if not self.queue:
                    return None
            prompt = self.queue.pop(0)
            self.currently_running[prompt] = prompt
            return prompt

    def done(self, prompt: str) -> None:
        with self.mutex:
            del self.currently_running[prompt]

    def set_flag(self, name: str) -> None:
        with self.mutex:
            self.flags[name] = True
            self.not_empty.notify()

    def get_flags(self) -> dict[str, bool]:
        with self.mutex:
            flags, self.flags = self.flags, {}
            return flags


class Worker:
    """The thread that runs prompts, with a gate wherever a test wants it to stand still."""

    def __init__(self, queue: Queue, timeout: float = 1000.0) -> None:
        self.queue = queue
        self.began: list[str] = []
        self.freed: list[bool] = []
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()
        self.is_tidying = threading.Event()
        self.may_tidy = threading.Event()
        self.may_tidy.set()
        self.sleeps = False
        self.overlaps: list[str] = []
        self._timeout = timeout
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while True:
            prompt = self.queue.get(self._timeout)
            if prompt == "end":
                self.queue.done(prompt)
                return
            if prompt is not None:
                self._look(prompt)
                self.began.append(prompt)
                self.has_begun.set()
                assert self.may_end.wait(SECONDS)
                self.queue.done(prompt)
            if self.queue.get_flags():
                self._look("free")
                self.freed.append(True)
            self.is_tidying.set()
            assert self.may_tidy.wait(SECONDS)

    def _look(self, what: str) -> None:
        if self.sleeps:
            self.overlaps.append(what)


@pytest.fixture
def gate(pack: Any) -> Any:
    return pack.module("nodes.requests.gate")


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def worker(queue: Queue) -> Iterator[Worker]:
    made = Worker(queue)
    made.thread.start()
    yield made
    made.may_end.set()
    made.may_tidy.set()
    queue.put("end")
    made.thread.join(SECONDS)
    assert not made.thread.is_alive()


def until(is_so: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(2000):
        if is_so():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not come to pass")


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_everybody_gets_the_lock_while_an_order_works_and_no_prompt_begins(
    gate: Any, queue: Queue, worker: Worker
) -> None:
    before = queue.not_empty
    answered: list[str] = []

    def ask() -> None:
        with queue.mutex:
            answered.append("list")
        queue.put("a prompt")
        queue.set_flag("free_memory")
        answered.append("put")

    with gate.PromptHold().held(queue, wait=False):
        worker.sleeps = True
        in_thread(ask).join(SECONDS)
        assert answered == ["list", "put"]
        assert queue.queue == ["a prompt"], "it is shown as one that waits"
        assert worker.began == worker.freed == []
        worker.sleeps = False
    assert queue.not_empty is before
    until(lambda: worker.began == ["a prompt"] and bool(worker.freed))
    assert worker.overlaps == []


def test_prompts_and_freeing_that_come_at_any_moment_never_meet_an_order(
    gate: Any, queue: Queue, worker: Worker
) -> None:
    hold, begun = gate.PromptHold(), threading.Barrier(2)

    def ask() -> None:
        begun.wait(SECONDS)
        for number in range(300):
            queue.put(f"{number}")
            queue.set_flag("free_memory")

    asking = in_thread(ask)
    begun.wait(SECONDS)
    for _ in range(300):
        with contextlib.suppress(gate.PromptRunsError), hold.held(queue, wait=False):
            worker.sleeps = True
            worker.sleeps = False
    asking.join(SECONDS)
    with hold.held(queue, wait=True):
        assert len(worker.began) == 300
    assert worker.overlaps == []


def test_an_order_for_now_is_refused_while_a_prompt_runs(
    gate: Any, queue: Queue, worker: Worker
) -> None:
    worker.may_end.clear()
    queue.put("long")
    assert worker.has_begun.wait(SECONDS)
    before = queue.not_empty
    with pytest.raises(gate.PromptRunsError), gate.PromptHold().held(queue, wait=False):
        pass
    assert queue.not_empty is before


def test_an_order_for_now_waits_for_the_tidying_between_two_prompts(
    gate: Any, queue: Queue, worker: Worker
) -> None:
    worker.may_tidy.clear()
    queue.put("short")
    assert worker.is_tidying.wait(SECONDS)
    worked: list[bool] = []

    def order() -> None:
        with gate.PromptHold().held(queue, wait=False):
            worked.append(worker.may_tidy.is_set())

    before = queue.not_empty
    ordering = in_thread(order)
    until(lambda: queue.not_empty is not before)
    assert worked == []
    worker.may_tidy.set()
    ordering.join(SECONDS)
    assert worked == [True]


def test_an_order_that_waits_comes_when_the_queue_is_empty_and_can_be_called_off(
    gate: Any, queue: Queue, worker: Worker
) -> None:
    worker.may_end.clear()
    queue.put("one")
    queue.put("two")
    assert worker.has_begun.wait(SECONDS)
    hold, came, asked = gate.PromptHold(), threading.Event(), threading.Event()

    class CalledOffError(Exception):
        pass

    def call_off() -> None:
        raise CalledOffError

    def order() -> None:
        with hold.held(queue, wait=True, check=asked.set):
            assert worker.began == ["one", "two"]
            came.set()

    with pytest.raises(CalledOffError), hold.held(queue, True, call_off):
        pass
    ordering = in_thread(order)
    assert asked.wait(SECONDS)
    with pytest.raises(CalledOffError), hold.held(queue, True, call_off):
        pass
    with pytest.raises(gate.PromptRunsError), hold.held(queue, False):
        pass
    assert not came.is_set()
    worker.may_end.set()
    ordering.join(SECONDS)
    assert came.is_set()


def test_orders_come_one_after_the_other(gate: Any, queue: Queue, worker: Worker) -> None:
    hold, inside, may_go = gate.PromptHold(), threading.Event(), threading.Event()
    waited: list[bool] = []

    def first() -> None:
        with hold.held(queue, wait=False):
            inside.set()
            assert may_go.wait(SECONDS)

    def second() -> None:
        with hold.held(queue, False, lambda: may_go.set()):
            waited.append(may_go.is_set())

    threads = [in_thread(first)]
    assert inside.wait(SECONDS)
    threads.append(in_thread(second))
    for thread in threads:
        thread.join(SECONDS)
    assert waited == [True]


def test_two_copies_of_the_pack_leave_a_queue_that_waits_and_does_not_spin(
    gate: Any, queue: Queue, worker: Worker
) -> None:
    """The second finds the first one's gate there, and puts that back at its end."""
    inner_in, outer_out = threading.Event(), threading.Event()

    def inner() -> None:
        with gate.PromptHold().held(queue, wait=True):
            inner_in.set()
            assert outer_out.wait(SECONDS)

    with gate.PromptHold().held(queue, wait=False):
        outer_gate = queue.not_empty
        ordering = in_thread(inner)
        until(lambda: queue.not_empty is not outer_gate)
    assert inner_in.wait(SECONDS)
    outer_out.set()
    ordering.join(SECONDS)
    queue.put("after")
    until(lambda: worker.began == ["after"])


def test_an_open_gate_waits_as_any_condition(gate: Any) -> None:
    made = gate.PromptGate(threading.RLock())
    with made:
        made.open()
        assert made.wait(0.01) is False
