"""Tiny models over real checkpoint files, and engines that are checked when the test ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from offload_core.device import CpuBackend, DeviceBackend, FakeBackend
from offload_core.host import FileMapping, open_mapping
from offload_core.run import LayerEngine, attach
from offload_core.values import Budget, DeviceBudgetError, EngineConfig, Switches

DIM = 64


class Block(nn.Module):
    """LayerNorm, Linear, a bare parameter and a buffer that no checkpoint holds."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.lin = nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.rand(dim) + 0.5)
        self.register_buffer("shift", torch.full((dim,), 0.25), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lin(self.norm(x)) * self.scale + self.shift


class DeepBlock(Block):
    """A block of ten weights, of which any number may stay on the device."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.more = nn.ModuleList(nn.Linear(dim, dim, bias=index > 2) for index in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for linear in self.more:
            x = x + linear(x) * 0.5
        return x


class TinyDit(nn.Module):
    """Embed, n blocks, final; ``order`` says which blocks run, as step caching does."""

    def __init__(self, blocks: int, dim: int = DIM, kind: type[Block] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(kind(dim) for _ in range(blocks))
        self.final = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, order: Sequence[int] | None = None) -> torch.Tensor:
        x = self.embed(x)
        for index in range(len(self.blocks)) if order is None else order:
            x = self.blocks[index](x)
        return self.final(x)


@dataclass
class Tiny:
    """A plain model, its checkpoint, and the same model over the mapping of that checkpoint."""

    plain: TinyDit
    module: TinyDit
    mapping: FileMapping
    path: Path
    x: torch.Tensor

    def is_exact(self, order: Sequence[int] | None = None) -> bool:
        with torch.no_grad():
            return torch.equal(self.module(self.x, order), self.plain(self.x, order))


def load_over(module: nn.Module, mapping: FileMapping) -> None:
    """Make every weight of ``module`` a view on the mapping."""
    state = {name: mapping.tensor(entry) for name, entry in mapping.header.entries.items()}
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False)


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    """These models are tiny: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def save_model(module: nn.Module, name: str = "tiny.safetensors") -> Path:
        path = tmp_path / name
        save_file({k: v.contiguous() for k, v in module.state_dict().items()}, path)
        return path

    return save_model


@pytest.fixture
def mapped(save: Callable[..., Path]) -> Callable[..., FileMapping]:
    """Save a model and lay it over the mapping of its own file."""

    def map_model(module: nn.Module, name: str = "tiny.safetensors") -> FileMapping:
        mapping = open_mapping(save(module, name))
        load_over(module, mapping)
        return mapping

    return map_model


@pytest.fixture
def make_tiny(save: Callable[..., Path], tmp_path: Path) -> Callable[..., Tiny]:
    """The same figures are the same model over the same file, through a mapping of its own."""

    def make(blocks: int = 3, dim: int = DIM, seed: int = 0, deep: bool = False) -> Tiny:
        torch.manual_seed(seed)
        kind = DeepBlock if deep else Block
        plain = TinyDit(blocks, dim, kind).to(torch.bfloat16)
        x = torch.randn(4, dim, dtype=torch.bfloat16)
        name = "deep" if deep else "tiny"
        path = tmp_path / f"{name}{blocks}-{dim}-{seed}.safetensors"
        if not path.exists():
            save(plain, path.name)
        mapping = open_mapping(path)
        module = TinyDit(blocks, dim, kind).to(torch.bfloat16)
        load_over(module, mapping)
        return Tiny(plain, module, mapping, path, x)

    return make


@pytest.fixture
def make_dit() -> Callable[[int], TinyDit]:
    return lambda blocks: TinyDit(blocks)


@pytest.fixture
def tiny(make_tiny: Callable[..., Tiny]) -> Tiny:
    """Three blocks."""
    return make_tiny(3)


@pytest.fixture
def poisoned() -> Callable[..., EngineConfig]:
    """A configuration under which whatever is used after its release reads NaN."""

    def config(slots: int = 2, courier: bool = True, **more: Any) -> EngineConfig:
        more.setdefault("interrupt_poll_seconds", 0.001)
        more.setdefault("growth_margin_bytes", 0)
        return EngineConfig(slots=slots, switches=Switches(courier=courier, poison=True), **more)

    return config


@pytest.fixture
def engine_over(poisoned: Callable[..., EngineConfig]) -> Iterator[Callable[..., LayerEngine]]:
    """Attach; when the test ends, detach, and ask the fake device what it saw."""
    made: list[tuple[LayerEngine, DeviceBackend]] = []

    def over(
        subject: Tiny | nn.Module,
        backend: DeviceBackend | None = None,
        mappings: Sequence[FileMapping] | None = None,
        config: EngineConfig | None = None,
        **more: Any,
    ) -> LayerEngine:
        backend = backend or FakeBackend()
        if isinstance(subject, Tiny):
            subject, mappings = subject.module, [subject.mapping]
        engine = attach(subject, backend, mappings or (), config or poisoned(), **more)
        made.append((engine, backend))
        return engine

    yield over
    for engine, _ in made:
        engine.detach()
    for _, backend in made:
        if isinstance(backend, FakeBackend):
            assert backend.violations == []
            assert backend.locker.locked == {}


@dataclass(frozen=True)
class Sizes:
    """What the layers of an engine cost, when all of them are alike."""

    base_bytes: int
    layer_bytes: int
    count: int


def smallest_of(engine: LayerEngine) -> int:
    # Not pytest.raises: it would leave a cycle that keeps the engine until a collection.
    try:
        engine.plan(Budget(0))
    except DeviceBudgetError as error:
        return error.smallest_bytes
    raise AssertionError("a device budget of nothing was accepted")


def sizes_of(engine: LayerEngine) -> Sizes:
    count = engine.snapshot().streamable_layers
    whole = engine.plan(Budget()).device_bytes
    if count == 0:
        return Sizes(whole, 0, 0)
    if count == 1:
        layer = engine.snapshot().layers[0].size_bytes
        return Sizes(whole - layer, layer, 1)
    layer = (whole - smallest_of(engine)) // (count - 1)
    return Sizes(whole - count * layer, layer, count)


@pytest.fixture
def sizes() -> Callable[[LayerEngine], Sizes]:
    return sizes_of


@pytest.fixture
def budget_for() -> Callable[..., Budget]:
    """The budget of a named plan: everything streams through ``slots`` unless it says otherwise."""

    def budget(engine: LayerEngine, plan: str, slots: int = 2) -> Budget:
        size = sizes_of(engine)
        streamed = size.base_bytes + min(slots, max(size.count, 1)) * size.layer_bytes
        locks = engine.plan(Budget(streamed, None)).lock_bytes
        budgets = {
            "resident": Budget(None, None),
            "pinned": Budget(streamed, None),
            "mapped": Budget(streamed, 0),
            "mixed": Budget(streamed + size.layer_bytes, locks // 2),
            "smallest": Budget(size.base_bytes + size.layer_bytes, 0),
        }
        return budgets[plan]

    return budget


@pytest.fixture
def share_of() -> Callable[..., int]:
    """A device budget so many hundredths of the way from the smallest to everything."""

    def share(engine: LayerEngine, hundredths: int) -> int:
        smallest, whole = smallest_of(engine), engine.plan(Budget()).device_bytes
        return smallest + (whole - smallest) * hundredths // 100

    return share


@dataclass
class Gate:
    """Holds the courier inside ``on_ship`` until it is opened; ``reached`` says it is there."""

    is_open: threading.Event
    reached: threading.Event

    def __call__(self, pieces: object) -> None:
        if not self.is_open.is_set():
            self.reached.set()
            assert self.is_open.wait(60), "nobody opened the gate"

    def shut(self) -> None:
        self.reached.clear()
        self.is_open.clear()

    def open(self) -> None:
        self.is_open.set()

    def await_courier(self) -> None:
        assert self.reached.wait(60), "the courier never came"


@pytest.fixture
def gate() -> Iterator[Gate]:
    """An open gate for ``FakeBackend.on_ship``; opened again when the test ends."""
    made = Gate(threading.Event(), threading.Event())
    made.open()
    yield made
    made.open()


@pytest.fixture(params=["cpu", "fake"])
def backend(request: pytest.FixtureRequest) -> DeviceBackend:
    """Each of the devices that a machine without a GPU has."""
    return CpuBackend() if request.param == "cpu" else FakeBackend()
