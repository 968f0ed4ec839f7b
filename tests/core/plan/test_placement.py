"""Budgets: filled, never passed, and refused with the number that would do."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from offload_core.plan import (
    Extent,
    Footprint,
    LayerCost,
    Plan,
    PlanRequest,
    Window,
    make_plan,
    smallest_device_bytes,
)
from offload_core.values import BudgetError, DeviceBudgetError, HostBudgetError, Placement

MIB = 1 << 20
PAGE = 4096
UNIT = 256
"""Device sizes come in these."""

FAR = itertools.count(1 << 40, 1 << 30)
"""Layers do not lie next to each other, or their page runs would be one."""


def layer(*weights: int, name: str = "layer", copied: tuple[int, ...] = ()) -> LayerCost:
    """Weights side by side from a page on, in bytes; those at ``copied`` are copies."""
    start = next(FAR)
    extents = []
    for size in weights:
        extents.append(Extent(start, size))
        start += size
    return LayerCost(name, tuple(extents), tuple(i not in copied for i in range(len(weights))))


def pages(count: int, weights: int = 1, name: str = "layer") -> LayerCost:
    """``weights`` weights of ``count`` pages each."""
    return layer(*[count * PAGE] * weights, name=name)


def request(
    layers: list[LayerCost], device: int | None, host: int | None = None, **more: Any
) -> PlanRequest:
    more.setdefault("slots", 2)
    named = [replace(cost, name=f"blocks.{i}") for i, cost in enumerate(layers)]
    return PlanRequest(
        layers=tuple(named),
        base_device_bytes=more.pop("base", 0),
        base_copied_bytes=more.pop("copied", 0),
        device_budget_bytes=device,
        host_budget_bytes=host,
        activation_bytes=more.pop("activations", 0),
        staging_bytes=more.pop("staging", 0),
        lock_refusal=more.pop("lock_refusal", None),
        **more,
    )


def letters(plan: Plan) -> str:
    return "".join(
        layer.placement.name[0] if layer.placement is not Placement.PAGEABLE else "G"
        for layer in plan.layers
    )


# The device budget


def test_without_a_budget_everything_is_resident_and_nothing_is_locked() -> None:
    plan = make_plan(request([pages(1)] * 4, None))
    assert letters(plan) == "RRRR"
    assert (plan.slots, plan.slot_bytes, plan.device_bytes, plan.lock_bytes) == (0, 0, 4 * PAGE, 0)
    assert plan.resident == (0, 1, 2, 3)
    assert plan.streamed == ()


def test_a_budget_that_holds_everything_needs_no_slots() -> None:
    assert letters(make_plan(request([pages(1)] * 4, 4 * PAGE))) == "RRRR"
    partly = make_plan(request([pages(1)] * 4, 4 * PAGE - 1))
    assert letters(partly).count("R") == 1
    assert [planned.streamed.is_empty for planned in partly.layers].count(True) == 1


def test_device_bytes_are_those_of_aligned_weights() -> None:
    cost = layer(1, 255, 256, 257, 0)
    assert cost.device_sizes == (UNIT, UNIT, UNIT, 2 * UNIT, 0)
    assert make_plan(request([cost], None)).device_bytes == 5 * UNIT
    assert smallest_device_bytes(request([cost], None)) == 5 * UNIT


def test_a_part_of_every_layer_stays_where_not_all_of_it_fits() -> None:
    plan = make_plan(request([pages(1, weights=10)] * 6, 56 * PAGE))
    assert letters(plan) == "PPPPPP"
    assert [planned.resident_bytes for planned in plan.layers] == [9 * PAGE] * 6
    assert [planned.resident_weight_bytes for planned in plan.layers] == [9 * PAGE] * 6
    assert (plan.slots, plan.slot_bytes, plan.device_bytes) == (2, PAGE, 56 * PAGE)
    assert all(planned.streamed.last - planned.streamed.first == 1 for planned in plan.layers)


def test_the_budget_for_exactly_one_layer_streams_through_one_slot() -> None:
    plan = make_plan(request([pages(1)] * 3, PAGE + 7, base=5, activations=2))
    assert letters(plan) == "PPP"
    assert (plan.slots, plan.slot_bytes, plan.device_bytes) == (1, PAGE, PAGE + 5)
    assert plan.activation_bytes == 2


def test_the_smallest_budget_is_named_works_and_one_byte_less_does_not() -> None:
    text = (
        r"a device budget of 2\.51 KiB is too small: weights outside the blocks take 5 B, "
        r"activations 2 B, one slot for blocks\.1 2\.50 KiB; the smallest that works is 2\.51 KiB "
        r"\(2567 bytes\)"
    )
    layers = [layer(7 * UNIT), layer(10 * UNIT), layer(4 * UNIT)]
    asked = request(layers, 10 * UNIT + 6, base=5, activations=2)
    with pytest.raises(DeviceBudgetError, match=text) as refused:
        make_plan(asked)
    assert refused.value.smallest_bytes == 10 * UNIT + 7 == smallest_device_bytes(asked)
    assert make_plan(replace(asked, device_budget_bytes=10 * UNIT + 7)).slots == 1


def test_a_model_without_layers_is_refused_without_a_word_about_slots() -> None:
    with pytest.raises(DeviceBudgetError, match=r"activations 0 B; the smallest that works is 5 B"):
        make_plan(request([], 4, base=5))


def test_a_model_without_layers_has_a_plan_without_layers() -> None:
    plan = make_plan(request([], 5, base=5))
    assert (plan.layers, plan.device_bytes) == ((), 5)


def test_what_is_left_goes_to_a_smaller_layer() -> None:
    layers = [pages(10), pages(10), pages(3), pages(10)]
    plan = make_plan(request(layers, 24 * PAGE))
    assert letters(plan) == "PPRP"
    assert plan.device_bytes == 23 * PAGE


def test_large_allocations_are_charged_as_they_are_rounded() -> None:
    footprint = Footprint(large_bytes=4 * PAGE, granularity_bytes=4 * PAGE)
    asked = request([pages(5)] * 3, None, base=5 * PAGE, footprint=footprint)
    assert make_plan(asked).device_bytes == 4 * 8 * PAGE
    assert smallest_device_bytes(asked) == 16 * PAGE
    with pytest.raises(DeviceBudgetError, match=r"outside the blocks take 32\.00 KiB"):
        make_plan(replace(asked, device_budget_bytes=16 * PAGE - 1))
    smallest = make_plan(replace(asked, device_budget_bytes=16 * PAGE))
    assert (smallest.slots, smallest.slot_bytes, smallest.device_bytes) == (1, 5 * PAGE, 16 * PAGE)
    # Small ones are not: what does not fill a step of the allocator costs its own bytes.
    small = request([pages(3)] * 3, None, base=PAGE, footprint=footprint)
    assert make_plan(small).device_bytes == 10 * PAGE


# The host budget


def test_host_budgets_of_none_nothing_little_and_enough() -> None:
    layers, device = [pages(256)] * 4, 2 * MIB
    assert letters(make_plan(request(layers, device, None))) == "PPPP"
    nothing = make_plan(request(layers, device, 0))
    assert letters(nothing) == "MMMM"
    assert (nothing.lock_bytes, nothing.staging_bytes) == (0, 0)
    assert nothing.layers[0].reason == "the host budget is 0; streams from the file"
    one = make_plan(request(layers, device, MIB))
    assert letters(one) == "MMMM"
    assert one.lock_bytes == MIB
    assert [layer.lock_bytes for layer in one.layers] == [MIB // 4] * 4
    assert one.layers[0].reason == (
        "the host budget is used up: of what streams 256.00 KiB are locked in place, 768.00 KiB "
        "stream from the file"
    )
    little = make_plan(request(layers, device, PAGE - 1))
    assert (letters(little), little.lock_bytes) == ("MMMM", 0)
    assert little.layers[0].reason == "the host budget is used up; streams from the file"
    almost = make_plan(request(layers, device, 4 * MIB - 1))
    assert (letters(almost).count("P"), almost.lock_bytes) == (3, 4 * MIB - PAGE)
    assert letters(make_plan(request(layers, device, 1 << 50))) == "PPPP"


@pytest.mark.parametrize("count", [1, 3, 7, 40])
def test_every_layer_has_the_same_share_locked_to_a_page(count: int) -> None:
    layers = [pages(256)] * count
    for room in range(0, 256 * count, 37):
        plan = make_plan(request(layers, 2 * MIB, room * PAGE + 5))
        if not plan.streamed:
            return  # fits the device
        locks = [plan.layers[index].lock_bytes or 0 for index in plan.streamed]
        assert sum(locks) == plan.lock_bytes == min(room, 256 * len(locks)) * PAGE
        assert max(locks) - min(locks) <= PAGE


def test_layers_of_different_sizes_have_the_same_share_of_theirs_locked() -> None:
    layers = [pages(100), pages(300), pages(200)]
    plan = make_plan(request(layers, 600 * PAGE - 1, 90 * PAGE, slots=3))
    shares = [
        (planned.lock_bytes or 0) / cost.lockable_bytes(planned.streamed, PAGE)
        for cost, planned in zip(layers, plan.layers, strict=True)
        if not planned.streamed.is_empty
    ]
    assert plan.lock_bytes == 90 * PAGE
    assert max(shares) - min(shares) < 0.02


def test_staging_is_charged_before_locks_once_anything_streams_unlocked() -> None:
    layers, device = [pages(10)] * 4, 20 * PAGE
    assert make_plan(request(layers, device, 40 * PAGE, staging=15 * PAGE)).staging_bytes == 0
    partly = make_plan(request(layers, device, 39 * PAGE, staging=15 * PAGE))
    assert (partly.staging_bytes, partly.lock_bytes) == (15 * PAGE, 24 * PAGE)
    assert make_plan(request(layers, device, 0, staging=15 * PAGE)).staging_bytes == 0


def test_staging_comes_in_whole_lanes_and_goes_before_it_passes_the_budget() -> None:
    large = [pages(256)] * 20
    for budget, lanes in ((MIB - 1, 0), (MIB, 1), (2 * MIB - 1, 1), (3 * MIB, 3), (9 * MIB, 3)):
        plan = make_plan(request(large, 2 * MIB, budget, staging=3 * MIB, staging_unit_bytes=MIB))
        assert plan.staging_bytes == lanes * MIB
        assert plan.lock_bytes + plan.staging_bytes <= budget


def test_locks_that_the_system_refuses_leave_mapped_layers_and_the_reason() -> None:
    plan = make_plan(request([pages(10)] * 3, 20 * PAGE, lock_refusal="no locks here"))
    assert letters(plan) == "MMM"
    assert {layer.reason for layer in plan.layers} == {"pages cannot be locked: no locks here"}


def test_only_whole_pages_of_the_window_are_locked() -> None:
    start = next(FAR)
    # Runs of one file: a page and a half from a page on, 100 bytes behind a gap, two pages.
    extents = (
        Extent(start, PAGE),
        Extent(start + PAGE, PAGE // 2),
        Extent(start + 3 * PAGE - 50, 100),
        Extent(start + 5 * PAGE - 10, 2 * PAGE),
        Extent(start + 7 * PAGE - 10, 0),
        Extent(start + 7 * PAGE - 10, 10),
    )
    cost = LayerCost("layer", extents, (True,) * 6)
    assert cost.lockable_bytes(Window(0, 6), PAGE) == 3 * PAGE
    assert cost.lockable_bytes(Window(0, 1), PAGE) == PAGE
    assert cost.lockable_bytes(Window(1, 3), PAGE) == 0
    assert cost.lockable_bytes(Window(3, 4), PAGE) == PAGE
    assert cost.lockable_bytes(Window(3, 6), PAGE) == 2 * PAGE
    assert cost.lockable_bytes(Window(2, 2), PAGE) == 0
    assert cost.lockable_bytes(Window(0, 6), 4 * PAGE) == 0
    mixed = LayerCost("layer", extents, (True, False, True, False, True, True))
    assert mixed.lockable_bytes(Window(0, 6), PAGE) == PAGE
    assert mixed.lockable_bytes(Window(0, 6), PAGE, mapped=False) == PAGE
    assert mixed.copied_bytes == PAGE // 2 + 2 * PAGE


# Copies


def copied(count: int) -> LayerCost:
    return layer(count * PAGE, copied=(0,))


def test_copies_are_charged_and_the_error_names_them() -> None:
    layers = [copied(10), pages(10), layer(10 * UNIT)]
    asked = request(layers, 20 * PAGE, 4 * PAGE, copied=5 * PAGE)
    text = (
        r"a host budget of 16\.00 KiB is too small: 60\.00 KiB of weights .* to 60\.00 KiB "
        r"\(61440 bytes\) or load"
    )
    with pytest.raises(HostBudgetError, match=text) as refused:
        make_plan(asked)
    assert refused.value.smallest_bytes == 15 * PAGE


def test_copies_are_locked_free_of_charge_but_not_where_the_budget_is_nothing() -> None:
    layers = [copied(10), pages(10), pages(10)]
    everything = make_plan(request(layers, 20 * PAGE, None))
    assert letters(everything) == "PPP"
    assert (everything.lock_bytes, everything.copied_bytes) == (20 * PAGE, 10 * PAGE)
    assert [layer.reason for layer in everything.layers] == [
        "streams from page-locked copies; its file bytes cannot be used",
        "streams from its file pages, locked in place",
        "streams from its file pages, locked in place",
    ]
    just = make_plan(request(layers, 20 * PAGE, 30 * PAGE))
    assert letters(just) == "PPP"
    nothing = make_plan(request(layers, 20 * PAGE, 0))
    assert letters(nothing) == "GMM"
    assert nothing.layers[0].reason == "its weights have no usable bytes in the file"
    refused = make_plan(request(layers, 20 * PAGE, None, lock_refusal="no locks here"))
    assert letters(refused) == "GMM"


def test_what_costs_nothing_is_locked_however_little_the_budget_allows() -> None:
    layers = [copied(10), pages(10), pages(10)]
    plan = make_plan(request(layers, 20 * PAGE, 10 * PAGE))
    assert (letters(plan), plan.lock_bytes) == ("PMM", 0)
    more = make_plan(request(layers, 20 * PAGE, 20 * PAGE))
    assert (letters(more), more.lock_bytes) == ("PMM", 10 * PAGE)
    assert [layer.lock_bytes for layer in more.layers] == [0, 5 * PAGE, 5 * PAGE]


def test_a_layer_is_called_after_what_most_of_its_window_is() -> None:
    mostly_copied = layer(4 * PAGE, 2 * PAGE, copied=(0,))
    mostly_mapped = layer(2 * PAGE, 4 * PAGE, copied=(0,))
    device = 6 * PAGE
    assert letters(make_plan(request([mostly_copied, mostly_mapped], device, 0, slots=1))) == "GM"
    both = make_plan(request([mostly_copied, mostly_mapped], device, None, slots=1))
    assert letters(both) == "PP"
    assert [planned.reason.split(";")[0] for planned in both.layers] == [
        "streams from page-locked copies",
        "streams from its file pages, locked in place",
    ]
    assert both.lock_bytes == sum(
        cost.lockable_bytes(planned.streamed, PAGE)
        for cost, planned in zip((mostly_copied, mostly_mapped), both.layers, strict=True)
    )


def test_a_layer_within_one_page_has_nothing_to_lock() -> None:
    plan = make_plan(request([layer(10 * UNIT)] * 3, 20 * UNIT, None))
    assert letters(plan) == "MMM"
    assert plan.layers[0].reason == "smaller than one whole page, so nothing to lock"


# Anything


def any_layer(chance: random.Random) -> LayerCost:
    weights = [
        chance.choice([0, 1, 256, 1000, PAGE, 3 * PAGE, chance.randrange(1, 10**6)])
        for _ in range(chance.randrange(6))
    ]
    chosen = tuple(i for i in range(len(weights)) if chance.random() < 0.2)
    return layer(*weights, copied=chosen)


def any_request(chance: random.Random) -> PlanRequest:
    count = chance.randrange(1, 10)
    layers = [any_layer(chance) for _ in range(count)]
    if layers and chance.random() < 0.3:
        layers = [layers[0]] * count
    footprint = chance.choice([Footprint(), Footprint(50_000, 20_000)])
    asked = request(
        layers,
        None,
        slots=chance.randrange(1, 5),
        base=chance.randrange(5000),
        copied=chance.choice([0, 0, 700]),
        activations=chance.randrange(5000),
        staging=chance.choice([0, 0, 5000, MIB]),
        staging_unit_bytes=chance.choice([1, 2500, MIB]),
        footprint=footprint,
    )
    sizes = [sum(cost.device_sizes) for cost in layers]
    whole = smallest_device_bytes(asked) + sum(map(footprint.of, sizes))
    device = chance.choice([None, smallest_device_bytes(asked), chance.randrange(whole + 2)])
    host = chance.choice([None, 0, MIB, chance.randrange(sum(sizes) + 10000)])
    return replace(asked, device_budget_bytes=device, host_budget_bytes=host)


def test_no_plan_ever_passes_its_budgets_and_every_plan_fills_them() -> None:
    chance = random.Random(0)
    planned = 0
    for _ in range(5000):
        asked = any_request(chance)
        refusal = why_not(asked)
        if refusal is not None:
            with pytest.raises(refusal, match="is too small"):
                make_plan(asked)
            continue
        planned += 1
        check_device(asked, make_plan(asked))
        check_host(asked, make_plan(asked))
    assert planned > 2500


def why_not(asked: PlanRequest) -> type[BudgetError] | None:
    device, host = asked.device_budget_bytes, asked.host_budget_bytes
    copied = asked.base_copied_bytes + sum(layer.copied_bytes for layer in asked.layers)
    of = asked.footprint.of
    everything = of(asked.base_device_bytes) + asked.activation_bytes
    everything += sum(of(sum(layer.device_sizes)) for layer in asked.layers)
    if device is not None and device < min(everything, smallest_device_bytes(asked)):
        return DeviceBudgetError
    return HostBudgetError if host and host < copied else None


def check_device(asked: PlanRequest, plan: Plan) -> None:
    sizes = [cost.device_sizes for cost in asked.layers]
    of = asked.footprint.of
    streamed = []
    held = of(asked.base_device_bytes)
    for weights, planned in zip(sizes, plan.layers, strict=True):
        moving = sum(weights[planned.streamed.first : planned.streamed.last])
        assert planned.resident_bytes == sum(weights) - moving
        assert (planned.placement is Placement.RESIDENT) is planned.streamed.is_empty
        held += of(planned.resident_bytes)
        streamed.append(moving)
    assert plan.streamed == tuple(
        index for index, planned in enumerate(plan.layers) if not planned.streamed.is_empty
    )
    assert sorted((*plan.streamed, *plan.resident)) == list(range(len(sizes)))
    assert plan.slots <= min(asked.slots, len(plan.streamed))
    assert (plan.slots > 0) is bool(plan.streamed)
    assert plan.slot_bytes == max(streamed, default=0)
    assert plan.device_bytes == held + plan.slots * of(plan.slot_bytes)
    if asked.device_budget_bytes is None:
        assert plan.streamed == ()
    else:
        left = asked.device_budget_bytes - plan.device_bytes - plan.activation_bytes
        assert left >= 0
        for weights, planned in zip(sizes, plan.layers, strict=True):
            window = planned.streamed
            for edge in (
                [] if window.is_empty else [weights[window.first], weights[window.last - 1]]
            ):
                now = planned.resident_bytes
                assert of(now + edge) - of(now) > left


def check_host(asked: PlanRequest, plan: Plan) -> None:
    if asked.host_budget_bytes:
        assert plan.copied_bytes + plan.lock_bytes + plan.staging_bytes <= asked.host_budget_bytes
    if asked.host_budget_bytes == 0:
        assert plan.lock_bytes + plan.staging_bytes == 0
    assert plan.staging_bytes % asked.staging_unit_bytes == 0
    assert plan.staging_bytes <= asked.staging_bytes
    locks, lockable = 0, 0
    for cost, planned in zip(asked.layers, plan.layers, strict=True):
        most = cost.lockable_bytes(planned.streamed, PAGE)
        if planned.lock_bytes is not None:
            assert 0 <= planned.lock_bytes <= most
            assert planned.lock_bytes % PAGE == 0
            locks, lockable = locks + planned.lock_bytes, lockable + most
        if planned.placement is Placement.PINNED:
            assert planned.lock_bytes is not None
    assert plan.lock_bytes == locks
    if locks < lockable and asked.host_budget_bytes is not None:
        left = asked.host_budget_bytes - plan.copied_bytes - plan.lock_bytes - plan.staging_bytes
        assert left < PAGE, "the budget is filled to the last whole page"
    pinned = [planned for planned in plan.layers if planned.placement is Placement.PINNED]
    if len(pinned) == len(plan.streamed) and locks == lockable:
        assert plan.staging_bytes == 0
    assert all(planned.reason for planned in plan.layers)
