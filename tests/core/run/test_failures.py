"""Cancels, errors, refused memory, a courier that dies or is stuck, files that change."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from offload_core.device import CopyPiece, CpuBackend, DeviceBackend, FakeBackend
from offload_core.host import MemoryKind, PageLockBackend
from offload_core.run import LayerEngine, attach
from offload_core.values import (
    Budget,
    CheckpointChangedError,
    CourierStoppedError,
    DeviceMemoryError,
    EngineConfig,
    EngineState,
    LayerState,
    StateError,
    TransferError,
)


class Cancel(BaseException):
    """As ComfyUI's interrupt: no Exception, so no post-hook runs."""


class Killed(BaseException):
    """What ends a thread."""


def is_idle(engine: LayerEngine) -> bool:
    """Nothing is in use; a copy that was under way when the run failed may still hold a slot."""
    states = {layer.state for layer in engine.snapshot().layers[:-1]}
    return engine.state is EngineState.LOADED and states <= {
        LayerState.ABSENT,
        LayerState.LOADING,
    }


# Cancels


@pytest.mark.parametrize("kind", [Cancel, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("slots", [1, 2])
def test_an_error_inside_any_block_passes_at_once_and_the_next_run_is_exact(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    poisoned: Callable[..., EngineConfig],
    kind: type[BaseException],
    block: int,
    slots: int,
) -> None:
    tiny = make_tiny(4)
    fake = FakeBackend()
    engine = engine_over(tiny, fake, config=poisoned(slots))
    engine.load(budget_for(engine, "mapped", slots))
    raised = kind("stop")

    def stop(*_: object) -> None:
        raise raised

    handle = tiny.module.blocks[block].norm.register_forward_hook(stop)
    with pytest.raises(kind, match="stop") as caught, engine.run():
        tiny.module(tiny.x)
    assert caught.value is raised
    handle.remove()
    assert is_idle(engine)
    with engine.run():
        assert tiny.is_exact()


def test_a_cancel_that_the_caller_catches_inside_the_run_leaves_it_exact(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    poisoned: Callable[..., EngineConfig],
) -> None:
    tiny = make_tiny(4)
    for slots in (1, 2):
        engine = engine_over(tiny, config=poisoned(slots))
        engine.load(budget_for(engine, "mapped", slots))
        with engine.run():
            for block in range(4):

                def stop(*_: object) -> None:
                    raise Cancel

                handle = tiny.module.blocks[block].norm.register_forward_hook(stop)
                with pytest.raises(Cancel):
                    tiny.module(tiny.x)
                handle.remove()
                assert tiny.is_exact()
                assert tiny.is_exact([3, 0])
        engine.detach()


def test_a_cancel_during_the_wait_for_the_courier_passes_and_the_late_copy_is_used(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    gate: Any,
) -> None:
    tiny = make_tiny(4)
    fake = FakeBackend()
    fake.on_ship = gate
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "mapped"))
    gate.shut()

    def interrupt() -> None:
        gate.await_courier()
        raise Cancel

    with pytest.raises(Cancel), engine.run(interrupt):
        tiny.module(tiny.x)
    assert engine.state is EngineState.LOADED
    shipped = engine.snapshot().traffic.layers_shipped
    states = [layer.state for layer in engine.snapshot().layers[:2]]
    assert states == [LayerState.LOADING] * 2
    with engine.run(interrupt=gate.open):
        assert tiny.is_exact([0])
    traffic = engine.snapshot().traffic
    assert traffic.prefetch_hits == 1
    assert traffic.layers_shipped > shipped - 2
    with engine.run():
        assert tiny.is_exact()


def test_an_order_of_a_cancelled_run_that_failed_later_is_not_the_next_runs_error(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    gate: Any,
) -> None:
    tiny = make_tiny(4)
    fake = FakeBackend()
    failures = [OSError("the drive was away")]

    def fail_behind_the_gate(pieces: object) -> None:
        gate(pieces)
        if failures:
            raise failures.pop()

    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "mapped"))
    fake.on_ship = fail_behind_the_gate
    gate.shut()

    def interrupt() -> None:
        gate.await_courier()
        raise Cancel

    with pytest.raises(Cancel), engine.run(interrupt):
        tiny.module(tiny.x)
    with engine.run(interrupt=gate.open):
        assert tiny.is_exact()


@pytest.mark.parametrize("order", [[3], [2, 1], [0]])
def test_orders_still_out_after_a_cancel_never_reach_the_wrong_layer(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    gate: Any,
    order: list[int],
) -> None:
    tiny = make_tiny(4)
    fake = FakeBackend()
    fake.on_ship = gate
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "mapped"))
    gate.shut()

    def interrupt() -> None:
        raise Cancel

    with pytest.raises(Cancel), engine.run(interrupt):
        tiny.module(tiny.x)
    with engine.run(interrupt=gate.open):
        assert tiny.is_exact(order)


@pytest.mark.parametrize("plan", ["resident", "pinned", "mapped"])
def test_a_load_while_orders_are_out_after_a_cancel_waits_for_them(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    gate: Any,
    plan: str,
) -> None:
    tiny = make_tiny(4)
    fake = FakeBackend()
    fake.on_ship = gate
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "smallest"))
    budget = budget_for(engine, plan)
    gate.shut()

    def interrupt() -> None:
        gate.await_courier()
        raise Cancel

    with pytest.raises(Cancel), engine.run(interrupt):
        tiny.module(tiny.x)
    opener = threading.Thread(target=gate.open)
    opener.start()
    engine.load(budget)
    opener.join()
    with engine.run():
        assert tiny.is_exact()


def test_fifty_cancels_leave_nothing_behind(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(3)
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "pinned"))
    held, locked = fake.allocated_bytes, None

    def stop(*_: object) -> None:
        raise Cancel

    for number in range(50):
        handle = tiny.module.blocks[number % 3].norm.register_forward_hook(stop)
        with pytest.raises(Cancel), engine.run():
            tiny.module(tiny.x)
        handle.remove()
        with engine.run():
            assert tiny.is_exact()
        locked = locked or dict(fake.locker.locked)
        assert fake.allocated_bytes == held
        assert fake.locker.locked == locked
    assert is_idle(engine)


# Memory that is refused


@pytest.mark.parametrize("plan", ["resident", "pinned", "mixed", "smallest"])
def test_an_allocation_refused_at_any_point_of_a_load_leaves_a_smaller_plan_or_nothing(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    plan: str,
) -> None:
    tiny = make_tiny(4)
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    budget = budget_for(engine, plan)
    outcomes = set()
    for call in range(8):
        fake.fail_allocation = call
        try:
            planned = engine.load(budget)
        except DeviceMemoryError:
            outcomes.add("refused")
            assert engine.state is EngineState.UNLOADED
            assert fake.allocated_bytes == 0
            assert fake.locker.locked == {}
        else:
            outcomes.add("ran")
            noted = any("a smaller plan runs" in note for note in engine.snapshot().notes)
            assert noted == (planned != engine.plan(budget))
            assert engine.snapshot().memory.device_bytes == planned.device_bytes
            with engine.run():
                assert tiny.is_exact()
            engine.unload()
            assert fake.allocated_bytes == 0
        fake.fail_allocation = None
    assert tiny.is_exact()
    engine.load(budget)
    assert engine.snapshot().notes == ()
    with engine.run():
        assert tiny.is_exact()
    assert outcomes == ({"refused", "ran"} if plan == "smallest" else {"ran"})


def test_the_smaller_plan_is_not_tried_beside_the_remains_of_the_larger(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    sizes: Callable[..., Any],
) -> None:
    tiny = make_tiny(5)
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    size = sizes(engine)
    fake.capacity_bytes = size.base_bytes + 4 * size.layer_bytes
    planned = engine.load(Budget(size.base_bytes + 4 * size.layer_bytes + size.layer_bytes - 1, 0))
    assert planned.slots == 2
    engine.unload()
    planned = engine.load(Budget(None, 0))
    assert planned.device_bytes <= fake.capacity_bytes
    with engine.run():
        assert tiny.is_exact()


def test_a_device_that_is_full_refuses_in_the_end_and_names_the_bytes(
    tiny: Any, engine_over: Callable[..., LayerEngine]
) -> None:
    fake = FakeBackend(capacity_bytes=1000)
    engine = engine_over(tiny, fake)
    with pytest.raises(DeviceMemoryError, match="the fake device is full") as refused:
        engine.load(Budget())
    assert refused.value.requested_bytes > 1000
    # While the caller still holds the error, nothing is held for it.
    assert fake.allocated_bytes == 0
    assert tiny.is_exact()


def test_a_cpu_limit_refuses_with_both_figures(
    tiny: Any, engine_over: Callable[..., LayerEngine]
) -> None:
    engine = engine_over(tiny, CpuBackend(limit_bytes=1000))
    with pytest.raises(DeviceMemoryError, match=r"KiB asked of a device limited to 1000 B"):
        engine.load(Budget())


@pytest.mark.parametrize("kind", [OSError, Cancel, MemoryError])
@pytest.mark.parametrize("call", range(5))
def test_a_copy_that_fails_half_way_through_a_load_leaves_nothing(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    kind: type[BaseException],
    call: int,
) -> None:
    tiny = make_tiny(4)
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(Budget(None, 0))
    engine.unload()
    fake.on_ship = FailAt(call, kind("no"))
    with pytest.raises(kind, match="no") as caught:
        engine.load(Budget())
    assert engine.state is EngineState.UNLOADED
    assert fake.allocated_bytes == 0, caught
    assert tiny.is_exact()
    engine.load(Budget())
    with engine.run():
        assert tiny.is_exact()


@pytest.mark.parametrize("allowed", range(4))
def test_page_locks_refused_from_any_point_on_stream_from_the_file_and_say_so(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    allowed: int,
) -> None:
    tiny = make_tiny(3)
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    fake.locker.refuse_after = allowed
    engine.load(budget_for(engine, "pinned"))
    with engine.run():
        assert tiny.is_exact()
        assert tiny.is_exact()
    snapshot = engine.snapshot()
    pinned = [layer for layer in snapshot.layers if layer.in_place]
    assert len(pinned) == allowed
    assert snapshot.memory.locked_bytes == sum(fake.locker.locked.values())
    if allowed < 3:
        (note,) = snapshot.notes
        assert note == (
            f"{3 - allowed} layers stream from the file although their pages were to be locked: "
            f"layer blocks.{allowed}: the fake system has no page locks left"
        )
    fake.locker.refuse_after = None
    engine.unload()
    assert engine.snapshot().memory.locked_bytes == 0
    engine.load(budget_for(engine, "pinned"))
    with engine.run():
        assert tiny.is_exact()
    assert engine.snapshot().notes == ()
    assert len(fake.locker.locked) == 3


def test_a_lock_that_raises_frees_its_share_of_the_host_budget(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(3)
    fake = RefusingLocks()
    engine = engine_over(tiny, fake)
    locks = engine.plan(budget_for(engine, "pinned")).lock_bytes
    budget = Budget(budget_for(engine, "pinned").device_bytes, locks)
    engine.load(budget)
    for _ in range(5):
        fake.raising = True
        text = r"layer blocks\.0 .*OSError: the driver fell over"
        with pytest.raises(TransferError, match=text), engine.run():
            tiny.module(tiny.x)
        fake.raising = False
    with engine.run():
        assert tiny.is_exact()
    assert engine.snapshot().memory.locked_bytes == locks
    assert engine.snapshot().notes == ()


class RefusingLocks(FakeBackend):
    """A device whose page-lock call raises while ``raising`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.raising = False

    def page_locker(self) -> PageLockBackend:
        return self

    def lock(self, address: int, size_bytes: int, kind: MemoryKind) -> str | None:
        if self.raising:
            raise OSError("the driver fell over")
        return self.locker.lock(address, size_bytes, kind)

    def unlock(self, address: int, size_bytes: int) -> None:
        self.locker.unlock(address, size_bytes)


# A courier that fails, dies, or is stuck


class FailAt:
    """An ``on_ship`` that raises once, at call number ``call``."""

    def __init__(self, call: int, error: BaseException) -> None:
        self.call = call
        self.errors = [error]

    def __call__(self, pieces: Sequence[CopyPiece]) -> None:
        self.call -= 1
        if self.call < 0 and self.errors:
            raise self.errors.pop()


@pytest.mark.parametrize("courier", [True, False])
@pytest.mark.parametrize("call", range(6))
@pytest.mark.parametrize(
    "error",
    [OSError(5, "Input/output error"), MemoryError(), DeviceMemoryError("device full", 1)],
    ids=["OSError", "MemoryError", "DeviceMemoryError"],
)
def test_a_courier_error_surfaces_with_layer_and_file_and_the_next_run_works(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    poisoned: Callable[..., EngineConfig],
    error: Exception,
    call: int,
    courier: bool,
) -> None:
    tiny = make_tiny(3)
    fake = FakeBackend()
    engine = engine_over(tiny, fake, config=poisoned(2, courier))
    engine.load(budget_for(engine, "mapped"))
    fake.on_ship = FailAt(call, error)
    text = (
        rf"layer blocks\.{call % 3} could not be brought to the device from "
        rf"tiny3-64-0\.safetensors: {type(error).__name__}: "
    )
    with pytest.raises(TransferError, match=text) as caught, engine.run():
        tiny.module(tiny.x, [0, 1, 2] * 3)
    assert caught.value.__cause__ is error
    assert is_idle(engine)
    with engine.run():
        assert tiny.is_exact()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("call", range(5))
def test_a_courier_that_is_killed_answers_every_order_and_is_started_again(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    call: int,
) -> None:
    tiny = make_tiny(3)
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "mapped"))
    fake.on_ship = FailAt(call, Killed())
    text = rf"layer blocks\.{call % 3} .* from tiny3-64-0\.safetensors: .* ended: Killed\(\)"
    with pytest.raises(CourierStoppedError, match=text), engine.run():
        tiny.module(tiny.x, [0, 1, 2] * 3)
    with engine.run():
        for order in (None, [2, 0], [1, 1]):
            assert tiny.is_exact(order)


def test_an_unloaded_engine_with_a_stuck_courier_refuses_and_frees_nothing(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    poisoned: Callable[..., EngineConfig],
    gate: Any,
) -> None:
    tiny = make_tiny(4)
    fake = FakeBackend()
    fake.on_ship = gate
    engine = engine_over(tiny, fake, config=poisoned(patience_seconds=0.01))
    engine.load(budget_for(engine, "mapped"))
    held = fake.allocated_bytes
    gate.shut()

    def interrupt() -> None:
        gate.await_courier()
        raise Cancel

    with pytest.raises(Cancel), engine.run(interrupt):
        tiny.module(tiny.x)
    stuck = r"courier-model did not end its copy within 0\.01 s; its memory is kept"
    for call in (engine.unload, engine.detach, lambda: engine.load(Budget())):
        with pytest.raises(StateError, match=stuck):
            call()
        assert engine.state is EngineState.LOADED
        assert fake.allocated_bytes == held
    with engine.run(interrupt=gate.open):
        assert tiny.is_exact()
    fake.on_ship = None
    engine.detach()
    assert fake.allocated_bytes == 0


def test_an_engine_dropped_while_a_copy_is_out_waits_for_it_and_frees_everything(
    make_tiny: Callable[..., Any],
    budget_for: Callable[..., Budget],
    poisoned: Callable[..., EngineConfig],
    gate: Any,
) -> None:
    tiny = make_tiny(4)
    fake = FakeBackend()
    fake.on_ship = gate
    engine = attach(tiny.module, fake, [tiny.mapping], poisoned())
    engine.load(budget_for(engine, "mixed"))
    gate.shut()

    def interrupt() -> None:
        gate.await_courier()
        raise Cancel

    with pytest.raises(Cancel), engine.run(interrupt):
        tiny.module(tiny.x)
    opener = threading.Thread(target=gate.open)
    opener.start()
    del engine
    opener.join()
    assert fake.allocated_bytes == 0
    assert fake.locker.locked == {}
    assert fake.violations == []
    assert tiny.is_exact()


def test_an_engine_collected_on_its_own_courier_thread_is_shut_down_without_a_deadlock(
    make_tiny: Callable[..., Any],
    budget_for: Callable[..., Budget],
    poisoned: Callable[..., EngineConfig],
    gate: Any,
) -> None:
    tiny = make_tiny(4)
    fake = FakeBackend()
    dropped = threading.Event()

    def collect_at_the_gate(pieces: object) -> None:
        gate(pieces)
        if dropped.is_set():
            gc.collect()

    fake.on_ship = collect_at_the_gate
    engine = attach(tiny.module, fake, [tiny.mapping], poisoned())
    engine.load(budget_for(engine, "mixed"))
    gate.shut()

    def interrupt() -> None:
        gate.await_courier()
        raise Cancel

    with pytest.raises(Cancel) as caught, engine.run(interrupt):
        tiny.module(tiny.x)
    del caught
    (courier,) = [t for t in threading.enumerate() if t.name == "courier-model"]
    cycle: list[Any] = [engine]
    cycle.append(cycle)
    gc.disable()
    try:
        del engine, cycle
        dropped.set()
        gate.open()
        courier.join(60)
        assert not courier.is_alive()
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "courier-shut-down":
            thread.join(60)
    assert fake.allocated_bytes == 0
    assert fake.violations == []
    assert tiny.is_exact()


# Files that change


def test_nothing_reads_the_file_once_a_run_has_ended(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    gate: Any,
) -> None:
    tiny = make_tiny(4)
    fake = FakeBackend()
    calls = iter([lambda pieces: None, gate])
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "mapped"))
    fake.on_ship = lambda pieces: next(calls)(pieces)
    gate.shut()
    ending = threading.Event()

    def interrupt() -> None:
        if ending.is_set():
            gate.open()

    with engine.run(interrupt):
        tiny.module.blocks[0](tiny.x)
        gate.await_courier()  # with the prefetch of the next block, which nobody comes for
        assert engine.snapshot().layers[1].state is LayerState.LOADING
        ending.set()
    states = {layer.state for layer in engine.snapshot().layers[:-1]}
    assert states == {LayerState.ABSENT}
    assert engine.snapshot().traffic.prefetches_discarded >= 1


def test_an_order_that_was_called_off_before_it_began_reads_nothing(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    gate: Any,
) -> None:
    tiny = make_tiny(4)
    fake = FakeBackend()
    shipped: list[object] = []

    def count_at_the_gate(pieces: object) -> None:
        gate(pieces)
        shipped.append(pieces)

    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "mapped"))
    fake.on_ship = count_at_the_gate
    gate.shut()

    def interrupt() -> None:
        gate.await_courier()
        raise Cancel

    with pytest.raises(Cancel), engine.run(interrupt):
        tiny.module(tiny.x)
    opener = threading.Thread(target=gate.open)
    opener.start()
    engine.unload()
    opener.join()
    # Two were ordered; only the one under way when the cancel came was served.
    assert len(shipped) == 1


def truncate(path: Any) -> None:
    os.truncate(path, 100)


def rewrite(path: Any) -> None:
    data = path.read_bytes()
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))


def replace(path: Any) -> None:
    other = path.with_suffix(".other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


def delete(path: Any) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [truncate, rewrite, replace, delete])
@pytest.mark.parametrize("plan", ["resident", "pinned", "mapped"])
def test_a_file_that_changed_between_runs_is_refused_and_the_engine_still_unloads(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    backend: DeviceBackend,
    change: Callable[[Any], None],
    plan: str,
) -> None:
    tiny = make_tiny(4)
    engine = engine_over(tiny, backend)
    budget = budget_for(engine, plan)
    engine.load(budget)
    with engine.run():
        assert tiny.is_exact()
    change(tiny.path)
    text = r"tiny4-64-0\.safetensors was .*load the model"
    with pytest.raises(CheckpointChangedError, match=text):
        engine.run().__enter__()
    with pytest.raises(CheckpointChangedError, match=text):
        engine.load(Budget(None, 0))
    assert engine.state is EngineState.LOADED
    engine.unload()
    with pytest.raises(CheckpointChangedError, match=text):
        engine.load(budget)
    assert engine.state is EngineState.UNLOADED
    assert engine.snapshot().memory.host_bytes == 0


def test_a_failed_order_keeps_no_memory_once_its_error_is_gone(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(3)
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "mapped"))
    fake.on_ship = FailAt(1, OSError("gone"))
    gc.disable()
    try:
        with pytest.raises(TransferError, match="gone"), engine.run():
            tiny.module(tiny.x)
        engine.unload()
        assert fake.allocated_bytes == 0
    finally:
        gc.enable()
    assert torch.equal(tiny.module.embed(tiny.x), tiny.plain.embed(tiny.x))


def test_a_run_over_a_file_that_is_rewritten_meanwhile_does_not_pass_for_a_good_one(
    make_tiny: Callable[..., Any], budget_for: Callable[..., Budget]
) -> None:
    tiny = make_tiny(3)
    engine = attach(tiny.module, FakeBackend(), [tiny.mapping])
    engine.load(budget_for(engine, "mapped"))

    def run_while_somebody_writes() -> None:
        with engine.run():
            tiny.module(tiny.x)
            rewrite(tiny.path)

    with pytest.raises(CheckpointChangedError, match="was rewritten in place"):
        run_while_somebody_writes()
    assert engine.state is EngineState.LOADED
    engine.detach()
