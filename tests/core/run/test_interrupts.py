"""An error or a Ctrl-C at any place of a run or a sleep leaves an engine that can go on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import offload_core.run.residency as residency
from offload_core.device import FakeBackend
from offload_core.host import HostLedger
from offload_core.run import LayerEngine
from offload_core.run.holding import Holding
from offload_core.values import Budget, EngineState, TransferError

from .test_sleep import Faulty, run

Over = Callable[..., LayerEngine]
BudgetFor = Callable[..., Budget]
ERRORS = [RuntimeError, KeyboardInterrupt]


class Interrupted(Faulty):
    """Raises what the test says, also where a run is measured and what arrived is rounded."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def _burn(self) -> None:
        # A Ctrl-C comes on the main thread and nowhere else.
        is_mine = threading.current_thread() is threading.main_thread()
        if self.fuse is not None and (is_mine or self.error is not KeyboardInterrupt):
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise self.error

    def recode(self, *args: Any) -> None:
        self._burn()
        super().recode(*args)

    def start_activation_peak(self) -> None:
        self._burn()
        super().start_activation_peak()


def homes(tiny: Any) -> dict[str, nn.Parameter]:
    return dict(tiny.module.named_parameters())


def check_it_goes_on(
    tiny: Any, engine: LayerEngine, fake: FakeBackend, at_home: dict[str, nn.Parameter]
) -> None:
    """It sleeps with nothing held, is the plain module meanwhile, wakes, runs, and is let go."""
    assert engine.state in (EngineState.LOADED, EngineState.UNLOADED, EngineState.ASLEEP)
    engine.wake()
    engine.sleep(keep_locks=False)
    assert (engine.device_bytes, fake.allocated_bytes) == (0, 0)
    assert fake.locker.locked == {}
    assert engine.snapshot().memory.locked_bytes == 0
    for name, parameter in homes(tiny).items():
        assert parameter is at_home[name], name
    assert tiny.is_exact()
    engine.wake()
    if engine.state is EngineState.UNLOADED:
        engine.load(Budget(None, None))
    for _ in range(2):
        run(tiny, engine)
    buffer_bytes = sum(buffer.nbytes for buffer in tiny.module.buffers())
    assert fake.allocated_bytes == engine.device_bytes - buffer_bytes
    engine.detach()
    assert (fake.allocated_bytes, fake.locker.locked, fake.violations) == (0, {}, [])


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("plan", ["resident", "pinned", "mixed", "smallest"])
def test_any_call_of_a_run_may_fail(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    budget_for: BudgetFor,
    plan: str,
    error: type[BaseException],
) -> None:
    count, fuse = 0, 0
    while True:
        tiny, fake = make_tiny(4), Interrupted(error)
        at_home = homes(tiny)
        engine = engine_over(tiny, fake)
        engine.load(budget_for(engine, plan))
        fake.fuse = fuse
        # One that met a layer on the courier's thread is an error of that layer.
        with contextlib.suppress(error, TransferError):
            run(tiny, engine)
            count -= 1
        count += 1
        burnt, fake.fuse = fake.fuse is None, None
        check_it_goes_on(tiny, engine, fake, at_home)
        if not burnt:
            break
        fuse += 1
    assert count > (1 if plan == "resident" else 5)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("plan", ["resident", "pinned"])
def test_any_call_of_an_unload_may_fail_and_the_next_goes_on_with_it(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    budget_for: BudgetFor,
    plan: str,
    error: type[BaseException],
) -> None:
    for fuse in range(100):
        tiny, fake = make_tiny(4), Interrupted(error)
        at_home = homes(tiny)
        engine = engine_over(tiny, fake)
        engine.load(budget_for(engine, plan))
        run(tiny, engine)
        fake.fuse = fuse
        try:
            engine.unload()
        except error:
            engine.unload()
        burnt, fake.fuse = fake.fuse is None, None
        assert engine.state is EngineState.UNLOADED
        check_it_goes_on(tiny, engine, fake, at_home)
        if not burnt:
            assert fuse > 3
            return
    raise AssertionError("it had no end")


@pytest.mark.parametrize("at", range(6))
def test_ctrl_c_while_parameters_go_home_leaves_none_on_the_device(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
) -> None:
    tiny, fake = make_tiny(4), FakeBackend()
    at_home = homes(tiny)
    engine = engine_over(tiny, fake)
    engine.load(Budget(None, None))
    run(tiny, engine)
    unbind, calls = residency.unbind, iter(range(100))

    def interrupted(bindings: Any) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        unbind(bindings)

    with monkeypatch.context() as patch:
        patch.setattr(residency, "unbind", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.sleep()
    assert engine.state is EngineState.LOADED
    run(tiny, engine)
    check_it_goes_on(tiny, engine, fake, at_home)


@pytest.mark.parametrize("is_given_back", [True, False])
def test_ctrl_c_while_a_page_lock_is_given_back_is_made_good_by_the_next_call(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    budget_for: BudgetFor,
    monkeypatch: pytest.MonkeyPatch,
    is_given_back: bool,
) -> None:
    tiny, fake = make_tiny(4), FakeBackend()
    at_home = homes(tiny)
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "pinned"))
    run(tiny, engine)
    give_back = HostLedger._give_back

    def interrupted(ledger: HostLedger, reservation: Any) -> None:
        if is_given_back:
            give_back(ledger, reservation)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HostLedger, "_give_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.sleep(keep_locks=False)
    check_it_goes_on(tiny, engine, fake, at_home)


def test_ctrl_c_before_the_couriers_thread_is_kept_leaves_one_thread(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    budget_for: BudgetFor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny, fake = make_tiny(4), FakeBackend()
    at_home = homes(tiny)
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "pinned"))
    start, started = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("courier-"):
            started.append(thread)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tiny, engine)
    for _ in range(2):
        run(tiny, engine)
    check_it_goes_on(tiny, engine, fake, at_home)
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()


def test_what_an_interrupted_wake_left_locked_is_given_up_by_a_deeper_sleep(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    budget_for: BudgetFor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny, fake = make_tiny(4), FakeBackend()
    at_home = homes(tiny)
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "pinned"))
    run(tiny, engine)
    engine.sleep(keep_locks=True)
    assert fake.locker.locked
    move = LayerEngine._move

    def interrupted(self: LayerEngine, state: EngineState) -> None:
        move(self, state)
        if state is EngineState.UNLOADED:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LayerEngine, "_move", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.wake()
    assert engine.state is EngineState.ASLEEP
    engine.sleep(keep_locks=False)
    assert fake.locker.locked == {}
    check_it_goes_on(tiny, engine, fake, at_home)


@pytest.mark.parametrize("place", ["occupy", "adopt", "say"])
@pytest.mark.parametrize("is_done", [True, False])
def test_ctrl_c_beside_the_work_of_a_wake_leaves_it_asleep(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    budget_for: BudgetFor,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    is_done: bool,
) -> None:
    tiny, fake = make_tiny(4), FakeBackend()
    at_home = homes(tiny)
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "pinned"))
    run(tiny, engine)
    engine.sleep()
    locked = dict(fake.locker.locked)
    plain = getattr(Holding, place)

    def interrupted(*arguments: Any) -> None:
        if is_done:
            plain(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Holding, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.wake()
    assert engine.state is EngineState.ASLEEP
    assert (fake.allocated_bytes, fake.locker.locked) == (0, locked)
    check_it_goes_on(tiny, engine, fake, at_home)
