"""Patches are merged where weights arrive: once for what stays, each time for what streams."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from offload_core.device import FakeBackend, LowRank, Term
from offload_core.device.low_rank import add_low_rank
from offload_core.run import Companion, LayerEngine, PatchedWeight
from offload_core.values import Budget, EngineState, StateError, TransferError, align_up

PLANS = ["resident", "pinned", "mapped", "mixed", "smallest"]


@dataclass(eq=False)
class Patch:
    """Adds a product of thin matrices, or doubles the weight."""

    shape: tuple[int, ...]
    seed: int
    doubles: bool = False
    fails: int = 0
    arrived: int = 0
    term: Term = field(init=False)
    tensors: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        up = torch.randn(self.shape[0], 4, generator=generator) * 0.1
        self.term = Term(up, torch.randn(4, self.shape[1], generator=generator) * 0.1, 0.5)
        self.tensors = (up, self.term.down)

    def low_rank(self, weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> LowRank | None:
        self.arrived += 1
        if not self.doubles:
            self._fail()
        return None if self.doubles else LowRank(weight, (Term(*tensors, 0.5),), torch.float32)

    def apply(self, weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        weight.mul_(2)
        self._fail()  # half-way: these bytes must not be patched again

    def _fail(self) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("the patch failed")


def linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: one for name, one in module.named_modules() if isinstance(one, nn.Linear)}


def patches_for(module: nn.Module, seed: int = 0) -> dict[str, Patch]:
    """One for each matrix; every other one doubles it."""
    return {
        name: Patch(tuple(one.weight.shape), seed * 100 + place, doubles=bool(place % 2))
        for place, (name, one) in enumerate(linears(module).items())
    }


def put(engine: LayerEngine, module: nn.Module, patches: dict[str, Patch]) -> None:
    modules = linears(module)
    engine.patch({(modules[n], "weight"): PatchedWeight(p) for n, p in patches.items()})


def room(patches: dict[str, Patch]) -> int:
    return sum(align_up(t.nbytes, 256) for patch in patches.values() for t in patch.tensors)


def merged(plain: nn.Module, patches: dict[str, Patch]) -> nn.Module:
    """As whoever merges once would have it."""
    found = copy.deepcopy(plain)
    with torch.no_grad():
        for name, patch in patches.items():
            weight = linears(found)[name].weight
            if patch.doubles:
                weight.mul_(2)
            else:
                add_low_rank([LowRank(weight, (patch.term,), torch.float32)])
    return found


def check_run(tiny: Any, engine: LayerEngine, plain: nn.Module) -> None:
    with torch.no_grad():
        want = plain(tiny.x)
        with engine.run():
            assert torch.equal(tiny.module(tiny.x), want)
            engine.end_pass()


@pytest.mark.parametrize("plan", PLANS)
def test_every_change_of_patches_is_exact_and_the_homes_stay_clean(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    plan: str,
) -> None:
    tiny = make_tiny(4)
    engine = engine_over(tiny)
    budget = budget_for(engine, plan)
    first, second = patches_for(tiny.module, 1), patches_for(tiny.module, 2)
    some = dict(list(first.items())[:3])
    for patches in (first, {}, second, first, some, second, {}):
        put(engine, tiny.module, patches)
        for _ in range(2):
            engine.load(budget)
            check_run(tiny, engine, merged(tiny.plain, patches))
    engine.unload()
    assert tiny.is_exact()


def test_patches_set_before_the_first_load_and_over_sleep_are_in_force(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(4)
    engine = engine_over(tiny)
    patches = patches_for(tiny.module)
    put(engine, tiny.module, patches)
    engine.load(budget_for(engine, "mixed"))
    check_run(tiny, engine, merged(tiny.plain, patches))
    for keep_locks in (True, False):
        engine.sleep(keep_locks)
        assert tiny.is_exact()
        engine.wake()
        check_run(tiny, engine, merged(tiny.plain, patches))


def test_what_stays_is_patched_once_and_gives_up_the_patches_memory(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(4)
    engine = engine_over(tiny)
    patches = patches_for(tiny.module)
    put(engine, tiny.module, patches)
    engine.load(budget_for(engine, "resident"))
    for _ in range(3):
        engine.load(budget_for(engine, "resident"))
        check_run(tiny, engine, merged(tiny.plain, patches))
    assert {patch.arrived for patch in patches.values()} == {1}
    assert engine.device_bytes == engine.plan(Budget()).device_bytes - room(patches)


def test_a_change_brings_what_stays_once_more_and_nothing_twice(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    class Counting(FakeBackend):
        shipped_bytes = 0

        def ship(self, pieces: Any, after: Any) -> Any:
            self.shipped_bytes += sum(piece.source.numel() for piece in pieces)
            return super().ship(pieces, after)

    tiny, fake = make_tiny(4), Counting()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "resident"))
    check_run(tiny, engine, tiny.plain)
    whole, patches = fake.shipped_bytes, patches_for(tiny.module)
    for change in (patches, {}):
        put(engine, tiny.module, change)
        fake.shipped_bytes = 0
        engine.load(budget_for(engine, "resident"))
        assert fake.shipped_bytes < whole // 2, "layers wait for their turn"
        check_run(tiny, engine, merged(tiny.plain, change))
        more = sum(t.nbytes for patch in change.values() for t in patch.tensors)
        assert fake.shipped_bytes == whole + more
        put(engine, tiny.module, change)  # the same objects
        engine.load(budget_for(engine, "resident"))
        check_run(tiny, engine, merged(tiny.plain, change))
        assert fake.shipped_bytes == whole + more


@pytest.mark.parametrize("plan", ["pinned", "resident"])
def test_companions_follow_the_place_of_their_weight(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    plan: str,
) -> None:
    tiny = make_tiny(3)
    engine = engine_over(tiny)
    module = tiny.module.blocks[1].lin
    module.mark, seen = "home", []
    module.register_forward_pre_hook(lambda one, _: seen.append(one.mark))
    patch = Patch(tuple(module.weight.shape), 3)
    companion = Companion(module, "mark", "home", "device")
    engine.patch({(module, "weight"): PatchedWeight(patch, (companion,))})
    assert module.mark == "home"
    engine.load(budget_for(engine, plan))
    check_run(tiny, engine, merged(tiny.plain, {"blocks.1.lin": patch}))
    assert seen == ["device"]
    engine.unload()
    assert module.mark == "home"


def test_a_weight_of_a_layer_that_waits_for_its_renewal_is_its_home(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(3)
    engine = engine_over(tiny)
    homes = dict(tiny.module.named_parameters())
    engine.load(budget_for(engine, "resident"))
    put(engine, tiny.module, patches_for(tiny.module))
    engine.load(budget_for(engine, "resident"))
    now = dict(tiny.module.named_parameters())
    stays = {name for name in homes if now[name] is homes[name]}
    assert "blocks.1.lin.weight" in stays
    assert "embed.weight" not in stays, "what belongs to no layer is renewed by the load"


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("plan", ["pinned", "resident", "mixed"])
def test_a_patch_that_fails_ends_the_run_and_the_next_is_exact(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    plan: str,
    layer: int,
) -> None:
    tiny = make_tiny(4)
    engine = engine_over(tiny)
    budget = budget_for(engine, plan)
    engine.load(budget)
    check_run(tiny, engine, tiny.plain)
    patches = patches_for(tiny.module)
    patches[f"blocks.{layer}.lin"].fails = 1
    put(engine, tiny.module, patches)
    engine.load(budget)
    with pytest.raises(RuntimeError, match="the patch failed"), engine.run(), torch.no_grad():
        tiny.module(tiny.x)
    for _ in range(2):
        engine.load(budget)
        check_run(tiny, engine, merged(tiny.plain, patches))


def test_a_renewal_whose_copy_fails_names_its_layer_and_the_next_run_is_exact(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    class Failing(FakeBackend):
        after_copies: int | None = None

        def ship(self, pieces: Any, after: Any) -> Any:
            if self.after_copies is not None:
                self.after_copies -= 1
                if self.after_copies < 0:
                    self.after_copies = None
                    raise OSError("the drive is gone")
            return super().ship(pieces, after)

    tiny, fake = make_tiny(4), Failing()
    engine = engine_over(tiny, fake)
    budget = budget_for(engine, "resident")
    engine.load(budget)
    patches = patches_for(tiny.module)
    put(engine, tiny.module, patches)
    engine.load(budget)
    fake.after_copies = 1
    with pytest.raises((OSError, TransferError)), engine.run(), torch.no_grad():
        tiny.module(tiny.x)
    assert engine.state is EngineState.LOADED
    engine.load(budget)
    check_run(tiny, engine, merged(tiny.plain, patches))


def test_what_patches_hold_is_within_the_budget_or_they_do_without(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(4)
    engine = engine_over(tiny)
    smallest = budget_for(engine, "smallest")
    patches = patches_for(tiny.module)
    put(engine, tiny.module, patches)
    more = room(patches)
    for budget, keeps in ((smallest, False), (Budget(smallest.device_bytes + more, 0), True)):
        engine.load(budget)
        check_run(tiny, engine, merged(tiny.plain, patches))
        assert engine.device_bytes <= budget.device_bytes
        without = engine.device_bytes <= smallest.device_bytes
        assert without is not keeps


def test_between_two_passes_patches_change_and_the_next_pass_is_exact(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(4)
    engine = engine_over(tiny)
    engine.load(budget_for(engine, "mixed"))
    with engine.run(), torch.no_grad():
        for patches in ({}, patches_for(tiny.module, 1), patches_for(tiny.module, 2), {}):
            put(engine, tiny.module, patches)
            for _ in range(2):
                want = merged(tiny.plain, patches)(tiny.x)
                assert torch.equal(tiny.module(tiny.x), want)
                engine.end_pass()


def test_places_without_such_a_weight_and_a_layer_that_runs_refuse(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(3)
    engine = engine_over(tiny)
    patch = PatchedWeight(Patch((64, 64), 0))
    with pytest.raises(ValueError, match=r"Linear\.nothing is no weight"):
        engine.patch({(tiny.module.embed, "nothing"): patch})
    assert engine.patchable(tiny.module.embed, "nothing") is None
    assert engine.patchable(tiny.module.embed, "weight") is torch.bfloat16
    engine.load(budget_for(engine, "pinned"))
    hook = tiny.module.blocks[1].lin.register_forward_hook(lambda *_: engine.patch({}))
    with pytest.raises(StateError, match="is running"), engine.run(), torch.no_grad():
        tiny.module(tiny.x)
    hook.remove()
