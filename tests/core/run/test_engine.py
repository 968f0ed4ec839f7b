"""The engine as a whole: exact in every order, under every plan, and tidy between runs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload_core.device import CpuBackend, DeviceBackend, FakeBackend
from offload_core.run import LayerEngine
from offload_core.values import (
    Budget,
    ConfigError,
    DeviceBudgetError,
    EngineConfig,
    EngineState,
    LayerState,
    Placement,
    StateError,
    Switches,
)

PLANS = ("resident", "pinned", "mapped", "mixed", "smallest")


def orders_of(count: int) -> list[list[int] | None]:
    """Whole, one skipped, step caching, backwards, one twice, nothing, and whole again."""
    everything = list(range(count))
    cached = [index for index in (0, 1, 4) if index < count]
    return [
        None,
        [index for index in everything if index != 2],
        None,
        cached,
        everything[::-1],
        [min(1, count - 1)] * 2 + everything,
        [],
        None,
    ]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_every_order_is_exact_under_every_plan(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    poisoned: Callable[..., EngineConfig],
    blocks: int,
    slots: int,
    plan: str,
) -> None:
    tiny = make_tiny(blocks)
    fake = FakeBackend()
    engine = engine_over(tiny, fake, config=poisoned(slots))
    budget = budget_for(engine, plan, slots)
    engine.load(budget)
    with engine.run():
        for order in orders_of(blocks):
            assert tiny.is_exact(order)
    for order in orders_of(blocks):
        with engine.run():
            assert tiny.is_exact(order)
        layers = engine.snapshot().layers[:-1]
        streamed = [layer for layer in layers if layer.placement is not Placement.RESIDENT]
        assert {layer.state for layer in streamed} <= {LayerState.ABSENT}
        assert all(layer.state is LayerState.READY for layer in layers if layer not in streamed)
    if budget.device_bytes is not None:
        assert engine.snapshot().memory.device_peak_bytes <= budget.device_bytes
    if budget.host_bytes is not None:
        assert fake.locker.peak_bytes <= budget.host_bytes


@pytest.mark.parametrize("plan", PLANS)
def test_every_order_is_exact_without_a_courier(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    poisoned: Callable[..., EngineConfig],
    plan: str,
) -> None:
    tiny = make_tiny(5)
    threads = threading.active_count()
    engine = engine_over(tiny, config=poisoned(2, courier=False))
    engine.load(budget_for(engine, plan))
    for order in orders_of(5):
        with engine.run():
            assert tiny.is_exact(order)
    assert threading.active_count() == threads


@pytest.mark.parametrize("plan", PLANS)
def test_every_order_is_exact_on_the_cpu(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    plan: str,
) -> None:
    tiny = make_tiny(5)
    engine = engine_over(tiny, CpuBackend())
    engine.load(budget_for(engine, plan))
    with engine.run():
        for order in orders_of(5):
            assert tiny.is_exact(order)


@pytest.mark.parametrize("copies_first", [False, True])
def test_the_copies_may_be_early_or_late(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    copies_first: bool,
) -> None:
    tiny = make_tiny(5)
    fake = FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "pinned"))
    with engine.run():
        for order in orders_of(5):
            if copies_first:
                fake.complete()
            assert tiny.is_exact(order)


@pytest.mark.parametrize("seed", range(4))
def test_runs_loads_and_unloads_in_random_order_stay_exact_with_a_held_copy(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    gate: Any,
    seed: int,
) -> None:
    chance = random.Random(seed)
    tiny = make_tiny(5)
    fake = FakeBackend()
    fake.on_ship = gate
    engine = engine_over(tiny, fake)
    budgets = [budget_for(engine, plan) for plan in PLANS]
    engine.load(budgets[1])
    for _ in range(125):
        action = chance.choice(["step", "step", "cancelled step", "unload", "load"])
        if chance.random() < 0.5:
            gate.shut()
        opener = threading.Thread(target=gate.open)
        if action == "unload":
            opener.start()
            engine.unload()
        elif action == "load":
            opener.start()
            engine.load(chance.choice(budgets))
        elif engine.state is EngineState.LOADED:
            order = [chance.randrange(5) for _ in range(chance.randrange(8))]
            if action == "step":
                with engine.run(interrupt=gate.open):
                    assert tiny.is_exact(order)
            else:
                cancel_step(engine, tiny, order)
        if opener.ident is not None:
            opener.join()
    gate.open()


class Cancel(BaseException):
    """As ComfyUI's interrupt: no Exception."""


def cancel_step(engine: LayerEngine, tiny: Any, order: list[int]) -> None:
    """A step whose every wait is cancelled; with an open gate it simply passes."""

    def interrupt() -> None:
        raise Cancel

    try:
        with engine.run(interrupt=interrupt):
            tiny.is_exact(order)
    except Cancel:
        pass


@pytest.mark.parametrize("grad", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("attached_in", ["grad", "inference"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_grad_modes_change_nothing(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    grad: str,
    attached_in: str,
    needs_grad: bool,
) -> None:
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    tiny = make_tiny(5)
    tiny.module.requires_grad_(needs_grad)
    with modes[attached_in]():
        engine = engine_over(tiny)
        engine.load(budget_for(engine, "mixed"))
    for mode in (modes[grad], torch.no_grad, torch.inference_mode):
        with mode(), engine.run():
            for order in orders_of(5):
                assert torch.equal(tiny.module(tiny.x, order), tiny.plain(tiny.x, order))
    with modes[grad]():
        engine.unload()
        assert torch.equal(tiny.module(tiny.x), tiny.plain(tiny.x))
    assert all(p.requires_grad is needs_grad for p in tiny.module.parameters())


def test_load_with_another_budget_leaves_what_already_fits(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    sizes: Callable[..., Any],
    backend: DeviceBackend,
) -> None:
    tiny = make_tiny(5)
    engine = engine_over(tiny, backend)
    size = sizes(engine)
    rest = size.base_bytes + 2 * size.layer_bytes
    engine.load(Budget(rest + 2 * size.layer_bytes, 0))
    before = {
        layer.name: tiny.module.get_submodule(layer.name).lin.weight.data_ptr()
        for layer in engine.snapshot().layers[:-1]
        if layer.placement is Placement.RESIDENT
    }
    base = tiny.module.embed.weight.data_ptr()
    assert len(before) == 2
    engine.load(Budget(None, 0))
    assert tiny.module.embed.weight.data_ptr() == base
    for name, address in before.items():
        assert tiny.module.get_submodule(name).lin.weight.data_ptr() == address
    with engine.run():
        assert tiny.is_exact()
    engine.load(Budget(rest, 0))
    assert engine.snapshot().memory.device_bytes <= rest
    assert tiny.module.embed.weight.data_ptr() == base
    with engine.run():
        assert tiny.is_exact()


def test_the_peak_is_one_under_the_budget_in_force_and_outlasts_an_unload(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    sizes: Callable[..., Any],
    backend: DeviceBackend,
) -> None:
    engine = engine_over(make_tiny(5), backend)
    size = sizes(engine)
    small = Budget(size.base_bytes + 2 * size.layer_bytes, 0)
    for limit in (None, small.device_bytes, small.device_bytes + size.layer_bytes):
        planned = engine.load(Budget(limit, 0))
        assert engine.snapshot().memory.device_peak_bytes == planned.device_bytes
    engine.load(small)
    engine.unload()
    assert 0 < engine.snapshot().memory.device_peak_bytes <= small.device_bytes
    engine.load(small)
    # A plan for a larger figure serves a smaller one as well where it fits that.
    held = engine.snapshot().memory.device_bytes
    engine.load(Budget(held, 0))
    assert engine.snapshot().memory.device_peak_bytes == held


@pytest.mark.parametrize("after", PLANS)
@pytest.mark.parametrize("before", PLANS)
def test_going_from_plan_to_plan_never_holds_more_than_the_larger_of_them(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    poisoned: Callable[..., EngineConfig],
    before: str,
    after: str,
) -> None:
    tiny = make_tiny(5)
    fake = FakeBackend()
    # Without the thread, which may hold the fake's event of its last order for a moment longer.
    engine = engine_over(tiny, fake, config=poisoned(courier=False))
    budgets = [budget_for(engine, plan) for plan in (before, after, before)]
    for budget in budgets:
        held = fake.allocated_bytes
        fake.peak_bytes = held
        planned = engine.load(budget)
        assert fake.peak_bytes <= max(held, planned.device_bytes)
        with engine.run():
            assert tiny.is_exact()


def test_a_loaded_device_holds_exactly_what_the_snapshot_says(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    poisoned: Callable[..., EngineConfig],
) -> None:
    tiny = make_tiny(5)
    fake = FakeBackend()
    engine = engine_over(tiny, fake, config=poisoned(courier=False))
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in tiny.module.buffers())
    for plan in PLANS:
        planned = engine.load(budget_for(engine, plan))
        assert engine.snapshot().memory.device_bytes == planned.device_bytes
        assert fake.allocated_bytes + buffers == planned.device_bytes
        with engine.run():
            assert tiny.is_exact()
        assert sum(fake.locker.locked.values()) == planned.lock_bytes
        assert engine.snapshot().memory.locked_bytes == planned.lock_bytes
    given_back = engine.unload()
    assert given_back == planned.device_bytes
    assert fake.allocated_bytes == 0
    assert engine.snapshot().memory.host_bytes == 0


def test_unloaded_model_and_its_parts_can_be_called_and_load_brings_everything_back(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    backend: DeviceBackend,
) -> None:
    tiny = make_tiny(5)
    engine = engine_over(tiny, backend)
    assert tiny.is_exact()
    for plan in PLANS:
        engine.load(budget_for(engine, plan))
        assert torch.equal(tiny.module.embed(tiny.x), tiny.plain.embed(tiny.x))
        with engine.run():
            assert tiny.is_exact()
        engine.unload()
        assert torch.equal(tiny.module.embed(tiny.x), tiny.plain.embed(tiny.x))
        assert torch.equal(tiny.module.blocks[2](tiny.x), tiny.plain.blocks[2](tiny.x))
        assert tiny.is_exact()


def test_layers_can_be_called_outside_a_run(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(3)
    engine = engine_over(tiny)
    engine.load(budget_for(engine, "mapped"))
    assert torch.equal(tiny.module.blocks[1](tiny.x), tiny.plain.blocks[1](tiny.x))
    assert tiny.is_exact()
    with engine.run():
        assert tiny.is_exact()


def test_every_weight_is_its_own_again_after_unload_and_equals_the_file(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(3)
    homes = dict(tiny.module.named_parameters())
    engine = engine_over(tiny)
    for plan in PLANS:
        engine.load(budget_for(engine, plan))
        with engine.run():
            assert tiny.is_exact()
        engine.unload()
        after = dict(tiny.module.named_parameters())
        assert all(after[name] is home for name, home in homes.items())
        for name, entry in tiny.mapping.header.entries.items():
            assert torch.equal(after[name], tiny.mapping.tensor(entry))


def test_detach_takes_every_hook_off_and_is_final(
    tiny: Any, engine_over: Callable[..., LayerEngine]
) -> None:
    engine = engine_over(tiny)
    engine.load(Budget())
    engine.detach()
    engine.detach()
    assert hooks_on(tiny.module) == 0
    assert engine.unload() == 0
    with pytest.raises(StateError, match="the engine is detached; it cannot be loaded now"):
        engine.load(Budget())
    with pytest.raises(StateError, match="the engine is detached; load it before a run"):
        engine.run().__enter__()


def hooks_on(module: torch.nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


def test_calls_that_do_not_fit_a_run_are_refused_and_change_nothing(
    tiny: Any, engine_over: Callable[..., LayerEngine], budget_for: Callable[..., Budget]
) -> None:
    engine = engine_over(tiny)
    with pytest.raises(StateError, match="the engine is unloaded; load it before a run"):
        engine.run().__enter__()
    engine.load(budget_for(engine, "mapped"))
    with engine.run():
        with pytest.raises(StateError, match="running; unload it after the run"):
            engine.unload()
        with pytest.raises(StateError, match="running; unload it after the run"):
            engine.detach()
        with pytest.raises(StateError, match="the engine is running; it cannot be loaded now"):
            engine.load(Budget())
        with pytest.raises(StateError, match="the engine is running; load it before a run"):
            engine.run().__enter__()
        assert tiny.is_exact()
    assert engine.state is EngineState.LOADED


def test_a_load_that_is_refused_leaves_the_loaded_plan_as_it_was(
    tiny: Any, engine_over: Callable[..., LayerEngine], budget_for: Callable[..., Budget]
) -> None:
    engine = engine_over(tiny)
    engine.load(budget_for(engine, "pinned"))
    with engine.run():
        assert tiny.is_exact()
    before = engine.snapshot()
    with pytest.raises(DeviceBudgetError, match="a device budget of 0 B is too small"):
        engine.load(Budget(0))
    assert engine.snapshot().memory == before.memory
    assert engine.snapshot().budget == before.budget
    with engine.run():
        assert tiny.is_exact()


def test_locking_that_is_switched_off_leaves_mapped_layers_that_say_so(
    tiny: Any, engine_over: Callable[..., LayerEngine], budget_for: Callable[..., Budget]
) -> None:
    note = "COURIER_IN_PLACE=0: no page of a checkpoint is locked"
    config = EngineConfig(switches=Switches(in_place=False, notes=(note,)))
    engine = engine_over(tiny, config=config)
    engine.load(budget_for(engine, "pinned"))
    with engine.run():
        assert tiny.is_exact()
    snapshot = engine.snapshot()
    assert {layer.placement for layer in snapshot.layers[:-1]} == {Placement.MAPPED}
    assert snapshot.layers[0].reason == "pages cannot be locked: switched off"
    assert snapshot.memory.locked_bytes == 0
    assert snapshot.notes == (note,)


def test_prefetches_are_hits_from_the_second_layer_on(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(5)
    engine = engine_over(tiny)
    engine.load(budget_for(engine, "mapped"))
    with engine.run():
        assert all(tiny.is_exact() for _ in range(3))
        traffic = engine.snapshot().traffic
    assert (traffic.prefetch_hits, traffic.prefetch_misses) == (14, 1)
    layer_bytes = engine.snapshot().layers[0].size_bytes
    assert traffic.shipped_bytes == traffic.layers_shipped * layer_bytes


def test_a_learned_order_is_prefetched_the_next_time(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(5)
    engine = engine_over(tiny)
    engine.load(budget_for(engine, "mapped"))
    with engine.run():
        for _ in range(2):
            assert tiny.is_exact([4, 2, 0])
        before = engine.snapshot().traffic
        for _ in range(3):
            assert tiny.is_exact([4, 2, 0])
        after = engine.snapshot().traffic
    assert after.prefetch_hits - before.prefetch_hits == 9
    assert after.prefetch_misses == before.prefetch_misses


def test_a_layer_that_calls_another_keeps_its_own_weights_on_the_device(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(3)
    seen = []

    def nest(module: torch.nn.Module, args: Any, output: Any) -> Any:
        before = tiny.module.blocks[0].lin.weight
        nested = tiny.module.blocks[2](output)
        seen.append(tiny.module.blocks[0].lin.weight is before)
        return nested

    engine = engine_over(tiny)
    handle = tiny.module.blocks[0].lin.register_forward_hook(nest)
    plain_handle = tiny.plain.blocks[0].lin.register_forward_hook(
        lambda module, args, output: tiny.plain.blocks[2](output)
    )
    for plan in PLANS:
        engine.load(budget_for(engine, plan))
        with engine.run():
            assert tiny.is_exact()
            assert tiny.is_exact([2, 0, 0, 1])
    # Only the last plan has one slot: no room for both, so the outer one went back to the host.
    assert seen == [True] * 3 * 4 + [False] * 3
    handle.remove()
    plain_handle.remove()


def test_two_engines_over_one_file_do_not_disturb_each_other(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    backend: DeviceBackend,
) -> None:
    one, other = make_tiny(3), make_tiny(3)
    engines = [engine_over(one, backend), engine_over(other, backend)]
    for engine in engines:
        engine.load(budget_for(engine, "pinned"))
    with engines[0].run(), engines[1].run():
        for _ in range(2):
            assert one.is_exact()
            assert other.is_exact([2, 1, 0])
    engines[0].detach()
    with engines[1].run():
        assert other.is_exact()


def test_two_engines_over_one_mapping_share_its_pages_and_say_so(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    one, other = make_tiny(3), make_tiny(3)
    other.module.load_state_dict(one.module.state_dict(), assign=True)
    fake = FakeBackend()
    first = engine_over(one, fake)
    second = engine_over(other.module, fake, [one.mapping])
    first.load(budget_for(first, "pinned"))
    with first.run():
        assert one.is_exact()  # its pages are locked now, all of them
    second.load(budget_for(second, "pinned"))
    with first.run(), second.run():
        assert one.is_exact()
        assert other.is_exact()
    (note,) = second.snapshot().notes
    assert "3 layers stream from the file although their pages were to be locked" in note
    first.detach()
    second.load(budget_for(second, "mapped"))
    second.load(budget_for(second, "pinned"))
    with second.run():
        assert other.is_exact()
    assert second.snapshot().notes == ()
    assert second.snapshot().memory.locked_bytes > 0


def test_snapshots_from_another_thread_are_whole_at_every_moment(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
) -> None:
    tiny = make_tiny(5)
    engine = engine_over(tiny)
    done = threading.Event()
    taken: list[int] = []
    errors: list[BaseException] = []

    def look() -> None:
        try:
            while not done.is_set():
                snapshot = engine.snapshot()
                assert len(snapshot.layers) == 6
                assert all(layer.reason for layer in snapshot.layers)
                taken.append(snapshot.memory.device_bytes)
        except BaseException as error:
            errors.append(error)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for plan in PLANS:
            engine.load(budget_for(engine, plan))
            with engine.run():
                assert tiny.is_exact()
        engine.unload()
    finally:
        done.set()
        looker.join()
    assert errors == []
    assert taken


@pytest.mark.parametrize("when", ["unloaded", "resident", "bound", "unbound"])
def test_a_weight_that_somebody_replaced_stays_theirs(
    make_tiny: Callable[..., Any],
    engine_over: Callable[..., LayerEngine],
    budget_for: Callable[..., Budget],
    when: str,
) -> None:
    tiny = make_tiny(3)
    engine = engine_over(tiny)
    theirs = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16), requires_grad=False)

    def replace(*_: object) -> None:
        tiny.module.blocks[1].lin.weight = theirs

    if when == "unloaded":
        replace()
    engine.load(budget_for(engine, "resident" if when == "resident" else "mapped"))
    if when in ("resident", "unbound"):
        replace()
    if when == "bound":
        tiny.module.blocks[1].norm.register_forward_hook(replace)
    with torch.no_grad():
        tiny.plain.blocks[1].lin.weight.copy_(theirs)
    with engine.run():
        assert tiny.is_exact()
        assert tiny.is_exact([1, 1, 0])
    engine.unload()
    assert tiny.module.blocks[1].lin.weight is theirs
    assert tiny.is_exact()


def test_a_weight_whose_memory_was_swapped_is_refused_and_not_read_from_its_old_address(
    tiny: Any, engine_over: Callable[..., LayerEngine], budget_for: Callable[..., Budget]
) -> None:
    engine = engine_over(tiny)
    tiny.module.blocks[1].lin.weight.data = torch.ones(64, 64, dtype=torch.bfloat16)
    with pytest.raises(StateError, match=r"weight blocks\.1\.lin\.weight was given other memory"):
        engine.load(Budget())
    assert engine.state is EngineState.UNLOADED
    engine.load(budget_for(engine, "mapped"))
    with engine.run(), pytest.raises(Exception, match=r"blocks\.1 .* was given other memory"):
        tiny.module(tiny.x)


def test_attach_refuses_weights_without_data(engine_over: Callable[..., LayerEngine]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, device="meta"))
    with pytest.raises(ConfigError, match=r"weight 0\.weight has no data .*; load it first"):
        engine_over(model)
    assert hooks_on(model) == 0
