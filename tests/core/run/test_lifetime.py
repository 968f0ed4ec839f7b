"""What ends when: no growth over cycles, no reference that outlives its owner, a quick exit."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_core.device import CopyPiece, CpuBackend, DeviceBackend, FakeBackend
from offload_core.host import maps_lines, open_mapping, process_memory
from offload_core.run import Courier, LayerEngine, Order, attach
from offload_core.values import Budget, MemoryRecord, TransferError

ROOT = Path(__file__).parents[3]


def hooks_on(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


@pytest.mark.parametrize("ending", ["detach", "drop"])
def test_twenty_cycles_of_attach_load_run_and_end_grow_nothing(
    make_tiny: Callable[..., Any],
    budget_for: Callable[..., Budget],
    ending: str,
) -> None:
    tiny = make_tiny(3, dim=256)
    plans = ("resident", "pinned", "mapped", "mixed", "smallest")
    seen: list[tuple[int, ...]] = []
    anonymous: list[int] = []
    gc.collect()
    for cycle in range(22):
        mapping = open_mapping(tiny.path)
        state = {name: mapping.tensor(e) for name, e in mapping.header.entries.items()}
        tiny.module.load_state_dict(state, assign=True)
        del state
        engine = attach(tiny.module, CpuBackend(), [mapping])
        engine.load(budget_for(engine, plans[cycle % 5]))
        with engine.run():
            assert tiny.is_exact()
        if ending == "detach":
            engine.detach()
        del engine
        memory = process_memory()
        lines = sum(line.path == str(tiny.path) for line in maps_lines())
        seen.append(
            (
                memory.descriptors,
                lines,
                threading.active_count(),
                hooks_on(tiny.module),
                memory.locked_bytes or 0,
            )
        )
        anonymous.append(memory.rss_anon_bytes or 0)
    assert len(set(seen[1:])) == 1, seen
    assert seen[-1][3] == 0
    # One model is 1 MiB; twenty leaked slots or copies would be far more than the heap's noise.
    assert max(anonymous[-3:]) - anonymous[2] < 8 << 20


@pytest.mark.parametrize("end", ["attached", "loaded", "after a run", "after an error", "detached"])
@pytest.mark.parametrize("plan", ["resident", "pinned", "mapped"])
def test_engine_module_and_mapping_die_without_a_collection(
    make_tiny: Callable[..., Any],
    budget_for: Callable[..., Budget],
    backend: DeviceBackend,
    end: str,
    plan: str,
) -> None:
    tiny = make_tiny(3)
    gc.collect()
    gc.disable()
    try:
        engine = attach(tiny.module, backend, [tiny.mapping])
        if end != "attached":
            engine.load(budget_for(engine, plan))
        if end in ("after a run", "detached"):
            with engine.run():
                assert tiny.is_exact()
        if end == "after an error":
            interrupt_a_run(engine, tiny)
        if end == "detached":
            engine.detach()
        unmapped = tiny.mapping.unmapped()
        watched = [weakref.ref(engine), weakref.ref(tiny.module), weakref.ref(tiny.mapping)]
        watched.append(weakref.ref(tiny.module.blocks[1]))
        del engine, tiny
        assert [ref() for ref in watched] == [None] * 4
        assert unmapped()
        if isinstance(backend, FakeBackend):
            assert backend.allocated_bytes == 0
            assert backend.locker.locked == {}
    finally:
        gc.enable()


def interrupt_a_run(engine: LayerEngine, tiny: Any) -> None:
    def stop(*_: object) -> None:
        raise ZeroDivisionError

    handle = tiny.module.blocks[1].norm.register_forward_hook(stop)
    with pytest.raises(ZeroDivisionError), engine.run():
        tiny.module(tiny.x)
    handle.remove()


def test_a_dropped_engine_gives_the_module_its_own_weights_back(
    make_tiny: Callable[..., Any], budget_for: Callable[..., Budget]
) -> None:
    tiny = make_tiny(3)
    homes = dict(tiny.module.named_parameters())
    fake = FakeBackend()
    engine = attach(tiny.module, fake, [tiny.mapping])
    engine.load(budget_for(engine, "resident"))
    assert tiny.module.embed.weight is not homes["embed.weight"]
    del engine
    assert all(p is homes[name] for name, p in tiny.module.named_parameters())
    assert hooks_on(tiny.module) == 0
    assert fake.allocated_bytes == 0
    assert fake.violations == []


def test_an_idle_courier_keeps_no_order(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(3)
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "pinned"))
    with engine.run():
        assert tiny.is_exact()
    engine.unload()
    (courier,) = [t for t in threading.enumerate() if t.name == "courier-model"]
    assert fake.allocated_bytes == 0
    assert courier.is_alive()


def test_memory_record_sums_what_each_budget_is_charged_with() -> None:
    record = MemoryRecord(
        resident_bytes=1,
        slot_bytes=2,
        device_peak_bytes=4,
        activation_peak_bytes=None,
        locked_bytes=8,
        copied_bytes=16,
        staging_bytes=32,
    )
    assert record.device_bytes == 3
    assert record.host_bytes == 56


EXIT = """
import sys, threading
import torch
from torch import nn
from offload_core.device import FakeBackend
from offload_core.run import attach
from offload_core.values import Budget

class Stop(BaseException):
    pass

model = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(4))
fake = FakeBackend()
engine = attach(model, fake)
kind = sys.argv[1]
if kind != "idle":
    engine.load(Budget(engine.plan(Budget()).device_bytes // 2 + 256, 0))
    assert engine.snapshot().memory.slot_bytes
if kind == "loaded":
    with engine.run():
        for block in model:
            for part in block:
                part(torch.zeros(1, 64))
    sys.exit(7)
if kind == "held":
    held, never = threading.Event(), threading.Event()
    fake.on_ship = lambda pieces: (held.set(), never.wait())
    def interrupt():
        held.wait()
        raise Stop
    try:
        with engine.run(interrupt):
            for block in model:
                for part in block:
                    part(torch.zeros(1, 64))
    except Stop:
        pass
    assert held.is_set()
"""


def ended(code: str, kind: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code, kind], cwd=ROOT, capture_output=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("kind", "code"), [("idle", 0), ("loaded", 7)])
def test_no_thread_keeps_the_interpreter_alive(kind: str, code: int) -> None:
    done = ended(EXIT, kind)
    assert done.stderr == b""
    assert done.returncode == code


def test_a_copy_that_never_ends_holds_up_the_exit_for_about_a_second() -> None:
    # Handlers run last in, first out, so this one, put before torch's and ours, runs after them.
    clock = "import atexit, time\natexit.register(lambda: print(time.monotonic() - start))\n"
    done = ended(clock + EXIT + "\nstart = time.monotonic()\n", "held")
    assert done.stderr == b""
    assert done.returncode == 0
    assert 1 <= float(done.stdout) < 5


# The courier alone


class Source:
    """Stands for a LayerSource and for its part: a name, a file, and no copies."""

    name = "layer"
    file = ""

    def __init__(self) -> None:
        self.read: list[object] = []

    def copies_into(self, memory: torch.Tensor, part: object) -> list[object]:
        return []

    def read_ahead(self, part: object) -> None:
        self.read.append(part)


def order(source: Any = None, ahead: Any = None) -> Order:
    source = source or Source()
    return Order(source, source, torch.empty(0, dtype=torch.uint8), None, ahead)


@pytest.mark.parametrize("threaded", [True, False])
def test_a_courier_serves_orders_in_turn_and_is_closed_for_good(threaded: bool) -> None:
    fake = FakeBackend()
    courier = Courier(fake, "test", threaded)
    orders = [order() for _ in range(5)]
    for one in orders:
        courier.ship(one)
    numbers = [one.collect(None, 1).number for one in orders]
    assert numbers == sorted(numbers)
    courier.close()
    courier.close()
    with pytest.raises(Exception, match="the courier was closed; load the model again"):
        courier.ship(order())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_enter_its_device_answers_with_the_reason() -> None:
    class NoEntry(FakeBackend):
        def enter_thread(self) -> None:
            raise RuntimeError("no such device")

    courier = Courier(NoEntry(), "test")
    for _ in range(3):
        one = order()
        courier.ship(one)
        with pytest.raises(Exception, match=r"ended: RuntimeError.*no such device"):
            one.collect(None, 1)
    courier.close()


@pytest.mark.parametrize("make_backend", [CpuBackend, FakeBackend])
def test_a_served_order_keeps_no_memory_while_the_courier_reads_ahead(
    make_backend: Callable[[], Any],
) -> None:
    """Or a plan's slots and those of the plan before would be there at one time."""
    reading, done = threading.Event(), threading.Event()

    class Copying(Source):
        def copies_into(self, memory: torch.Tensor, part: object) -> list[object]:
            return [CopyPiece(memory[:8], torch.ones(8, dtype=torch.uint8), False)]

    class Slow(Source):
        def read_ahead(self, part: object) -> None:
            reading.set()
            assert done.wait(60)

    backend = make_backend()
    courier = Courier(backend, "test")
    memory = backend.allocate(8)
    freed = weakref.ref(memory)
    one: Any = Order(Copying(), Copying(), memory, None, (Slow(), Slow()))  # type: ignore[arg-type]
    del memory
    courier.ship(one)
    try:
        backend.settle(one.collect(None, 1))
        assert reading.wait(60)
        assert freed() is None
    finally:
        done.set()
        courier.close()


class Broken(Source):
    def copies_into(self, memory: torch.Tensor, part: object) -> list[object]:
        raise OSError("no")


@pytest.mark.parametrize("threaded", [True, False])
def test_the_layer_behind_is_read_ahead_once_its_order_is_served(threaded: bool) -> None:
    courier = Courier(FakeBackend(), "test", threaded)
    source = Source()
    for _ in range(3):
        courier.ship(order(ahead=(source, "part")))
    failing = order(Broken(), (source, "never"))
    courier.ship(failing)
    courier.close()
    assert source.read == ["part"] * 3
    with pytest.raises(TransferError, match="layer layer could not be brought"):
        failing.collect(None, 1)


def test_where_no_thread_can_be_had_no_order_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    courier = Courier(FakeBackend(), "test")
    refused = order()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            courier.ship(refused)
    later = order()
    courier.ship(later)
    assert later.finished.wait(30)
    courier.close()
    assert not refused.finished.is_set()
