"""The engine on a real CUDA device: exact results, real page locks, nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from offload_core.device import DeviceBackend, Recode, backend_for
from offload_core.device import cuda as cuda_backend
from offload_core.device.cuda import CudaBackend
from offload_core.device.driver import DriverError
from offload_core.host import PAGE_BYTES, MemoryKind, open_mapping, process_memory
from offload_core.run import LayerEngine, attach
from offload_core.values import Budget, DeviceBudgetError, EngineConfig, Placement

pytestmark = pytest.mark.gpu

WIDTH = 1024
LAYERS = 5
ALLOCATOR_ROUNDING_BYTES = 4 * 2**20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.full((width,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)) * self.scale + self.shift


class Model(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.final = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, order: tuple[int, ...] = tuple(range(LAYERS))
    ) -> torch.Tensor:
        x = self.embed(x)
        for index in order:
            x = self.blocks[index](x)
        return self.final(x)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    save_file(Model().to(torch.bfloat16).state_dict(), path)
    return path


def cuda(device: str = "cuda") -> DeviceBackend:
    return backend_for(torch.device(device))


def mapped_engine(
    file: Path, width: int = WIDTH, device: str = "cuda", **more: Any
) -> tuple[Model, LayerEngine]:
    mapping = open_mapping(file)
    model = Model(width).to(torch.bfloat16)
    state = {name: mapping.tensor(entry) for name, entry in mapping.header.entries.items()}
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False)
    return model, attach(model, cuda(device), [mapping], **more)


def plans(engine: LayerEngine, device: str = "cuda") -> Iterator[tuple[str, Budget]]:
    full, smallest = full_of(engine), smallest_of(engine)
    lanes = staging(device)
    layer = max(record.size_bytes for record in engine.snapshot().layers)
    yield "resident", Budget(full, 0)
    yield "pinned", Budget(smallest + layer, 2**30)
    yield "mapped through chunks", Budget(smallest + layer, lanes)
    yield "mapped without chunks", Budget(smallest + layer, 0)
    yield "mixed", Budget(smallest + 2 * layer, lanes + layer)
    for share in (3, 6, 9):
        partly = smallest + (full - smallest) * share // 10
        yield f"{share} tenths, pinned", Budget(partly, 2**30)
        yield f"{share} tenths, through chunks", Budget(partly, lanes)
    yield "smallest", Budget(smallest, 0)


def full_of(engine: LayerEngine) -> int:
    return engine.plan(Budget(None, 0)).device_bytes


def smallest_of(engine: LayerEngine) -> int:
    # Not pytest.raises: it would leave a cycle that keeps the engine until a collection.
    try:
        engine.plan(Budget(0, 0))
    except DeviceBudgetError as error:
        return error.smallest_bytes
    raise AssertionError("a device budget of nothing was accepted")


def staging(device: str = "cuda") -> int:
    return cuda(device).staging_bytes


ORDERS = ((0, 1, 2, 3, 4), (1, 0), (3, 3, 2, 4), (4, 3, 2, 1, 0), (0, 1, 4))


def test_every_plan_equals_the_resident_model_bit_for_bit(file: Path) -> None:
    plain = Model().to(torch.bfloat16)
    mapping = open_mapping(file)
    plain.load_state_dict({n: mapping.tensor(e) for n, e in mapping.header.entries.items()})
    plain = plain.cuda().requires_grad_(False)
    x = torch.randn(2048, WIDTH, device="cuda", dtype=torch.bfloat16)
    want = {order: plain(x, order) for order in ORDERS}
    model, engine = mapped_engine(file)
    for name, budget in plans(engine):
        engine.load(budget)
        with engine.run():
            for _ in range(10):
                for order in ORDERS:
                    assert torch.equal(model(x, order), want[order]), (name, order)
        memory = engine.snapshot().memory
        assert budget.device_bytes is not None
        assert memory.device_bytes <= budget.device_bytes
        assert memory.host_bytes <= (budget.host_bytes or 0)
    engine.detach()


def test_results_stay_exact_beside_a_stream_that_allocates_and_frees(file: Path) -> None:
    model, engine = mapped_engine(file)
    x = torch.randn(2048, WIDTH, device="cuda", dtype=torch.bfloat16)
    budgets = dict(plans(engine))
    engine.load(budgets["resident"])
    want = model(x)
    other = torch.cuda.Stream()
    for name in ("pinned", "mapped through chunks", "mixed", "6 tenths, through chunks"):
        engine.load(budgets[name])
        with engine.run():
            for step in range(50):
                got = model(x)
                with torch.cuda.stream(other):
                    noise = torch.full((WIDTH * (1 + step % 7), 512), float("nan"), device="cuda")
                    del noise
                assert torch.equal(got, want), (name, step)
    engine.detach()


def test_pages_are_locked_in_place_without_anonymous_memory(file: Path) -> None:
    model, engine = mapped_engine(file)
    x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
    engine.load(dict(plans(engine))["pinned"])
    model(x)
    torch.cuda.synchronize()
    before = process_memory().rss_anon_bytes
    with engine.run():
        model(x)
    records = engine.snapshot().layers[:LAYERS]
    assert [r.placement for r in records] == [Placement.PINNED] * LAYERS
    assert all(r.in_place for r in records)
    assert process_memory().rss_anon_bytes - before < 2**20
    engine.unload()
    assert engine.snapshot().memory.locked_bytes == 0
    # A lock that was not really given back would be refused the second time.
    engine.load(dict(plans(engine))["pinned"])
    model(x)
    assert engine.snapshot().notes == ()
    engine.detach()


def reserved_address(size: int, usable: int) -> int:
    """``size`` bytes of address space of which only the first ``usable`` may be touched.

    Beyond them nothing is mapped that a driver could take for memory to lock, or hang over.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    nothing, no_reserve = 0, 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    address = libc.mmap(None, size, nothing, flags, -1, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    assert libc.mprotect(address, usable, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    return int(address)


def a_kernel_runs() -> bool:
    """An error that an earlier call left behind would come up here."""
    torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    return torch.ones(1, device="cuda").add(1).item() == 2


# Case 36. Never on a MAP_PRIVATE read-only mapping: that hangs the process for ever.


@pytest.mark.parametrize("what", ["twice", "overlapping", "more than there is"])
def test_a_refused_lock_leaves_no_error_for_the_next_cuda_call(file: Path, what: str) -> None:
    locker = cuda().page_locker()
    mapping = open_mapping(file)
    address, size = mapping.lockable_range(0, mapping.header.identity.size_bytes)
    kind = mapping.kind
    assert kind is MemoryKind.SHARED_READ_ONLY
    if what == "twice":
        assert locker.lock(address, size, kind) is None
        refused = locker.lock(address, size, kind)
    elif what == "overlapping":
        size = 2 * PAGE_BYTES
        assert locker.lock(address, size, kind) is None
        refused = locker.lock(address + PAGE_BYTES, size, kind)
    else:
        size = PAGE_BYTES
        assert locker.lock(address, size, kind) is None
        # Not ten times the machine's memory: before it looks at a page, the driver allocates a
        # list of all of them in the kernel, on no account of this process.
        reserved = reserved_address(64 << 30, 16 << 20)
        refused = locker.lock(reserved, 64 << 30, MemoryKind.ANONYMOUS)
    assert refused is not None
    assert "cudaHostRegister" in refused
    assert a_kernel_runs()
    locker.unlock(address, size)
    assert a_kernel_runs()
    # What was refused left nothing locked, and what was unlocked can be locked again.
    assert locker.lock(address, size, kind) is None
    locker.unlock(address, size)
    assert a_kernel_runs()


@pytest.mark.parametrize("kind", [MemoryKind.OTHER, MemoryKind.UNKNOWN])
def test_memory_of_another_kind_is_refused_without_asking_the_driver(kind: MemoryKind) -> None:
    refused = cuda().page_locker().lock(PAGE_BYTES, PAGE_BYTES, kind)
    assert refused == f"its memory is of a kind that the driver may not lock ({kind.value})"
    assert a_kernel_runs()


def test_a_page_of_a_file_and_one_of_ordinary_memory_are_locked_and_arrive(file: Path) -> None:
    backend = cuda()
    locker = backend.page_locker()
    mapping = open_mapping(file)
    in_file, size = mapping.lockable_range(0, 64 * PAGE_BYTES)
    ordinary = torch.arange(size + 2 * PAGE_BYTES, dtype=torch.int64).to(torch.uint8)
    copy = -(-ordinary.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    for address, kind in (
        (in_file, MemoryKind.SHARED_READ_ONLY),
        (copy, MemoryKind.ANONYMOUS),
    ):
        assert locker.lock(address, size, kind) is None
        bytes_there = (ctypes.c_ubyte * size).from_address(address)
        source = torch.frombuffer(bytes_there, dtype=torch.uint8)
        there = backend.allocate(size).copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(there.cpu(), source)
        locker.unlock(address, size)
    assert a_kernel_runs()


def test_a_files_pages_are_probed_once_and_found_to_be_lockable(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, mapping = cuda(), open_mapping(file)
    assert backend.lock_refusal is None
    assert backend.probe_locks(mapping) is None
    for again in (backend, cuda()):

        def lock(*_: object) -> str:
            raise AssertionError("the file system was probed before")

        monkeypatch.setattr(again.page_locker(), "lock", lock)
        assert again.probe_locks(open_mapping(file)) is None
    assert a_kernel_runs()


# Case 37.


def test_twenty_loads_of_one_file_lock_it_each_time(file: Path) -> None:
    x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
    want = None
    for _ in range(20):
        model, engine = mapped_engine(file)
        engine.load(dict(plans(engine))["pinned"])
        with engine.run():
            got = model(x)
        want = got if want is None else want
        assert torch.equal(got, want)
        assert engine.snapshot().notes == ()
        assert all(record.in_place for record in engine.snapshot().layers[:LAYERS])
        engine.unload()
        engine.detach()
        del model, engine
    assert a_kernel_runs()


def test_copies_are_locked_where_they_are(file: Path) -> None:
    x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
    model, engine = mapped_engine(file)
    engine.load(Budget(None, 0))
    want = model(x)
    engine.detach()
    # The same numbers once more, two of the layers in memory of their own.
    mapping = open_mapping(file)
    state = {name: mapping.tensor(entry) for name, entry in mapping.header.entries.items()}
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False)
    for block in model.blocks[1:3]:
        block.float().bfloat16()
    engine = attach(model, cuda(), [mapping])
    budget = dict(plans(engine))["pinned"]
    engine.load(budget)
    with engine.run():
        assert torch.equal(model(x), want)
        assert torch.equal(model(x), want)
    snapshot = engine.snapshot()
    assert snapshot.memory.locked_copy_bytes > 0
    assert [r.placement for r in snapshot.layers[1:3]] == [Placement.PINNED] * 2
    assert [r.in_place for r in snapshot.layers[:LAYERS]] == [True, False, False, True, True]
    assert snapshot.notes == ()
    engine.unload()
    assert engine.snapshot().memory.locked_copy_bytes == 0
    engine.load(budget)
    with engine.run():
        assert torch.equal(model(x), want)
    assert engine.snapshot().notes == ()
    engine.detach()
    assert a_kernel_runs()


def test_twenty_cycles_leave_nothing_on_the_device_or_the_host(file: Path) -> None:
    x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)

    def cycle() -> None:
        model, engine = mapped_engine(file)
        for name, budget in plans(engine):
            del name
            engine.load(budget)
            with engine.run():
                model(x)
        engine.detach()

    for _ in range(60):  # the heap and the driver fill their own pools first (measured: 50 cycles)
        cycle()
    gc.collect()
    torch.cuda.synchronize()
    device, host = torch.cuda.memory_allocated(), process_memory()
    for _ in range(20):
        cycle()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == device
    after = process_memory()
    # One model or one staging left in each cycle would be 280 MiB or 640 MiB by now. Below that the
    # heap swings without a trend: 454 to 498 MiB over 160 cycles (an H200, 2026-11-29).
    assert after.descriptors - host.descriptors < 20 // 2
    assert after.threads == host.threads
    assert after.rss_anon_bytes - host.rss_anon_bytes < 100 * 2**20


def test_the_device_peak_is_within_the_budget_at_the_allocator(file: Path) -> None:
    model, engine = mapped_engine(file)
    x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
    for name, budget in plans(engine):
        engine.unload()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.load(budget)
        with engine.run():
            model(x)
        activations = engine.snapshot().memory.activation_peak_bytes
        assert activations is not None
        assert budget.device_bytes is not None
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= budget.device_bytes + activations + ALLOCATOR_ROUNDING_BYTES, name
    engine.detach()


def test_a_card_with_less_than_the_budget_runs_a_smaller_plan_and_says_so(tmp_path: Path) -> None:
    width = 4096
    path = tmp_path / "wide.safetensors"
    save_file(Model(width).to(torch.bfloat16).state_dict(), path)
    model, engine = mapped_engine(path, width)
    x = torch.randn(16, width, device="cuda", dtype=torch.bfloat16)
    engine.load(Budget(None, 0))
    want = model(x)
    full = engine.snapshot().memory.device_bytes
    engine.unload()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    room = torch.cuda.memory_reserved() + full - 40 * 2**20
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        engine.load(Budget(None, 0))
        with engine.run():
            assert torch.equal(model(x), want)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.snapshot().memory.device_bytes < full
    assert "a smaller plan runs" in engine.snapshot().notes[0]
    engine.detach()


def test_staging_goes_back_to_the_system_whole(file: Path) -> None:
    model, engine = mapped_engine(file)
    x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
    budget = dict(plans(engine))["mapped through chunks"]

    def load_run_unload() -> None:
        engine.load(budget)
        with engine.run():
            model(x)
        engine.unload()

    load_run_unload()
    before = process_memory().rss_anon_bytes
    for _ in range(10):
        load_run_unload()
    # Ten times the staging would be over a GiB; one lane is 16.
    assert process_memory().rss_anon_bytes - before < 16 * 2**20
    engine.detach()


# Sleep. Case 26.


@pytest.mark.parametrize("keep_locks", [True, False])
def test_what_sleeps_is_off_the_card_by_the_drivers_count_and_wakes_exact(
    tmp_path: Path, keep_locks: bool
) -> None:
    width = 4096
    model, engine = mapped_engine(wide_file(tmp_path, width), width)
    x = torch.randn(16, width, device="cuda", dtype=torch.bfloat16)

    def free() -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])

    for name in ("resident", "pinned", "mapped through chunks"):
        engine.load(dict(plans(engine))[name])
        with engine.run():
            want = model(x)
        locked = engine.snapshot().memory.locked_bytes
        for _ in range(20):
            before, held = free(), engine.device_bytes
            engine.sleep(keep_locks)
            assert free() - before >= held * 99 // 100
            assert engine.snapshot().memory.locked_bytes == (locked if keep_locks else 0)
            engine.wake()
            assert engine.device_bytes == held
            with engine.run():
                assert torch.equal(model(x), want)
        engine.unload()
    engine.detach()


# Corrections between passes


def wide_file(tmp_path: Path, width: int) -> Path:
    path = tmp_path / "wide.safetensors"
    if not path.exists():
        torch.manual_seed(0)
        save_file(Model(width).to(torch.bfloat16).state_dict(), path)
    return path


@pytest.mark.parametrize("guess", ["far too high", "far too low"])
def test_a_wrong_guess_is_corrected_after_the_first_pass(tmp_path: Path, guess: str) -> None:
    width = 4096
    model, engine = mapped_engine(
        wide_file(tmp_path, width),
        width,
        config=EngineConfig(margin_bytes=16 << 20, growth_margin_bytes=0),
    )
    x = torch.randn(8192, width, device="cuda", dtype=torch.bfloat16)
    full, layer = full_of(engine), engine.snapshot().layers[0].size_bytes
    engine.load(Budget(None, 0))
    want = model(x)
    with engine.run():
        model(x)
        engine.end_pass()
    need = engine.activation_need_bytes
    assert need is not None
    budget = Budget(full + need - 2 * layer, 2**30)
    assert budget.device_bytes is not None
    high = budget.device_bytes - smallest_of(engine)
    guessed = engine.load(budget, high if guess == "far too high" else 0)
    assert (guessed.device_bytes < full - 2 * layer) is (guess == "far too high")
    with engine.run():
        for step in range(6):
            assert torch.equal(model(x), want), step
            engine.end_pass()
        held = engine.snapshot().memory.device_bytes
    now = engine.activation_need_bytes
    assert now is not None
    # One run's peak differs from the next one's by a segment of torch's cache; a layer is more.
    assert held + now <= budget.device_bytes + layer
    if guess == "far too high":
        assert held > guessed.device_bytes
    else:
        assert held < guessed.device_bytes
    assert engine.snapshot().notes == ()
    engine.detach()


def test_fifty_steps_with_another_budget_each_stay_exact_and_within_it(file: Path) -> None:
    chance = random.Random(0)
    model, engine = mapped_engine(file, config=EngineConfig(margin_bytes=0, growth_margin_bytes=0))
    x = torch.randn(2048, WIDTH, device="cuda", dtype=torch.bfloat16)
    engine.load(Budget(None, 0))
    want = {order: model(x, order) for order in ORDERS}
    full, smallest = full_of(engine), smallest_of(engine)
    for step in range(50):
        device = smallest + chance.randrange(full - smallest + 1)
        host = chance.choice([0, staging(), staging() + chance.randrange(2**24), 2**30])
        engine.load(Budget(device, host))
        memory = engine.snapshot().memory
        assert memory.device_bytes <= device
        with engine.run():
            for order in (chance.choice(ORDERS), ORDERS[0]):
                assert torch.equal(model(x, order), want[order]), (step, order)
        assert engine.snapshot().memory.host_bytes <= host
    engine.detach()


# Another dtype on the device


@pytest.mark.parametrize(
    ("stored", "used"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)]
)
@pytest.mark.parametrize("count", [1, 7, 4097, 65536, 32 << 20, (32 << 20) + 3])
def test_numbers_are_rounded_as_to_rounds_them(
    stored: torch.dtype, used: torch.dtype, count: int
) -> None:
    backend = cuda()
    patterns = torch.arange(count, dtype=torch.int64).to(torch.int16).cuda()
    memory = backend.allocate(2 * count + 512)
    memory.fill_(7)
    there = memory[256 : 256 + 2 * count]
    there.copy_(patterns.view(torch.uint8))
    backend.recode([Recode(there, stored, used)])
    want = patterns.view(stored).to(used)
    torch.cuda.synchronize()
    assert torch.equal(there.view(torch.int16), want.view(torch.int16))
    assert bool((memory[:256] == 7).all() and (memory[256 + 2 * count :] == 7).all())


EVERY_BF16 = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)


def rounded_by(backend: CudaBackend, patterns: torch.Tensor) -> torch.Tensor:
    """The bits that come of these, 512 bytes into memory of the backend's."""
    memory = backend.allocate(2 * patterns.numel() + 512)[512:]
    memory.copy_(patterns.view(torch.uint8))
    backend.recode([Recode(memory, torch.bfloat16, torch.float16)])
    return memory.view(torch.int16)


def test_the_kernel_is_what_rounds_bf16_here() -> None:
    backend = cuda()
    assert isinstance(backend, CudaBackend)
    want = EVERY_BF16.cuda().view(torch.bfloat16).to(torch.float16).view(torch.int16)
    assert torch.equal(rounded_by(backend, EVERY_BF16), want)
    assert backend._rounder() is not None


class NoRounder:
    """Loads, and leaves everything as it was."""

    def round(self, address: int, units: int, stream: int) -> None:
        return


def no_driver() -> NoRounder:
    raise DriverError("switched off")


@pytest.mark.parametrize("load", [NoRounder, no_driver])
def test_where_the_kernel_cannot_be_trusted_torch_rounds(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[], NoRounder]
) -> None:
    backend = cuda()
    assert isinstance(backend, CudaBackend)
    monkeypatch.setattr(cuda_backend, "_ROUNDERS", {})
    monkeypatch.setattr(cuda_backend, "load_rounder", load)
    want = EVERY_BF16.cuda().view(torch.bfloat16).to(torch.float16).view(torch.int16)
    assert torch.equal(rounded_by(backend, EVERY_BF16), want)
    assert backend._rounder() is None


def test_bf16_weights_used_as_fp16_equal_the_half_model_bit_for_bit(file: Path) -> None:
    plain = Model().to(torch.bfloat16)
    mapping = open_mapping(file)
    plain.load_state_dict({n: mapping.tensor(e) for n, e in mapping.header.entries.items()})
    plain = plain.half().cuda().requires_grad_(False)
    x = torch.randn(2048, WIDTH, device="cuda", dtype=torch.float16)
    want = {order: plain(x, order) for order in ORDERS}
    wanted = {name: torch.float16 for name, _ in plain.named_parameters()}
    model, engine = mapped_engine(file, device_dtypes=wanted)
    for block in model.blocks:
        block.shift = block.shift.half()
    for name, budget in plans(engine):
        engine.load(budget)
        with engine.run():
            for _ in range(10):
                for order in ORDERS:
                    assert torch.equal(model(x, order), want[order]), (name, order)
    engine.unload()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    engine.detach()


# Case 11.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_stay_exact_beside_others_that_fill_the_link(
    file: Path, dtype: torch.dtype
) -> None:
    names = [name for name, _ in Model().named_parameters()]
    model, engine = mapped_engine(file, device_dtypes=dict.fromkeys(names, dtype))
    for block in model.blocks:
        block.shift = block.shift.to(dtype)
    x = torch.randn(2048, WIDTH, device="cuda", dtype=dtype)
    budgets = dict(plans(engine))
    engine.load(budgets["resident"])
    want = model(x)
    done = threading.Event()
    copied: list[int] = []

    def fill_the_link() -> None:
        stream = torch.cuda.Stream()
        source = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(stream):
            while not done.is_set():
                for _ in range(4):
                    target.copy_(source, non_blocking=True)
                stream.synchronize()
                copied.append(1)

    other = threading.Thread(target=fill_the_link)
    other.start()
    try:
        for name in ("pinned", "mapped through chunks", "6 tenths, pinned"):
            engine.load(budgets[name])
            for run in range(50):
                with engine.run():
                    assert torch.equal(model(x), want), (name, run)
    finally:
        done.set()
        other.join()
    assert copied
    engine.detach()


# Case 10.


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(width, width, bias=False, device="meta", dtype=torch.bfloat16)
        self.other = nn.Linear(width, width, bias=False, device="meta", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.other(self.one(x))


def test_layers_of_a_gibibyte_are_exact_through_tiny_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = 16384  # two weights of 512 MiB a layer
    path = tmp_path / "heavy.safetensors"
    model = nn.ModuleList(Pair(width) for _ in range(2))
    torch.manual_seed(0)
    save_file(
        {
            name: (torch.randn(width, width, device="cuda") / 128).to(torch.bfloat16).cpu()
            for name, _ in model.named_parameters()
        },
        path,
    )
    mapping = open_mapping(path)
    state = {name: mapping.tensor(entry) for name, entry in mapping.header.entries.items()}
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False)
    x = torch.randn(256, width, device="cuda", dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        out = x
        for pair in model:
            out = pair(out)
        return out

    monkeypatch.setattr(cuda_backend, "CHUNK_BYTES", 1 << 20)
    engine = attach(model, cuda(), [mapping])
    engine.load(Budget(None, 0))
    want = forward()
    engine.load(Budget(smallest_of(engine), staging()))
    memory = engine.snapshot().memory
    assert memory.staging_bytes > 0
    assert memory.slot_bytes > 0
    with engine.run():
        for step in range(3):
            assert torch.equal(forward(), want), step
    assert engine.snapshot().memory.locked_bytes == 0
    engine.detach()


# Case 55.


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_the_second_device_leaves_the_first_one_alone(file: Path) -> None:
    x = torch.randn(512, WIDTH, device="cuda:1", dtype=torch.bfloat16)
    torch.empty(1, device="cuda:0")
    torch.cuda.synchronize(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    allocated, free = torch.cuda.memory_allocated(0), torch.cuda.mem_get_info(0)[0]
    with torch.cuda.device(0):
        model, engine = mapped_engine(file, device="cuda:1")
        want = None
        for name, budget in plans(engine, "cuda:1"):
            engine.load(budget)
            with engine.run():
                for _ in range(3):
                    got = model(x)
                    want = got if want is None else want
                    assert torch.equal(got, want), name
                    engine.end_pass()
            assert {p.device.index for p in model.embed.parameters()} == {1}
        engine.detach()
        assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == allocated
    assert torch.cuda.max_memory_allocated(0) == allocated
    # Kernels that are loaded on first use may take a little of the driver's memory.
    assert free - torch.cuda.mem_get_info(0)[0] < 64 << 20
