"""An engine that sleeps: off the device, refused to everybody, and back as it was."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload_core.device import FakeBackend
from offload_core.host import PAGE_BYTES
from offload_core.run import LayerEngine
from offload_core.run.shared import give_up_device
from offload_core.values import (
    AsleepError,
    Budget,
    CheckpointChangedError,
    DeviceMemoryError,
    EngineState,
    Placement,
    StateError,
)

Over = Callable[..., LayerEngine]
PLANS = ["resident", "pinned", "mapped", "mixed", "smallest"]


class Injected(Exception):
    """What a test makes fail."""


class Faulty(FakeBackend):
    """Raises ``Injected`` at the ``fuse``-th call of what an engine asks of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse: int | None = None
        locker = self.locker
        self._plain = (locker.lock, locker.unlock)
        locker.lock = self._locks  # type: ignore[method-assign]
        locker.unlock = self._unlocks  # type: ignore[method-assign]

    def _burn(self) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise Injected

    def _locks(self, *args: Any) -> str | None:
        self._burn()
        return self._plain[0](*args)

    def _unlocks(self, *args: Any) -> None:
        self._burn()
        self._plain[1](*args)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        self._burn()
        return super().allocate(size_bytes)

    def ship(self, *args: Any) -> Any:
        self._burn()
        return super().ship(*args)

    def settle(self, *args: Any) -> None:
        self._burn()
        super().settle(*args)

    def wait(self, *args: Any) -> None:
        self._burn()
        super().wait(*args)

    def mark(self) -> Any:
        self._burn()
        return super().mark()

    def trim(self) -> None:
        self._burn()
        super().trim()


def held(engine: LayerEngine, fake: FakeBackend) -> tuple[Any, ...]:
    """Everything that is to be the same before and after."""
    memory = engine.snapshot().memory
    return (
        engine.state,
        engine.device_bytes,
        fake.allocated_bytes,
        memory.resident_bytes,
        memory.slot_bytes,
        dict(fake.locker.locked),
        memory.staging_bytes,
    )


def run(tiny: Any, engine: LayerEngine) -> None:
    with engine.run():
        assert tiny.is_exact()
        engine.end_pass()


@pytest.mark.parametrize("keep_locks", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_what_sleeps_is_off_the_device_and_comes_back_as_it_was(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    budget_for: Callable[..., Budget],
    plan: str,
    keep_locks: bool,
) -> None:
    tiny, fake = make_tiny(5), FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, plan))
    run(tiny, engine)
    before = held(engine, fake)
    placements = [layer.placement for layer in engine.snapshot().layers]
    for _ in range(3):
        engine.sleep(keep_locks)
        assert fake.allocated_bytes == 0
        assert engine.state is EngineState.ASLEEP
        assert engine.device_bytes == 0
        assert fake.locker.locked == (before[5] if keep_locks else {})
        assert engine.snapshot().memory.locked_bytes == sum(fake.locker.locked.values())
        assert all(layer.reason.startswith("asleep") for layer in engine.snapshot().layers)
        for layer in engine.snapshot().layers:
            if layer.placement is Placement.PINNED:
                assert layer.size_bytes - layer.locked_bytes < 2 * PAGE_BYTES
        assert tiny.is_exact(), "its parameters are the host's own"
        engine.wake()
        assert held(engine, fake)[:5] == before[:5]
        run(tiny, engine)
        assert held(engine, fake) == before
        assert [layer.placement for layer in engine.snapshot().layers] == placements


def test_what_was_resident_is_not_called_pinned_while_it_sleeps(
    make_tiny: Callable[..., Any], engine_over: Over, share_of: Callable[..., int]
) -> None:
    tiny, fake = make_tiny(5, dim=256, deep=True), FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(Budget(share_of(engine, 70), None))
    run(tiny, engine)
    awake = engine.snapshot().layers
    assert any(layer.resident_bytes and layer.locked_bytes for layer in awake)
    engine.sleep(True)
    for before, layer in zip(awake, engine.snapshot().layers, strict=True):
        assert layer.locked_bytes == before.locked_bytes
        if before.resident_bytes or not before.locked_bytes:
            assert layer.placement is Placement.MAPPED
            assert not layer.in_place
        else:
            assert layer.placement is Placement.PINNED
            assert layer.in_place


def test_nothing_loads_or_runs_what_sleeps(tiny: Any, engine_over: Over) -> None:
    engine = engine_over(tiny)
    engine.load(Budget())
    engine.sleep()
    with pytest.raises(AsleepError, match="wake it before"):
        engine.load(Budget())
    with pytest.raises(AsleepError, match="wake it before"), engine.run():
        pass
    assert (engine.unload(), give_up_device(engine, 1 << 40)) == (0, 0)
    engine.end_pass()
    assert engine.state is EngineState.ASLEEP
    assert engine.plan(Budget()).device_bytes > 0, "a dry run touches nothing"
    engine.wake()
    run(tiny, engine)


def test_any_order_of_calls_leaves_one_of_the_two_states(tiny: Any, engine_over: Over) -> None:
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(Budget(None, None))
    loaded = engine.device_bytes

    def use() -> None:
        if engine.state is EngineState.ASLEEP:
            with pytest.raises(AsleepError), engine.run():
                pass
        else:
            run(tiny, engine)

    calls = {"sleep": engine.sleep, "wake": engine.wake, "run": use, "look": engine.snapshot}
    asleep = False
    orders = list(itertools.product(calls, repeat=4))
    assert len(orders) == 256
    for order in orders:
        for name in order:
            calls[name]()
            asleep = name == "sleep" or (asleep and name != "wake")
            assert engine.state is (EngineState.ASLEEP if asleep else EngineState.LOADED)
            assert engine.device_bytes == (0 if asleep else loaded)
    engine.wake()
    run(tiny, engine)


def test_a_model_that_was_never_loaded_sleeps_and_wakes_unloaded(
    tiny: Any, engine_over: Over
) -> None:
    engine = engine_over(tiny)
    engine.wake()
    assert engine.state is EngineState.UNLOADED
    engine.sleep()
    with pytest.raises(AsleepError):
        engine.load(Budget())
    engine.wake()
    assert (engine.state, engine.device_bytes) == (EngineState.UNLOADED, 0)
    engine.load(Budget())
    run(tiny, engine)


def test_locks_that_were_kept_may_be_given_up_later(
    tiny: Any, engine_over: Over, budget_for: Callable[..., Budget]
) -> None:
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "pinned"))
    run(tiny, engine)
    assert fake.locker.locked
    engine.sleep(keep_locks=True)
    assert fake.locker.locked
    engine.sleep(keep_locks=False)
    assert fake.locker.locked == {}
    engine.sleep(keep_locks=True)
    assert fake.locker.locked == {}
    engine.wake()
    run(tiny, engine)
    assert fake.locker.locked


def test_what_a_run_changed_in_a_buffer_is_kept(tiny: Any, engine_over: Over) -> None:
    engine = engine_over(tiny)
    engine.load(Budget())
    for keep_locks in (True, False):
        for module in (tiny.plain, tiny.module):
            module.blocks[0].shift.add_(0.5)
        engine.sleep(keep_locks)
        for module in (tiny.plain, tiny.module):
            module.blocks[1].shift.mul_(2)
        engine.wake()
        run(tiny, engine)


@pytest.mark.parametrize("when", ["unloaded", "loaded", "asleep"])
@pytest.mark.parametrize("part", ["model", "block", "leaf"])
def test_new_weights_are_refused_and_not_written_over_the_file(
    tiny: Any, engine_over: Over, when: str, part: str
) -> None:
    engine = engine_over(tiny)
    if when != "unloaded":
        engine.load(Budget())
    if when == "asleep":
        engine.sleep()
    module = {
        "model": tiny.module,
        "block": tiny.module.blocks[1],
        "leaf": tiny.module.blocks[1].lin,
    }[part]
    new = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    with pytest.raises(StateError, match="lies in the checkpoint file and cannot be written"):
        module.load_state_dict(new)
    engine.wake()
    engine.load(Budget())
    run(tiny, engine)
    engine.detach()
    assert not any(m._load_state_dict_pre_hooks for m in tiny.module.modules())


def test_a_running_model_is_not_put_to_sleep(tiny: Any, engine_over: Over) -> None:
    engine = engine_over(tiny)
    engine.load(Budget())
    with engine.run():
        with pytest.raises(StateError, match="after the run"):
            engine.sleep()
        assert tiny.is_exact()
    engine.sleep()
    engine.detach()
    assert engine.state is EngineState.DETACHED
    with pytest.raises(StateError, match="detached"):
        engine.sleep()


def test_a_file_that_changed_meanwhile_keeps_the_model_asleep(
    tiny: Any, engine_over: Over, budget_for: Callable[..., Budget]
) -> None:
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "pinned"))
    run(tiny, engine)
    engine.sleep()
    before = held(engine, fake)
    status = tiny.path.stat()
    os.utime(tiny.path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    assert engine.file_problem().startswith(f"{tiny.path.name} ")
    with pytest.raises(CheckpointChangedError):
        engine.wake()
    assert held(engine, fake) == before
    os.utime(tiny.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert engine.file_problem() == ""
    engine.wake()
    run(tiny, engine)


def test_a_device_that_is_full_meanwhile_keeps_the_model_asleep(
    tiny: Any, engine_over: Over, budget_for: Callable[..., Budget]
) -> None:
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "pinned"))
    run(tiny, engine)
    loaded = held(engine, fake)
    engine.sleep()
    before, fake.capacity_bytes = held(engine, fake), 0
    with pytest.raises(DeviceMemoryError):
        engine.wake()
    assert held(engine, fake) == before
    fake.capacity_bytes = 1 << 40
    engine.wake()
    assert held(engine, fake) == loaded
    run(tiny, engine)


@pytest.mark.parametrize("keep_locks", [True, False])
@pytest.mark.parametrize("plan", ["resident", "pinned", "mixed"])
@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_a_fault_anywhere_leaves_the_earlier_state_or_the_later_one(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    budget_for: Callable[..., Budget],
    plan: str,
    call: str,
    keep_locks: bool,
) -> None:
    tiny, fake = make_tiny(4), Faulty()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, plan))
    run(tiny, engine)
    awake = held(engine, fake)
    failed = 0
    for fuse in itertools.count():
        assert held(engine, fake) == awake
        if call == "wake":
            engine.sleep(keep_locks)
            assert fake.allocated_bytes == 0
        before = held(engine, fake)
        fake.fuse = fuse
        raised = False
        try:
            engine.sleep(keep_locks) if call == "sleep" else engine.wake()
        except Injected:
            raised = True  # and its frames go, which hold what was being freed
        if not raised and fake.fuse is not None:
            break
        if raised:
            failed += 1
            now = held(engine, fake)
            if call == "wake" or engine.state is EngineState.ASLEEP:
                assert now == before
            else:
                # Loaded again: locks come back with the next run, as after any load.
                assert now[:5] == before[:5]
        fake.fuse = None
        engine.wake()
        run(tiny, engine)
    assert failed > 5
    fake.fuse = None
