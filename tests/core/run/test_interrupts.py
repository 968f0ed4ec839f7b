"""An error or a Ctrl-C at any place of a run or a sleep leaves an engine that can go on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
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

Loaded = Callable[..., "Case"]
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


@dataclass
class Case:
    """A tiny model under an engine, and the parameters that it had before."""

    tiny: Any
    fake: FakeBackend
    engine: LayerEngine
    at_home: dict[str, nn.Parameter]

    def run(self) -> None:
        run(self.tiny, self.engine)

    def interrupt(self, owner: Any, name: str, stand_in: Any, call: Callable[[], Any]) -> None:
        """Make the call end in the Ctrl-C that ``stand_in``, in the place of ``name``, raises."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, stand_in)
            with pytest.raises(KeyboardInterrupt):
                call()

    def check_it_goes_on(self) -> None:
        """It sleeps with nothing held, is the plain module meanwhile, wakes, runs, is let go."""
        engine, fake = self.engine, self.fake
        assert engine.state in (EngineState.LOADED, EngineState.UNLOADED, EngineState.ASLEEP)
        engine.wake()
        engine.sleep(keep_locks=False)
        assert (engine.device_bytes, fake.allocated_bytes) == (0, 0)
        assert fake.locker.locked == {}
        assert engine.snapshot().memory.locked_bytes == 0
        for name, parameter in homes(self.tiny).items():
            assert parameter is self.at_home[name], name
        assert self.tiny.is_exact()
        engine.wake()
        if engine.state is EngineState.UNLOADED:
            engine.load(Budget(None, None))
        for _ in range(2):
            self.run()
        buffer_bytes = sum(buffer.nbytes for buffer in self.tiny.module.buffers())
        assert fake.allocated_bytes == engine.device_bytes - buffer_bytes
        engine.detach()
        assert (fake.allocated_bytes, fake.locker.locked, fake.violations) == (0, {}, [])


def homes(tiny: Any) -> dict[str, nn.Parameter]:
    return dict(tiny.module.named_parameters())


@pytest.fixture
def loaded(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> Callable[..., Case]:
    """A case of that plan, loaded, and run once unless a test wants the first run itself."""

    def make(plan: str, fake: FakeBackend | None = None, has_run: bool = True) -> Case:
        tiny, fake = make_tiny(4), fake or FakeBackend()
        at_home = homes(tiny)
        case = Case(tiny, fake, engine_over(tiny, fake), at_home)
        case.engine.load(budget_for(case.engine, plan))
        if has_run:
            case.run()
        return case

    return make


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("plan", ["resident", "pinned", "mixed", "smallest"])
def test_any_call_of_a_run_may_fail(loaded: Loaded, plan: str, error: type[BaseException]) -> None:
    count, fuse = 0, 0
    while True:
        fake = Interrupted(error)
        case = loaded(plan, fake, has_run=False)
        fake.fuse = fuse
        # One that met a layer on the courier's thread is an error of that layer.
        with contextlib.suppress(error, TransferError):
            case.run()
            count -= 1
        count += 1
        burnt, fake.fuse = fake.fuse is None, None
        case.check_it_goes_on()
        if not burnt:
            break
        fuse += 1
    assert count > (1 if plan == "resident" else 5)


@pytest.mark.parametrize("plan", ["pinned", "smallest"])
def test_what_the_end_of_a_run_could_not_let_go_either_is_let_go_by_the_next(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    case = loaded(plan)

    def refuse() -> None:
        raise RuntimeError("no event")

    with monkeypatch.context() as patch:
        patch.setattr(case.fake, "mark", refuse)
        with pytest.raises(RuntimeError, match="no event"):
            case.run()
    assert case.engine.state is EngineState.LOADED
    case.run()
    case.check_it_goes_on()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("plan", ["resident", "pinned"])
def test_any_call_of_an_unload_may_fail_and_the_next_goes_on_with_it(
    loaded: Loaded, plan: str, error: type[BaseException]
) -> None:
    for fuse in range(100):
        fake = Interrupted(error)
        case = loaded(plan, fake)
        fake.fuse = fuse
        try:
            case.engine.unload()
        except error:
            case.engine.unload()
        burnt, fake.fuse = fake.fuse is None, None
        assert case.engine.state is EngineState.UNLOADED
        case.check_it_goes_on()
        if not burnt:
            assert fuse > 3
            return
    raise AssertionError("it had no end")


@pytest.mark.parametrize("at", range(6))
def test_ctrl_c_while_parameters_go_home_leaves_none_on_the_device(loaded: Loaded, at: int) -> None:
    case = loaded("resident")
    unbind, calls = residency.unbind, iter(range(100))

    def interrupted(*arguments: Any) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        unbind(*arguments)

    case.interrupt(residency, "unbind", interrupted, case.engine.sleep)
    assert case.engine.state is EngineState.LOADED
    case.run()
    case.check_it_goes_on()


@pytest.mark.parametrize("is_given_back", [True, False])
def test_ctrl_c_while_a_page_lock_is_given_back_is_made_good_by_the_next_call(
    loaded: Loaded, is_given_back: bool
) -> None:
    case = loaded("pinned")
    give_back = HostLedger._give_back

    def interrupted(ledger: HostLedger, reservation: Any) -> None:
        if is_given_back:
            give_back(ledger, reservation)
        raise KeyboardInterrupt

    case.interrupt(HostLedger, "_give_back", interrupted, lambda: case.engine.sleep(False))
    case.check_it_goes_on()


def test_ctrl_c_before_the_couriers_thread_is_kept_leaves_one_thread(loaded: Loaded) -> None:
    case = loaded("pinned", has_run=False)
    start, started = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("courier-"):
            started.append(thread)
            raise KeyboardInterrupt

    case.interrupt(threading.Thread, "start", interrupted, case.run)
    for _ in range(2):
        case.run()
    case.check_it_goes_on()
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()


def test_what_an_interrupted_wake_left_locked_is_given_up_by_a_deeper_sleep(
    loaded: Loaded,
) -> None:
    case = loaded("pinned")
    engine, fake = case.engine, case.fake
    engine.sleep(keep_locks=True)
    assert fake.locker.locked
    move = LayerEngine._move

    def interrupted(self: LayerEngine, state: EngineState) -> None:
        move(self, state)
        if state is EngineState.UNLOADED:
            raise KeyboardInterrupt

    case.interrupt(LayerEngine, "_move", interrupted, engine.wake)
    assert engine.state is EngineState.ASLEEP
    engine.sleep(keep_locks=False)
    assert fake.locker.locked == {}
    case.check_it_goes_on()


@pytest.mark.parametrize("place", ["occupy", "adopt", "say"])
@pytest.mark.parametrize("is_done", [True, False])
def test_ctrl_c_beside_the_work_of_a_wake_leaves_it_asleep(
    loaded: Loaded, place: str, is_done: bool
) -> None:
    case = loaded("pinned")
    engine, fake = case.engine, case.fake
    engine.sleep()
    locked = dict(fake.locker.locked)
    plain = getattr(Holding, place)

    def interrupted(*arguments: Any) -> None:
        if is_done:
            plain(*arguments)
        raise KeyboardInterrupt

    case.interrupt(Holding, place, interrupted, engine.wake)
    assert engine.state is EngineState.ASLEEP
    assert (fake.allocated_bytes, fake.locker.locked) == (0, locked)
    case.check_it_goes_on()
