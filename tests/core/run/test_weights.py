"""Odd weights and odd trees: strides, ties, wrappers, converted copies, models without blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from offload_core.device import CpuBackend, FakeBackend
from offload_core.host import FileMapping, maps_lookup, process_memory
from offload_core.run import BASE_NAME, LayerEngine
from offload_core.values import (
    Budget,
    EngineConfig,
    HostBudgetError,
    LayerState,
    Placement,
)


class Strided(nn.Module):
    """Weights of every odd shape; ``forward`` uses, and so checks, each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes3 = nn.Parameter(torch.tensor([1, 2, 3], dtype=torch.uint8), requires_grad=False)
        self.brain = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.full = nn.Parameter(torch.randn(7))
        conv = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
        self.last2d = nn.Parameter(conv)
        conv = torch.randn(2, 4, 3, 3, 3).to(memory_format=torch.channels_last_3d)
        self.last3d = nn.Parameter(conv)
        self.turned = nn.Parameter(torch.randn(6, 10).t())
        self.expanded = nn.Parameter(torch.randn(1, 9).expand(4, 9))
        self.sparse_columns = nn.Parameter(torch.randn(16, 16)[:, ::8])
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.also_nothing = nn.Parameter(torch.empty(0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self._parameters.values():
            assert weight is not None
            x = x + weight.float().sum()
        return x


def fingerprint(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (weight.shape, weight.stride(), weight.dtype, weight.detach().clone())
        for name, weight in module._parameters.items()
        if weight is not None
    }


def same(one: dict[str, tuple[Any, ...]], other: dict[str, tuple[Any, ...]]) -> bool:
    return all(
        a[:3] == b[:3] and torch.equal(a[3], b[3])
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def test_strides_dtypes_and_alignment_survive_streaming(
    engine_over: Callable[..., LayerEngine], sizes: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(Strided() for _ in range(3))
    before = [fingerprint(block) for block in model.blocks]
    seen: list[dict[str, tuple[Any, ...]]] = []
    alignments: set[int] = set()

    def look(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(fingerprint(module))
        streamed = (w for n, w in module._parameters.items() if n != "sparse_columns")
        alignments.update(w.data_ptr() % 256 for w in streamed if w is not None)

    # Before ours, which ends a layer's use of its weights.
    for block in model.blocks:
        block.register_forward_hook(look)
    engine = engine_over(model)
    size = sizes(engine)
    engine.load(Budget(size.base_bytes + 2 * size.layer_bytes, None))
    with engine.run():
        for block in model.blocks:
            block(torch.zeros(1))
    assert all(same(one, other) for one, other in zip(before, seen, strict=True))
    assert alignments == {0}
    reason = engine.snapshot().layers[-1].reason
    names = ", ".join(f"blocks.{index}.sparse_columns" for index in range(3))
    assert f"{names} stay on the device: its strides leave most" in reason
    engine.unload()
    assert all(same(one, fingerprint(b)) for one, b in zip(before, model.blocks, strict=True))


class Tied(nn.Module):
    """A head tied to the embedding inside two layers, one Linear twice, one block twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(64, 64)
        twice = nn.Sequential(shared, nn.GELU(), shared)
        block = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.first = Wrapped(nn.Linear(64, 64))
        self.last = Wrapped(nn.Linear(64, 64))
        self.last.inner.weight = self.first.inner.weight
        self.block = Wrapped(block)
        self.twice = Wrapped(twice)
        self.blocks = nn.ModuleList(
            [self.first, self.block, self.twice, self.block, Wrapped(nn.Linear(64, 64)), self.last]
        )
        self.head = nn.Linear(64, 64)
        self.head.bias = self.blocks[4].inner.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wrapped(nn.Module):
    """A block in the sense of a model: it is called, and calls what it holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("host", [None, 0])
def test_tied_weights_have_one_state_are_counted_once_and_stay_tied(
    engine_over: Callable[..., LayerEngine], host: int | None
) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.body = Tied()
    x = torch.randn(2, 64)
    engine = engine_over(model.body)
    expected = model.body(x)
    total = sum(p.nelement() * p.element_size() for p in model.body.parameters())
    assert sum(layer.size_bytes for layer in engine.snapshot().layers) == total
    names = [layer.name for layer in engine.snapshot().layers]
    assert names == ["blocks.0", "blocks.1", "blocks.2", "blocks.4", "blocks.5", BASE_NAME]
    homes = [model.body.first.inner.weight, model.body.head.bias]
    everything = engine.plan(Budget(None, host)).device_bytes
    engine.load(Budget(everything - 1, host))
    with engine.run():
        assert torch.equal(model.body(x), expected)
        assert torch.equal(model.body(x), expected)
        # Between its owners' turns too it stays on the device, under every name.
        assert model.body.first.inner.weight is not homes[0]
        assert model.body.head.bias is not homes[1]
        assert model.body.first.inner.weight is model.body.last.inner.weight
        assert model.body.head.bias is model.body.blocks[4].inner.bias
    assert "shared by several layers" in engine.snapshot().layers[-1].reason
    engine.detach()
    assert model.body.first.inner.weight is model.body.last.inner.weight
    assert model.body.head.bias is model.body.blocks[4].inner.bias
    assert torch.equal(model.body(x), expected)


class Chain(nn.Module):
    def __init__(self, count: int, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapped(nn.Linear(width, width)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("host", [None, 0])
def test_parameters_over_the_same_bytes_are_of_one_layer_or_of_none(
    engine_over: Callable[..., LayerEngine],
    mapped: Callable[..., FileMapping],
    share_of: Callable[..., int],
    in_file: bool,
    host: int | None,
) -> None:
    torch.manual_seed(0)
    model = Chain(6, 128)
    mappings = [mapped(model)] if in_file else []
    layers = [block.inner for block in model.blocks]

    def alias(weight: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(weight.detach(), requires_grad=False)

    # Another object in another layer, a part of one in a third, and twice in the same layer.
    layers[1].weight = alias(layers[0].weight)
    layers[2].bias = alias(layers[0].weight.view(-1)[128:256])
    layers[3].again = alias(layers[3].weight)
    x = torch.randn(2, 128)
    expected = model(x)
    fake = FakeBackend()
    engine = engine_over(model, fake, mappings)
    engine.load(Budget(share_of(engine, 20), host))
    with engine.run():
        for _ in range(2):
            assert torch.equal(model(x), expected)
    reason = engine.snapshot().layers[-1].reason
    names = "blocks.0.inner.weight, blocks.1.inner.weight, blocks.2.inner.bias"
    assert f"{names} stay on the device: another layer has the same bytes" in reason
    assert "blocks.3" not in reason
    assert bool(fake.locker.locked) is (host is None)
    assert engine.snapshot().notes == () or host == 0
    engine.detach()
    assert layers[1].weight.data_ptr() == layers[0].weight.data_ptr()
    assert torch.equal(model(x), expected)


class Quantised(torch.Tensor):
    """A toy wrapper subclass: int8 payload and a scale, as quantised formats have."""

    q: torch.Tensor
    s: torch.Tensor

    @staticmethod
    def __new__(cls: Any, q: torch.Tensor, s: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)

    def __init__(self, q: torch.Tensor, s: torch.Tensor) -> None:
        self.q, self.s = q, s

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].q, args[0].s)
        plain = [a.q.float() * a.s if isinstance(a, Quantised) else a for a in args]
        return func(*plain, **(kwargs or {}))


def test_quantised_wrappers_stay_whole_on_the_device_with_a_reason(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(3)
    payload = torch.randint(-9, 9, (64, 64), dtype=torch.int8)
    for model in (tiny.plain, tiny.module):
        wrapped = Quantised(payload, torch.tensor(0.01))
        torch.manual_seed(1)
        model.blocks[1].lin = nn.Linear(64, 64)
        model.blocks[1].lin.weight = nn.Parameter(wrapped, requires_grad=False)
        model.float()
        assert isinstance(model.blocks[1].lin.weight, Quantised)
    tiny.x = tiny.x.float()
    engine = engine_over(tiny.module)
    original = tiny.module.blocks[1].lin.weight
    engine.load(Budget(engine.plan(Budget()).device_bytes - 1, 0))
    with engine.run():
        assert tiny.is_exact()
        assert tiny.is_exact()
        assert tiny.module.blocks[1].lin.weight.q is payload
    expected = "blocks.1.lin.weight stays on the device: Quantised cannot be taken apart"
    assert expected in engine.snapshot().layers[-1].reason
    engine.unload()
    assert tiny.module.blocks[1].lin.weight is original


def test_empty_weights_are_never_taken_for_one_another(
    engine_over: Callable[..., LayerEngine],
) -> None:
    model = nn.ModuleList(Wrapped(nn.Linear(4, 4)) for _ in range(3))
    for index, block in enumerate(model):
        block.hollow = nn.Parameter(torch.empty(0, index + 1))
    engine = engine_over(model)
    engine.load(Budget(engine.plan(Budget()).device_bytes - 1, 0))
    with engine.run():
        for index, block in enumerate(model):
            block(torch.zeros(1, 4))
            assert block.hollow.shape == (0, index + 1)
    assert len({id(block.hollow) for block in model}) == 3


def test_a_converted_weight_keeps_its_dtype_and_is_charged_as_a_copy(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(3)
    for model in (tiny.plain, tiny.module):
        for module in (model.embed, *model.blocks[:2]):
            module.float()
    tiny.x = tiny.x.float()

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for module in (model.embed, *model.blocks[:2]):
            x = module(x)
        return model.blocks[2](x.bfloat16())

    engine = engine_over(tiny)
    copied = engine.snapshot().memory.copied_bytes
    converted = [*tiny.module.embed.parameters(), *tiny.module.blocks[0].parameters()]
    converted += tiny.module.blocks[1].parameters()
    assert copied == sum(p.nelement() * p.element_size() for p in converted)
    device = engine.plan(Budget()).device_bytes - 1
    text = (
        rf"of weights had to be copied .*; raise the host budget to .* \({copied} bytes\) or load "
        "an aligned safetensors file in its own dtype"
    )
    with pytest.raises(HostBudgetError, match=text) as refused:
        engine.plan(Budget(device, copied - 1))
    assert refused.value.smallest_bytes == copied
    engine.load(Budget(device - 8192, copied))
    placements = [layer.placement for layer in engine.snapshot().layers]
    assert Placement.PAGEABLE in placements
    assert engine.snapshot().memory.host_bytes <= copied
    with engine.run(), torch.no_grad():
        assert torch.equal(forward(tiny.module, tiny.x), forward(tiny.plain, tiny.x))
        assert tiny.module.embed.weight.dtype is torch.float32
        assert tiny.module.final.weight.dtype is torch.bfloat16


class Rootish(nn.Module):
    """All five places where a tensor can hide."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks
        self.table = nn.Parameter(torch.randn(64))
        self.register_buffer("rope", torch.randn(64), persistent=False)
        self.plain = torch.randn(64)
        self.by_name = {"bias": torch.randn(64)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.table + self.rope + self.plain + self.by_name["bias"]
        for block in self.blocks:
            x = block(x)
        return x


def test_bare_parameters_buffers_and_plain_tensors_are_where_they_are_used(
    engine_over: Callable[..., LayerEngine],
) -> None:
    torch.manual_seed(0)
    model = Rootish(nn.ModuleList(Wrapped(nn.Linear(64, 64)) for _ in range(3)))
    for block in model.blocks:
        block.gain = nn.Parameter(torch.randn(64))
    x = torch.randn(2, 64)
    expected = model(x)
    plain = model.plain
    engine = engine_over(model)
    engine.load(Budget(engine.plan(Budget()).device_bytes - 1, 0))
    with engine.run():
        assert torch.equal(model(x), expected)
        model.rope.add_(1)  # a buffer may change while the model runs, and keeps its value
    changed = model.rope.clone()
    engine.unload()
    assert torch.equal(model.rope, changed)
    assert model.plain is plain


def test_buffers_count_on_the_device_budget(engine_over: Callable[..., LayerEngine]) -> None:
    model = Rootish(nn.ModuleList(Wrapped(nn.Linear(64, 64)) for _ in range(3)))
    engine = engine_over(model)
    before = engine.plan(Budget()).device_bytes
    model.register_buffer("large", torch.zeros(1024))
    engine.detach()
    assert engine_over(model).plan(Budget()).device_bytes == before + 4096


def no_layers() -> list[tuple[str, nn.Module]]:
    bare = nn.Module()
    bare.weight = nn.Parameter(torch.randn(64))
    return [
        ("no parameters", nn.Module()),
        ("one bare parameter", bare),
        ("identities", nn.Sequential(nn.Identity(), nn.Identity())),
        ("a convolution", nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())),
        ("an empty list", nn.ModuleList()),
    ]


@pytest.mark.parametrize(("name", "model"), no_layers(), ids=[n for n, _ in no_layers()])
def test_a_model_without_layers_still_runs_and_says_zero_layers(
    engine_over: Callable[..., LayerEngine], name: str, model: nn.Module
) -> None:
    engine = engine_over(model)
    for _ in range(2):
        engine.load(Budget(None, 0))
        with engine.run():
            if isinstance(model, nn.Sequential):
                model(torch.zeros(1, 3, 4, 4))
        snapshot = engine.snapshot()
        assert snapshot.streamable_layers == 0
        assert json.dumps(asdict(snapshot.memory))
        engine.unload()


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_model_with_no_or_one_block_runs(
    make_tiny: Callable[..., Any], engine_over: Callable[..., LayerEngine], blocks: int
) -> None:
    tiny = make_tiny(blocks)
    engine = engine_over(tiny)
    engine.load(Budget())
    with engine.run():
        assert tiny.is_exact()
    assert engine.snapshot().streamable_layers == blocks
    assert engine.snapshot().layers[-1].name == BASE_NAME


class UNet(nn.Module):
    """Walks the parts of its Sequentials itself, as real UNets do, and keeps skips."""

    def __init__(self) -> None:
        super().__init__()
        self.input_blocks = nn.ModuleList(
            nn.Sequential(Wrapped(nn.Conv2d(4, 4, 3, padding=1)), Wrapped(nn.Conv2d(4, 4, 1)))
            for _ in range(3)
        )
        self.middle_block = nn.Sequential(Wrapped(nn.Conv2d(4, 4, 1)), nn.SiLU())
        self.output_blocks = nn.ModuleList(
            nn.Sequential(Wrapped(nn.Conv2d(8, 4, 3, padding=1))) for _ in range(3)
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, control: torch.Tensor | None = None) -> torch.Tensor:
        skips = []
        for number, block in enumerate(self.input_blocks):
            if number == 1 and control is None:
                skips.append(x)
                continue
            for part in block:
                x = part(x)
            skips.append(x)
        for part in self.middle_block:
            x = part(x)
        for block in self.output_blocks:
            x = torch.cat([x, skips.pop()], dim=1)
            for part in block:
                x = part(x)
        return x


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_unet_streams_part_by_part_with_and_without_its_conditional_block(
    engine_over: Callable[..., LayerEngine],
    mapped: Callable[..., FileMapping],
    poisoned: Callable[..., EngineConfig],
    slots: int,
) -> None:
    torch.manual_seed(0)
    model = UNet()
    mapping = mapped(model)
    x, control = torch.randn(1, 4, 6, 6), torch.zeros(1)
    want = {flag: model(x, control if flag else None) for flag in (True, False)}
    engine = engine_over(model, mappings=[mapping], config=poisoned(slots))
    assert engine.snapshot().streamable_layers == 10
    assert engine.snapshot().block_lists == ("input_blocks", "middle_block", "output_blocks")
    smallest = engine.plan(Budget()).device_bytes // 2
    engine.load(Budget(smallest, 0))
    for flag in (True, False, True, True, False):
        with engine.run():
            for _ in range(2):
                assert torch.equal(model(x, control if flag else None), want[flag])


# Placement that is real


def test_the_reported_placement_is_where_the_bytes_really_are(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(5)
    engine = engine_over(tiny, CpuBackend())
    locked_before = process_memory().locked_bytes
    for plan in ("resident", "pinned", "mapped", "mixed", "smallest"):
        engine.load(budget_for(engine, plan))
        with engine.run():
            assert tiny.is_exact()
        engine.load(engine.snapshot().budget)
        snapshot = engine.snapshot()
        for layer in snapshot.layers:
            modules = [tiny.module.embed, tiny.module.final]
            if layer.name != BASE_NAME:
                modules = [tiny.module.get_submodule(layer.name)]
            where: list[tuple[int, bool]] = []
            for module in modules:
                for weight in module.parameters():
                    line = maps_lookup(weight.data_ptr())
                    assert line is not None
                    where.append((weight.numel() * 2, line.path == str(tiny.path)))
            # Between passes, what streams is the file's own pages again; what stays is not.
            assert sum(n for n, in_file in where if not in_file) == layer.resident_bytes, layer
            resident = layer.placement is Placement.RESIDENT
            assert any(in_file for _, in_file in where) is not resident
        locked = process_memory().locked_bytes
        if locked_before is not None and locked is not None:
            assert locked - locked_before == snapshot.memory.locked_bytes
        pinned = [layer for layer in snapshot.layers if layer.placement is Placement.PINNED]
        assert bool(pinned) is (snapshot.memory.locked_bytes > 0)
    engine.unload()
    assert process_memory().locked_bytes == locked_before
    assert {layer.placement for layer in engine.snapshot().layers} == {Placement.MAPPED}


def test_a_layer_is_called_pinned_only_once_its_pages_are_locked(
    tiny: Any,
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    poisoned: Callable[..., EngineConfig],
) -> None:
    # Without the thread, which would take locks ahead of the first run.
    engine = engine_over(tiny, FakeBackend(), config=poisoned(courier=False))
    engine.load(budget_for(engine, "pinned"))
    first = engine.snapshot().layers[0]
    assert first.placement is Placement.MAPPED
    assert first.reason == "its pages are locked when it first runs"
    with engine.run():
        tiny.is_exact()
    first = engine.snapshot().layers[0]
    assert first.placement is Placement.PINNED
    assert first.in_place
    assert first.state is not LayerState.IN_USE


def test_the_snapshot_counts_every_dtype_and_tensor(
    make_tiny: Callable[..., Any], engine_over: Callable[..., LayerEngine]
) -> None:
    tiny = make_tiny(2)
    tiny.module.blocks[1].norm.float()
    engine = engine_over(tiny)
    layers = engine.snapshot().layers
    assert layers[0].dtypes == ("bfloat16",)
    assert layers[1].dtypes == ("bfloat16", "float32")
    assert [layer.tensors for layer in layers] == [5, 5, 4]
    assert "bytes are copies in memory" in layers[1].reason
    assert isinstance(tiny.mapping, FileMapping)
