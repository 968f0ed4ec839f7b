"""Budgets: filled, never passed, and refused with the number that would do."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from offload_core.plan import LayerCost, Plan, PlanRequest, make_plan, smallest_device_bytes, spread
from offload_core.values import BudgetError, DeviceBudgetError, HostBudgetError, Placement

MIB = 1 << 20


def layer(
    size: int, name: str = "layer", copied: int = 0, lockable: int | None = None
) -> LayerCost:
    return LayerCost(
        name=name,
        device_bytes=size,
        lockable_bytes=size - copied if lockable is None else lockable,
        copied_bytes=copied,
        mapped_bytes=size - copied,
    )


def request(
    sizes: list[int], device: int | None, host: int | None = None, slots: int = 2, **more: int
) -> PlanRequest:
    return PlanRequest(
        layers=tuple(layer(size, f"blocks.{i}") for i, size in enumerate(sizes)),
        base_device_bytes=more.get("base", 0),
        base_copied_bytes=more.get("copied", 0),
        device_budget_bytes=device,
        host_budget_bytes=host,
        activation_bytes=more.get("activations", 0),
        slots=slots,
        staging_bytes=more.get("staging", 0),
        lock_refusal=None,
    )


def letters(plan: Plan) -> str:
    return "".join(
        layer.placement.name[0] if layer.placement is not Placement.PAGEABLE else "G"
        for layer in plan.layers
    )


def test_without_a_budget_everything_is_resident_and_nothing_is_locked() -> None:
    plan = make_plan(request([10] * 4, None))
    assert letters(plan) == "RRRR"
    assert (plan.slots, plan.device_bytes, plan.lock_bytes) == (0, 40, 0)


def test_a_budget_that_holds_everything_needs_no_slots() -> None:
    assert letters(make_plan(request([10] * 4, 40))) == "RRRR"
    assert letters(make_plan(request([10] * 4, 39))).count("R") == 1


@pytest.mark.parametrize(("count", "total"), [(0, 5), (1, 5), (2, 5), (3, 9), (5, 5), (0, 0)])
def test_residents_are_spread_evenly(count: int, total: int) -> None:
    chosen = sorted(spread(count, total))
    assert len(chosen) == count
    gaps = [b - a for a, b in itertools.pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_budget_for_exactly_one_layer_streams_through_one_slot() -> None:
    plan = make_plan(request([10] * 3, 17, base=5, activations=2))
    assert letters(plan) == "PPP"
    assert (plan.slots, plan.slot_bytes, plan.device_bytes) == (1, 10, 15)


def test_the_smallest_budget_is_named_works_and_one_byte_less_does_not() -> None:
    text = (
        r"a device budget of 16 B is too small: weights outside the blocks take 5 B, activations "
        r"2 B, one slot for blocks\.1 10 B; the smallest that works is 17 B \(17 bytes\)"
    )
    asked = request([7, 10, 4], 16, base=5, activations=2)
    with pytest.raises(DeviceBudgetError, match=text) as refused:
        make_plan(asked)
    assert refused.value.smallest_bytes == 17 == smallest_device_bytes(asked)
    assert make_plan(replace(asked, device_budget_bytes=17)).device_bytes == 15


def test_a_model_without_layers_is_refused_without_a_word_about_slots() -> None:
    with pytest.raises(DeviceBudgetError, match=r"activations 0 B; the smallest that works is 5 B"):
        make_plan(request([], 4, base=5))
    assert make_plan(request([], 5, base=5)).layers == ()


def test_a_rest_that_the_even_spread_leaves_goes_to_a_smaller_layer() -> None:
    plan = make_plan(request([10, 10, 3, 10], 24, slots=2))
    assert letters(plan) == "PPRP"
    assert plan.device_bytes == 23


def test_host_budgets_of_none_nothing_little_and_enough() -> None:
    sizes = [MIB] * 4
    assert letters(make_plan(request(sizes, 2 * MIB, None))) == "PPPP"
    nothing = make_plan(request(sizes, 2 * MIB, 0))
    assert letters(nothing) == "MMMM"
    assert (nothing.lock_bytes, nothing.staging_bytes) == (0, 0)
    assert letters(make_plan(request(sizes, 2 * MIB, MIB))).count("P") == 1
    assert letters(make_plan(request(sizes, 2 * MIB, MIB - 1))) == "MMMM"
    assert letters(make_plan(request(sizes, 2 * MIB, 1 << 50))) == "PPPP"


def test_staging_is_charged_before_locks_once_anything_streams_unlocked() -> None:
    sizes = [10] * 4
    assert make_plan(request(sizes, 20, 40, staging=15)).staging_bytes == 0
    partly = make_plan(request(sizes, 20, 39, staging=15))
    assert (partly.staging_bytes, partly.lock_bytes) == (15, 20)
    without = make_plan(request(sizes, 20, 14, staging=15))
    assert (without.staging_bytes, without.lock_bytes) == (0, 10)
    assert make_plan(request(sizes, 20, 0, staging=15)).staging_bytes == 0


def test_locks_that_the_system_refuses_leave_mapped_layers_and_the_reason() -> None:
    plan = make_plan(replace(request([10] * 3, 20), lock_refusal="no locks here"))
    assert letters(plan) == "MMM"
    assert {layer.reason for layer in plan.layers} == {"pages cannot be locked: no locks here"}


def test_copies_are_charged_and_the_error_names_them() -> None:
    costs = (layer(10, "a", copied=10), layer(10, "b"), layer(10, "c", lockable=0))
    asked = replace(request([], 20, 4, copied=5), layers=costs)
    text = r"a host budget of 4 B is too small: 15 B of weights .* to 15 B \(15 bytes\) or load"
    with pytest.raises(HostBudgetError, match=text) as refused:
        make_plan(asked)
    assert refused.value.smallest_bytes == 15
    plan = make_plan(replace(asked, host_budget_bytes=15))
    assert letters(plan) == "GMM"
    assert [layer.reason for layer in plan.layers] == [
        "its weights have no usable bytes in the file",
        "the host budget is used up; streams from the file",
        "smaller than one whole page, so nothing to lock",
    ]
    assert letters(make_plan(replace(asked, host_budget_bytes=25))) == "GPM"
    # 0 asks for no locks; the copies exist anyway.
    assert letters(make_plan(replace(asked, host_budget_bytes=0))) == "GMM"


def any_request(chance: random.Random) -> PlanRequest:
    alike = chance.random() < 0.3
    sizes = [chance.choice([0, 1, 256, 1000, 4096, chance.randrange(1, 10**6)]) for _ in range(9)]
    sizes = ([sizes[3]] * 9 if alike else sizes)[: chance.randrange(10)]
    costs = []
    for index, size in enumerate(sizes):
        copied = chance.choice([0, 0, 0, size, size // 2])
        lockable = chance.choice([size - copied, (size - copied) // 4096 * 4096, 0])
        costs.append(layer(size, f"blocks.{index}", copied, lockable))
    base = request(
        [],
        None,
        slots=chance.randrange(1, 5),
        base=chance.randrange(5000),
        copied=chance.choice([0, 0, 700]),
        activations=chance.randrange(5000),
        staging=chance.choice([0, 0, 5000]),
    )
    asked = replace(base, layers=tuple(costs))
    whole = smallest_device_bytes(asked) + sum(sizes)
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
        check(asked, make_plan(asked))
    assert planned > 2500


def why_not(asked: PlanRequest) -> type[BudgetError] | None:
    device, host = asked.device_budget_bytes, asked.host_budget_bytes
    copied = asked.base_copied_bytes + sum(layer.copied_bytes for layer in asked.layers)
    everything = asked.base_device_bytes + asked.activation_bytes
    everything += sum(layer.device_bytes for layer in asked.layers)
    if device is not None and device < min(everything, smallest_device_bytes(asked)):
        return DeviceBudgetError
    return HostBudgetError if host and host < copied else None


def check(asked: PlanRequest, plan: Plan) -> None:
    sizes = [cost.device_bytes for cost in asked.layers]
    streamed = [index for index in range(len(sizes)) if index not in plan.resident]
    held = asked.base_device_bytes + sum(sizes[index] for index in plan.resident)
    assert plan.device_bytes == held + plan.slots * plan.slot_bytes
    if streamed:
        assert 1 <= plan.slots <= min(asked.slots, len(streamed))
        assert plan.slot_bytes == max(sizes[index] for index in streamed)
    if asked.device_budget_bytes is not None:
        assert plan.device_bytes + plan.activation_bytes <= asked.device_budget_bytes
        left = asked.device_budget_bytes - plan.device_bytes - plan.activation_bytes
        for index in streamed:
            rest = [sizes[other] for other in streamed if other != index]
            saved = plan.slots * (plan.slot_bytes - max(rest, default=0))
            assert sizes[index] - saved > left or len(rest) < plan.slots
    if asked.host_budget_bytes:
        host = plan.copied_bytes + plan.lock_bytes + plan.staging_bytes
        assert host <= asked.host_budget_bytes
    if asked.host_budget_bytes == 0:
        assert plan.lock_bytes + plan.staging_bytes == 0
    assert all(planned.reason for planned in plan.layers)
