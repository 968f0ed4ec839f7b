"""Weights that are shells around tensors of a layout that nobody here knows: they stream as what
they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from offload_core.device import FakeBackend
from offload_core.host import FileMapping, open_mapping
from offload_core.plan import find_block_lists
from offload_core.run import LayerEngine, is_wrapper, over_originals, tensor_bytes
from offload_core.run.weights import take_inventory
from offload_core.run.wrappers import Recipe, Site, Wrapper, WrapperBinding
from offload_core.values import Budget, EngineConfig, EngineState, Switches

ROWS, COLUMNS = 48, 64
PLANS = (0, 15, 50, 85, 100)
Over = Callable[..., LayerEngine]


class Coded(torch.Tensor):
    """Whole numbers, one scale for all of them, and maybe a shift for each column."""

    codes: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor | None

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, scale: torch.Tensor, shift: Any = None) -> Coded:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
    ) -> None:
        self.codes, self.scale, self.shift = codes, scale, shift

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "shift"], type(self).__name__

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Any], context: Any, size: Any, stride: Any
    ) -> Coded:
        assert context == cls.__name__
        made = cls(inner["codes"], inner["scale"], inner["shift"])
        assert (made.shape, made.stride()) == (size, stride)
        return made

    def plain(self) -> torch.Tensor:
        values = self.codes.float() * self.scale
        return values if self.shift is None else values + self.shift

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            # As the real ones: only what is large stays where it is.
            one = args[0]
            shift = None if one.shift is None else one.shift.clone()
            return type(one)(one.codes.detach(), one.scale.clone(), shift)
        values = [one.plain() if isinstance(one, Coded) else one for one in args]
        return func(*values, **(kwargs or {}))


class Doubled(torch.Tensor):
    """A wrapper in a wrapper: twice the one within, and a gain of its own."""

    within: Coded
    gain: torch.Tensor

    @staticmethod
    def __new__(cls: Any, within: Coded, gain: torch.Tensor) -> Doubled:
        return torch.Tensor._make_wrapper_subclass(
            cls, within.shape, dtype=torch.float32, device=gain.device
        )

    def __init__(self, within: Coded, gain: torch.Tensor) -> None:
        self.within, self.gain = within, gain

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["within", "gain"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Any], context: Any, size: Any, stride: Any
    ) -> Doubled:
        return cls(inner["within"], inner["gain"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].within, args[0].gain)
        values = [
            2 * one.within.plain() * one.gain if isinstance(one, cls) else one for one in args
        ]
        return func(*values, **(kwargs or {}))


class Layer(nn.Module):
    """A coded matrix, its plain bias, and a plain matrix back to the first width."""

    def __init__(self, coded: torch.Tensor, bias: torch.Tensor, back: torch.Tensor) -> None:
        super().__init__()
        self.coded = wrapped(coded)
        self.bias = nn.Parameter(bias, requires_grad=False)
        self.back = nn.Parameter(back, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.linear(x, self.coded, self.bias).tanh() @ self.back


class Model(nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor], layers: int, nested: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Layer(
                coded_of(tensors, f"{index}", nested),
                tensors[f"{index}.bias"],
                tensors[f"{index}.back"],
            )
            for index in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def wrapped(coded: torch.Tensor) -> nn.Parameter:
    """A parameter over the very tensors, as a loader that does not detach makes it."""
    coded._is_param = True
    return coded  # type: ignore[return-value]


def coded_of(tensors: dict[str, torch.Tensor], name: str, nested: bool) -> torch.Tensor:
    shift = tensors.get(f"{name}.shift")
    coded = Coded(tensors[f"{name}.codes"], tensors[f"{name}.scale"], shift)
    return Doubled(coded, tensors[f"{name}.gain"]) if nested else coded


def tensors_of(layers: int, nested: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    for index in range(layers):
        codes = torch.randint(-99, 99, (ROWS, COLUMNS), dtype=torch.int8, generator=generator)
        found[f"{index}.codes"] = codes
        found[f"{index}.scale"] = torch.tensor(0.001 * (index + 1))  # of no dimension
        if index % 2:
            found[f"{index}.shift"] = torch.randn(COLUMNS, generator=generator) / 99
        if nested:
            found[f"{index}.gain"] = torch.rand(1, generator=generator)
        found[f"{index}.bias"] = torch.randn(ROWS, generator=generator)
        found[f"{index}.back"] = torch.randn(ROWS, COLUMNS, generator=generator) / ROWS
    return found


@dataclass
class Pair:
    plain: Model
    module: Model
    mapping: FileMapping
    path: Path
    x: torch.Tensor

    def is_exact(self) -> bool:
        with torch.no_grad():
            return torch.equal(self.module(self.x), self.plain(self.x))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Pair]:
    """A model over a file, and the same one in ordinary memory."""

    def pair(layers: int = 5, nested: bool = False) -> Pair:
        path = tmp_path / f"coded {layers} {nested}.safetensors"
        tensors = tensors_of(layers, nested)
        save_file(tensors, path)
        mapping = open_mapping(path)
        mapped = {name: mapping.tensor(e) for name, e in mapping.header.entries.items()}
        x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1))
        plain, module = Model(tensors, layers, nested), Model(mapped, layers, nested)
        return Pair(plain, module, mapping, path, x)

    return pair


def engine_of(engine_over: Over, pair: Pair, **more: Any) -> LayerEngine:
    return engine_over(pair.module, more.pop("backend", None), [pair.mapping], **more)


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("hundredths", PLANS)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_plan_gives_the_plain_result_and_the_homes_come_back(
    make: Callable[..., Pair],
    engine_over: Over,
    poisoned: Callable[..., Any],
    share_of: Callable[..., int],
    nested: bool,
    hundredths: int,
    slots: int,
) -> None:
    pair = make(nested=nested)
    before = hashlib.sha256(pair.path.read_bytes()).hexdigest()
    homes = parameters(pair.module)
    engine = engine_of(engine_over, pair, config=poisoned(slots, margin_bytes=0))
    engine.load(Budget(share_of(engine, hundredths), None))
    for _ in range(3):
        with engine.run():
            assert pair.is_exact()
            assert pair.is_exact()
    shipped = engine.snapshot().traffic.shipped_bytes
    assert (shipped > 0) == (hundredths < 100)
    engine.sleep()
    assert all(parameters(pair.module)[name] is home for name, home in homes.items())
    engine.wake()
    with engine.run():
        assert pair.is_exact()
    engine.unload()
    assert all(parameters(pair.module)[name] is home for name, home in homes.items())
    assert pair.is_exact()
    assert hashlib.sha256(pair.path.read_bytes()).hexdigest() == before


def test_plans_that_grow_and_shrink_under_a_loaded_model_stay_exact(
    make: Callable[..., Pair], engine_over: Over, share_of: Callable[..., int]
) -> None:
    pair = make(6)
    engine = engine_of(engine_over, pair)
    for hundredths in (0, 60, 20, 90, 40, 100, 5):
        engine.load(Budget(share_of(engine, hundredths), 0))
        with engine.run():
            assert pair.is_exact()


def test_a_wrapper_whose_parts_are_in_different_memory_is_put_together(
    make: Callable[..., Pair], engine_over: Over
) -> None:
    """A plan may keep the scale of a matrix that streams, or stream that of one that stays."""
    pair = make(4)
    engine = engine_of(engine_over, pair)
    groups = take_inventory(pair.module, find_block_lists(pair.module), [pair.mapping]).layers
    split = 0
    smallest = engine.plan(Budget()).device_bytes // 3
    for figure in range(smallest, engine.plan(Budget()).device_bytes, 512):
        try:
            plan = engine.load(Budget(figure, 0))
        except Exception:  # too small for any plan
            continue
        for group, layer in zip(groups, plan.layers, strict=True):
            window = range(layer.streamed.first, layer.streamed.last)
            inside = {i in window for i, w in enumerate(group.weights) if w.wrapper is not None}
            split += len(inside) == 2
        with engine.run():
            assert pair.is_exact()
            assert pair.is_exact()
    assert split > 0, "no plan split a wrapper: this test shows nothing"


def test_a_pass_only_swaps_references(
    make: Callable[..., Pair], engine_over: Over, share_of: Callable[..., int]
) -> None:
    pair = make(5)
    engine = engine_of(engine_over, pair)
    engine.load(Budget(share_of(engine, 0), None))
    made: list[set[int]] = []
    alive: list[Any] = []

    def look(module: Any, args: Any, output: Any) -> None:
        made[-1].add(id(module.coded))
        alive.append(module.coded)
        assert isinstance(module.coded, nn.Parameter)
        assert not module.coded.requires_grad

    for block in pair.module.blocks:
        block.register_forward_pre_hook(lambda module, args: look(module, args, None))
    for _ in range(4):
        made.append(set())
        with engine.run():
            pair.module(pair.x)
    # Two slots take turns, so two passes may each have their own, and no third.
    assert made[2] | made[3] <= made[0] | made[1]
    # All of each lies in the slot, which is poisoned by now: none holds device memory of its own.
    streamed = [one for one in alive if one.scale.isnan()]
    assert len({id(one) for one in streamed}) >= 5
    assert all(one.shift is None or one.shift.isnan().all() for one in streamed)


def test_a_binding_that_is_kept_sees_parts_that_moved_meanwhile() -> None:
    layer = Layer(
        Coded(torch.ones(2, 2, dtype=torch.int8), torch.tensor(1.0)), *torch.ones(2, 2, 2)
    )
    home = layer.coded
    places = frozenset({("codes",), ("scale",)})
    wrapper = Wrapper(home, [Site(layer, "coded")], Recipe.of(home), places)
    codes = WrapperBinding(wrapper, {("codes",): torch.full((2, 2), 3, dtype=torch.int8)})
    for figure in (5.0, 7.0):
        scale = WrapperBinding(wrapper, {("scale",): torch.tensor(figure)})
        scale.bind()
        assert layer.coded is home
        codes.bind()
        assert torch.equal(layer.coded.plain(), torch.full((2, 2), 3 * figure))
        scale.unbind()
        assert layer.coded is home
        codes.unbind()
        assert layer.coded is home


def test_what_a_wrapper_holds_is_counted_and_what_lies_in_the_file_is_no_copy(
    make: Callable[..., Pair], engine_over: Over
) -> None:
    pair = make(5)
    engine = engine_of(engine_over, pair)
    tensors = tensors_of(5, nested=False)
    snapshot = engine.snapshot()
    in_file = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(layer.size_bytes for layer in snapshot.layers) == in_file
    assert snapshot.memory.copied_bytes == 0
    assert {"int8", "float32"} == {name for layer in snapshot.layers for name in layer.dtypes}
    # One scale in ordinary memory is one copy of four bytes and no more.
    other = make(5)
    coded = other.module.blocks[2].coded
    coded.scale = coded.scale.clone()
    copied = engine_of(engine_over, other).snapshot()
    assert copied.memory.copied_bytes == 4
    assert sum(layer.size_bytes for layer in copied.layers) == in_file


def test_bytes_of_any_tensor() -> None:
    codes, scale = torch.zeros(3, 5, dtype=torch.int8), torch.tensor(1.0)
    shift = torch.zeros(5, dtype=torch.float64)
    assert tensor_bytes(torch.zeros(3, 5, dtype=torch.bfloat16)) == 30
    assert tensor_bytes(Coded(codes, scale)) == 15 + 4
    assert tensor_bytes(Coded(codes, scale, shift)) == 15 + 4 + 40
    assert tensor_bytes(Doubled(Coded(codes, scale), torch.zeros(1))) == 15 + 4 + 4
    assert tensor_bytes(Coded(torch.zeros(0, 5, dtype=torch.int8), scale)) == 4
    assert is_wrapper(Coded(codes, scale))
    assert not is_wrapper(nn.Parameter(scale))


def test_a_tied_wrapper_has_one_state_under_all_its_names(
    make: Callable[..., Pair], engine_over: Over, share_of: Callable[..., int]
) -> None:
    pair = make(5)
    for model in (pair.plain, pair.module):
        model.blocks[3].coded = model.blocks[1].coded
        model.blocks[2].again = model.blocks[2].coded  # twice in one layer
    engine = engine_of(engine_over, pair)
    home = pair.module.blocks[1].coded
    for hundredths in (0, 50, 100):
        engine.load(Budget(share_of(engine, hundredths), 0))
        with engine.run():
            assert pair.is_exact()
            assert pair.module.blocks[1].coded is pair.module.blocks[3].coded is not home
    reason = engine.snapshot().layers[-1].reason
    assert "shared by several layers" in reason
    engine.unload()
    assert pair.module.blocks[1].coded is pair.module.blocks[3].coded is home


def test_inner_tensors_that_are_shared_empty_or_strided(
    make: Callable[..., Pair], engine_over: Over, share_of: Callable[..., int]
) -> None:
    pair = make(5)
    for model in (pair.plain, pair.module):
        blocks = model.blocks
        blocks[1].coded.scale = blocks[0].coded.scale  # one object in two wrappers
        blocks[2].coded.shift = torch.empty(0, 1, 64)[:, 0].sum(0)  # copied, zero
        blocks[3].coded.codes = blocks[3].coded.codes.t().contiguous().t()
        blocks[4].coded.shift = blocks[3].coded.shift[:0].sum() * torch.ones(1)
        blocks[4].hollow = nn.Parameter(torch.empty(0), requires_grad=False)
    engine = engine_of(engine_over, pair)
    strides = pair.module.blocks[3].coded.codes.stride()
    for hundredths in (0, 50, 100):
        engine.load(Budget(share_of(engine, hundredths), 0))
        seen: list[tuple[int, ...]] = []
        handle = pair.module.blocks[3].register_forward_pre_hook(
            lambda module, args, seen=seen: seen.append(module.coded.codes.stride())
        )
        with engine.run():
            assert pair.is_exact()
        handle.remove()
        assert seen == [strides]


def test_an_error_in_a_layer_leaves_the_homes_in_place_and_the_next_run_exact(
    make: Callable[..., Pair], engine_over: Over, share_of: Callable[..., int]
) -> None:
    pair = make(5)
    homes = parameters(pair.module)
    engine = engine_of(engine_over, pair)
    engine.load(Budget(share_of(engine, 0), 0))

    class Stop(BaseException):
        pass

    for kind in (ValueError, Stop):

        def fail(module: Any, args: Any, kind: Any = kind) -> None:
            raise kind("in the middle")

        # In the layer itself, once its weights are there.
        handle = pair.module.blocks[2].register_forward_pre_hook(fail)
        with pytest.raises(kind), engine.run():
            pair.module(pair.x)
        handle.remove()
        assert engine.state is EngineState.LOADED
        in_blocks = {n: h for n, h in homes.items() if n.startswith("blocks.2")}
        assert all(parameters(pair.module)[name] is home for name, home in in_blocks.items())
        with engine.run():
            assert pair.is_exact()


def test_a_value_that_somebody_put_in_place_of_a_wrapper_stays(
    make: Callable[..., Pair], engine_over: Over, share_of: Callable[..., int]
) -> None:
    pair = make(4)
    engine = engine_of(engine_over, pair)
    home = pair.module.blocks[1].coded
    theirs = nn.Parameter(home.plain(), requires_grad=False)
    pair.module.blocks[1]._parameters["coded"] = theirs
    engine.load(Budget(share_of(engine, 0), 0))
    with engine.run():
        assert pair.is_exact()
        assert pair.module.blocks[1].coded is theirs
    pair.module.blocks[1]._parameters["coded"] = home
    with engine.run():
        assert pair.is_exact()
    engine.unload()
    assert pair.module.blocks[1].coded is home


class Converting(Coded):
    """Copies its scale whenever it is made, which may be before the bytes are there."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, shift: Any = None) -> None:
        super().__init__(codes, scale.clone(), shift)


class Broken(Coded):
    @classmethod
    def __tensor_unflatten__(cls, *args: Any) -> Coded:
        raise TypeError("not today")


@pytest.mark.parametrize(
    ("kind", "words"), [(Converting, "copies what it holds"), (Broken, "cannot be put together")]
)
def test_a_wrapper_that_cannot_be_made_over_other_memory_moves_as_a_whole(
    make: Callable[..., Pair],
    engine_over: Over,
    share_of: Callable[..., int],
    kind: Any,
    words: str,
) -> None:
    pair = make(4)
    for model in (pair.plain, pair.module):
        for block in model.blocks:
            old = block.coded
            block.coded = wrapped(kind(old.codes, old.scale, old.shift))
    engine = engine_of(engine_over, pair, backend=FakeBackend())
    engine.load(Budget(share_of(engine, 0), 0))
    with engine.run():
        assert pair.is_exact()
    snapshot = engine.snapshot()
    base = snapshot.layers[-1]
    assert words in base.reason
    assert "blocks.0.coded" in base.reason
    assert "1 more" in base.reason
    # Their codes lie in the file; a scale that was copied does not.
    assert snapshot.memory.copied_bytes == (16 if kind is Converting else 0)
    sizes = [tensor_bytes(block.coded) for block in pair.module.blocks]
    assert base.size_bytes == sum(sizes)


def test_a_reason_is_short_however_many_weights_stay(engine_over: Over) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    for index in range(400):
        codes = torch.zeros(2, 2, dtype=torch.int8)
        one = wrapped(Converting(codes, torch.tensor(1.0)))
        model.blocks[index % 2].register_parameter(f"a_rather_long_name_of_a_weight_{index}", one)
    engine = engine_over(model)
    engine.load(Budget())
    reason = engine.snapshot().layers[-1].reason
    assert len(reason) <= 300
    assert "and 397 more" in reason


def test_copies_of_what_a_file_has_are_given_up_for_it(
    make: Callable[..., Pair], engine_over: Over, share_of: Callable[..., int]
) -> None:
    pair = make(4)
    for block in pair.module.blocks:
        old = block.coded
        shift = None if old.shift is None else old.shift.clone()
        copied = wrapped(Coded(old.codes, old.scale.clone(), shift))
        spare = [old.scale] if old.shift is None else [torch.zeros(COLUMNS), old.shift, old.scale]
        again = over_originals(copied, spare)
        assert again is not None
        assert again.scale.data_ptr() == old.scale.data_ptr()
        assert [one.sum().item() for one in spare] == ([] if old.shift is None else [0])
        assert over_originals(again, []) is None
        block.coded = again
    engine = engine_of(engine_over, pair)
    assert engine.snapshot().memory.copied_bytes == 0
    engine.load(Budget(share_of(engine, 30), 0))
    with engine.run():
        assert pair.is_exact()
    broken = wrapped(Broken(torch.ones(2, 2, dtype=torch.int8), torch.tensor(3.0)))
    assert over_originals(broken, [torch.tensor(3.0)]) is None


@pytest.mark.parametrize("mode", [True, False], ids=["inference", "ordinary"])
def test_a_state_dict_can_be_taken_wherever_the_model_was_made(
    make: Callable[..., Pair], engine_over: Over, share_of: Callable[..., int], mode: bool
) -> None:
    with torch.inference_mode(mode):
        pair = make(4)
        engine = engine_of(engine_over, pair)
        for hundredths in (40, 100):
            engine.load(Budget(share_of(engine, hundredths), 0))
            with engine.run():
                assert pair.is_exact()
            taken, wanted = pair.module.state_dict(), pair.plain.state_dict()
            assert torch.equal(taken["blocks.3.coded"].plain(), wanted["blocks.3.coded"].plain())


def test_the_self_check_looks_at_what_wrappers_hold(
    make: Callable[..., Pair], engine_over: Over, share_of: Callable[..., int]
) -> None:
    pair = make(4)
    backend = FakeBackend()
    config = EngineConfig(switches=Switches(self_check=True, poison=True))
    engine = engine_of(engine_over, pair, backend=backend, config=config)
    engine.load(Budget(share_of(engine, 30), 0))
    with engine.run():
        assert pair.is_exact()
