"""What passes take: measured, corrected for between them, and given way to when it is too much."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload_core.device import FakeBackend
from offload_core.run import LayerEngine
from offload_core.run.passes import PassMeter
from offload_core.values import Budget, DeviceMemoryError, EngineConfig, EngineState

Over = Callable[..., LayerEngine]
Config = Callable[..., EngineConfig]

FULL = DeviceMemoryError("the activations found no room", 1)


class Activations(FakeBackend):
    """Says what the passes take, and keeps the highest sum of that and of what is allocated.

    ``moments`` is that sum at the end of each pass that was measured.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.moments: list[int] = []
        self.trims = 0

    def activation_peak_bytes(self) -> int | None:
        self.moments.append(self.allocated_bytes + (self.activations_bytes or 0))
        return super().activation_peak_bytes()

    def trim(self) -> None:
        self.trims += 1


def budget_of(engine: LayerEngine, share_of: Callable[..., int], hundredths: int) -> Budget:
    return Budget(share_of(engine, hundredths), None)


# The meter alone


def test_passes_are_looked_at_after_1_2_4_8_and_so_on() -> None:
    meter = PassMeter(FakeBackend(), 0)
    for _ in range(2):
        meter.begin()
        assert [number for number in range(1, 40) if meter.end_pass()] == [1, 2, 4, 8, 16, 32]


def test_what_is_measured_is_the_plans_own_and_the_peak_is_the_runs() -> None:
    fake = FakeBackend()
    meter = PassMeter(fake, 100)
    meter.begin()
    meter.measure()
    assert (meter.peak_bytes, meter.need_bytes) == (None, None)
    for taken in (500, 300):
        fake.activations_bytes = taken
        meter.measure()
    assert (meter.peak_bytes, meter.need_bytes) == (500, 600)
    meter.restart()
    assert meter.need_bytes == 600, "until the new plan's first pass is measured"
    fake.activations_bytes = 200
    meter.measure()
    assert (meter.peak_bytes, meter.need_bytes) == (500, 300)
    meter.begin()
    assert meter.need_bytes is None


def test_a_plan_may_grow_after_the_first_pass_and_after_the_fourth_if_that_brings_much() -> None:
    fake = FakeBackend()
    meter = PassMeter(fake, 0)
    meter.begin()
    assert not meter.may_grow(1 << 40)
    grew = []
    for _ in range(33):
        meter.end_pass()
        fake.activations_bytes = 1000
        meter.measure()
        grew.append((meter.may_grow(1001), meter.may_grow(1 << 40)))
    assert [number for number, (_, much) in enumerate(grew, 1) if much] == [1, 4]
    assert [number for number, (little, _) in enumerate(grew, 1) if little] == [1]


# Corrections


@pytest.mark.parametrize("hundredths", [30, 60, 100, 130])
@pytest.mark.parametrize("guess", [0, 20_000, 100_000])
@pytest.mark.parametrize("taken", [0, 20_000, 60_000])
def test_a_guess_that_was_far_off_is_right_after_the_first_pass(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    hundredths: int,
    guess: int,
    taken: int,
) -> None:
    tiny = make_tiny(5, deep=True)
    fake = Activations()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=1000))
    budget = Budget(share_of(engine, hundredths) + 110_000, 0)
    assert budget.device_bytes is not None
    guessed = engine.load(budget, guess)
    fake.activations_bytes = taken
    needed = engine.plan(budget, taken + 1000)
    with engine.run():
        assert tiny.is_exact()
        fake.peak_bytes = 0
        engine.end_pass()
        corrected = engine.snapshot().memory.device_bytes
        assert fake.peak_bytes <= max(guessed.device_bytes, corrected)
        fake.moments.clear()
        fake.peak_bytes = fake.allocated_bytes
        for _ in range(8):
            assert tiny.is_exact()
            engine.end_pass()
    assert max(fake.moments) <= budget.device_bytes
    assert fake.peak_bytes + taken <= budget.device_bytes
    assert engine.activation_need_bytes == taken + 1000
    assert engine.snapshot().memory.activation_peak_bytes == taken
    # Never more than what it takes leaves, and little less: 1/128 is not worth a move, and what was
    # on the device stayed there, which leaves fewer windows to choose from.
    assert corrected + taken + 1000 <= budget.device_bytes
    assert needed.device_bytes - corrected <= corrected // 64
    assert engine.snapshot().notes == ()


def test_a_pass_that_takes_more_later_shrinks_the_plan_and_one_that_takes_less_changes_nothing(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(5, deep=True)
    fake = Activations()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    budget = budget_of(engine, share_of, 90)
    engine.load(budget, 30_000)
    held: list[int] = []
    with engine.run():
        for taken in [30_000] * 7 + [60_000] + [0] * 24:
            fake.activations_bytes = taken
            assert tiny.is_exact()
            engine.end_pass()
            held.append(engine.snapshot().memory.device_bytes)
    assert held[:7] == [held[0]] * 7
    assert held[7] + 60_000 <= (budget.device_bytes or 0) < held[0] + 60_000
    assert held[7:] == [held[7]] * 25


def test_a_plan_that_grows_leaves_room_for_a_pass_that_takes_more_than_the_one_it_was_made_of(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(5, deep=True)
    fake = Activations()
    config = poisoned(margin_bytes=0, growth_margin_bytes=20_000)
    engine = engine_over(tiny, fake, config=config)
    budget = Budget(share_of(engine, 60) + 30_000, None)
    small = engine.load(budget, 60_000)
    held = []
    with engine.run():
        for taken in (10_000, 29_000, 29_000, 29_000):
            fake.activations_bytes = taken
            assert tiny.is_exact()
            engine.end_pass()
            held.append(engine.snapshot().memory.device_bytes)
    assert held == [engine.plan(budget, 30_000).device_bytes] * 4
    assert held[0] > small.device_bytes
    # The next run knows what this one took: the room is not kept twice.
    engine.load(budget, engine.activation_need_bytes or 0)
    held.clear()
    with engine.run():
        for _ in range(4):
            assert tiny.is_exact()
            engine.end_pass()
            held.append(engine.snapshot().memory.device_bytes)
    assert held == [held[0]] * 4
    # A plan that would grow by less than that does not.
    engine.load(budget, 45_000)
    before = engine.snapshot().memory.device_bytes
    with engine.run():
        assert tiny.is_exact()
        engine.end_pass()
        assert engine.snapshot().memory.device_bytes == before


def test_what_is_on_the_device_stays_where_it_is_when_the_plan_grows(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(5, deep=True)
    fake = Activations()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    budget = Budget(share_of(engine, 60) + 30_000, None)

    def on_device() -> dict[str, int]:
        """Where the weights are that are on the device between passes."""
        host = {p.data_ptr() for p in homes.values()}
        now = {name: p.data_ptr() for name, p in tiny.module.named_parameters()}
        return {name: address for name, address in now.items() if address not in host}

    homes = dict(tiny.module.named_parameters())
    engine.load(budget, 60_000)
    before = on_device()
    with engine.run():
        for taken in (40_000, 40_000, 40_000, 10_000):  # grows after the first pass only
            fake.activations_bytes = taken
            assert tiny.is_exact()
            engine.end_pass()
        grown = on_device()
        assert before.items() < grown.items()
        assert tiny.is_exact()
    # A load anew finds room for nothing more: what was added did not cost much.
    engine.load(budget, 40_000)
    assert on_device() == grown
    # A smaller plan, and back.
    engine.load(budget, 70_000)
    with engine.run():
        assert tiny.is_exact()
    engine.unload()
    assert on_device() == {}


@pytest.mark.parametrize("passes", [1, 2, 3, 4, 8, 9, 32])
def test_later_passes_never_take_more_of_the_device_than_the_first_ones_left_them(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    passes: int,
) -> None:
    chance = random.Random(passes)
    tiny = make_tiny(3, deep=True)
    fake = Activations()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    budget = budget_of(engine, share_of, 95)
    engine.load(budget, 10_000)
    held = []
    with engine.run():
        for _ in range(passes):
            fake.activations_bytes = chance.randrange(40_000)
            assert tiny.is_exact()
            engine.end_pass()
            held.append(engine.snapshot().memory.device_bytes)
    assert held[4:] == sorted(held[4:], reverse=True)


def test_what_was_said_of_a_run_is_not_said_of_the_next(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(5, deep=True)
    fake = Activations()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    budget = budget_of(engine, share_of, 60)
    plan = engine.load(budget)
    fake.activations_bytes = 10 * plan.device_bytes
    with engine.run():
        assert tiny.is_exact()
        engine.end_pass()
    assert "the run takes more than the budget" in engine.snapshot().notes[0]
    assert engine.load(budget) == plan
    assert engine.snapshot().notes == ()


def test_a_run_that_takes_more_than_the_budget_says_so_and_goes_on(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(3, deep=True)
    fake = Activations()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    planned = engine.load(budget_of(engine, share_of, 50))
    fake.activations_bytes = 1 << 30
    with engine.run():
        for _ in range(3):
            assert tiny.is_exact()
            engine.end_pass()
    (note,) = engine.snapshot().notes
    assert note.startswith("the run takes more than the budget: a device budget of ")
    assert engine.snapshot().memory.device_bytes == planned.device_bytes


@pytest.mark.parametrize("call", [*range(4), None])
def test_a_correction_that_the_device_refuses_goes_half_way_or_back_and_says_so(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    call: int | None,
) -> None:
    tiny = make_tiny(5, deep=True)
    fake = Activations()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    budget = budget_of(engine, share_of, 90)
    before = engine.load(budget, 100_000)
    wanted = engine.plan(budget, 1000).device_bytes
    fake.activations_bytes = 1000
    with engine.run():
        assert tiny.is_exact()
        fake.fail_allocation = call
        if call is None:  # there is room for the plan of before, and for nothing more
            fake.capacity_bytes = fake.allocated_bytes
        engine.end_pass()
        assert fake.fail_allocation is None
        assert engine.state is EngineState.RUNNING
        held = engine.snapshot().memory.device_bytes
        if call is None:
            assert held == before.device_bytes
        else:
            assert before.device_bytes < held < wanted
        for order in (None, [3, 1], None):
            assert tiny.is_exact(order)
            engine.end_pass()
    (note,) = engine.snapshot().notes
    assert "the device had less memory than the budget allows" in note
    assert note.endswith("a smaller plan runs")
    with engine.run():
        assert tiny.is_exact()


class NoMore(FakeBackend):
    """Allocates nothing while ``full`` is set."""

    full = False

    def allocate(self, size_bytes: int) -> torch.Tensor:
        if self.full:
            raise DeviceMemoryError("somebody took it all", size_bytes)
        return super().allocate(size_bytes)


def test_where_even_the_plan_of_before_cannot_be_had_again_nothing_is_left_and_a_load_works(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(5, deep=True)
    fake = NoMore()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    budget = budget_of(engine, share_of, 90)
    engine.load(budget, 100_000)
    fake.activations_bytes = 0

    def lose_everything() -> None:
        with engine.run():
            assert tiny.is_exact()
            fake.full = True
            engine.end_pass()

    with pytest.raises(DeviceMemoryError, match="somebody took it all"):
        lose_everything()
    fake.full = False
    assert fake.allocated_bytes == 0
    assert engine.snapshot().memory.device_bytes == 0
    assert fake.locker.locked == {}
    assert all(p.data_ptr() for p in tiny.module.parameters())
    assert tiny.is_exact()
    engine.load(budget)
    with engine.run():
        assert tiny.is_exact()


def test_outside_a_run_a_pass_changes_nothing(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(3, deep=True)
    fake = Activations()
    fake.activations_bytes = 0
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    engine.end_pass()
    planned = engine.load(budget_of(engine, share_of, 80), 20_000)
    engine.end_pass()
    assert fake.moments == []
    assert engine.snapshot().memory.device_bytes == planned.device_bytes
    assert engine.activation_need_bytes is None
    engine.unload()
    engine.end_pass()


def test_what_cannot_be_measured_is_not_corrected(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(3, deep=True)
    engine = engine_over(tiny, config=poisoned(margin_bytes=0))
    planned = engine.load(budget_of(engine, share_of, 80), 20_000)
    with engine.run():
        assert tiny.is_exact()
        engine.end_pass()
    assert engine.activation_need_bytes is None
    assert engine.snapshot().memory.device_bytes == planned.device_bytes


def test_a_hundred_corrections_within_one_run_and_between_runs_stay_exact(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    chance = random.Random(0)
    tiny = make_tiny(5, deep=True)
    fake = Activations()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    held = set()
    for _ in range(50):
        budget = Budget(share_of(engine, chance.randrange(101)) + 50_000, chance.choice([None, 0]))
        engine.load(budget, chance.randrange(50_000))
        with engine.run():
            for _ in range(chance.randrange(1, 5)):
                fake.activations_bytes = chance.randrange(50_000)
                order = [chance.randrange(5) for _ in range(chance.randrange(7))]
                assert tiny.is_exact(chance.choice([None, order]))
                engine.end_pass()
                held.add(engine.snapshot().memory.device_bytes)
    assert len(held) > 30


def test_a_correction_stays_within_the_budget_that_was_asked_for_last(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(5, deep=True)
    fake = Activations()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    high, low = share_of(engine, 90), share_of(engine, 60)
    engine.load(Budget(high, 0), 100_000)
    engine.load(Budget(low, 0), 100_000 - (high - low))
    assert engine.snapshot().budget == Budget(low, 0)
    fake.activations_bytes = 0
    with engine.run():
        assert tiny.is_exact()
        engine.end_pass()
        assert engine.snapshot().memory.device_bytes <= low


def test_a_later_pass_shrinks_a_plan_that_served_under_a_smaller_budget(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(5, deep=True)
    fake = Activations()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    high, low = share_of(engine, 90), share_of(engine, 60)
    engine.load(Budget(high, 0), 100_000)
    left = 100_000 - (high - low)
    engine.load(Budget(low, 0), left)
    with engine.run():
        for taken in (left, left + 20_000):
            fake.activations_bytes = taken
            assert tiny.is_exact()
            engine.end_pass()
        assert engine.snapshot().memory.device_bytes + left + 20_000 <= low


def test_a_run_begins_with_what_others_cached_given_back(
    tiny: Any, engine_over: Over, budget_for: Callable[..., Budget]
) -> None:
    fake = Activations()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "mapped"))
    before = fake.trims
    with engine.run():
        assert fake.trims == before + 1
        assert tiny.is_exact()


# Giving way


def run_twice(engine: LayerEngine, tiny: Any, fake: FakeBackend, at_block: int) -> list[bool]:
    """A pass that fails in one block for want of memory, tried again if the engine gives way."""
    answers = []

    def full(*_: object) -> None:
        raise FULL

    with engine.run():
        for _ in range(2):
            handle = tiny.module.blocks[at_block].norm.register_forward_hook(full)
            try:
                tiny.module(tiny.x)
            except DeviceMemoryError as error:
                answers.append(engine.give_way(error))
            finally:
                handle.remove()
            assert tiny.is_exact()
            engine.end_pass()
    return answers


@pytest.mark.parametrize("hundredths", [30, 60, 90])
@pytest.mark.parametrize("block", [0, 2, 4])
@pytest.mark.parametrize("host", [None, 0])
def test_a_full_device_in_the_middle_of_a_pass_is_given_way_to_once_a_run(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    hundredths: int,
    block: int,
    host: int | None,
) -> None:
    tiny = make_tiny(5, deep=True)
    fake = Activations()
    fake.activations_bytes = 5000
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    budget = Budget(share_of(engine, hundredths) + 5000, host)
    before = engine.load(budget, 5000)
    assert run_twice(engine, tiny, fake, block) == [True, False]
    (note,) = engine.snapshot().notes
    text = "the device was full in the middle of a run; a smaller plan runs until another"
    assert note.startswith(text)
    after = engine.snapshot().memory.device_bytes
    assert after < before.device_bytes
    # Under the same budget the next run would end as this one did; under another it may not.
    for _ in range(2):
        assert engine.load(budget, 5000).device_bytes == after
        engine.unload()
    cap = max(before.device_bytes * 3 // 4 + 5000, share_of(engine, 0))
    assert engine.load(budget, 0).device_bytes <= cap
    with engine.run():
        assert tiny.is_exact()
        assert engine.give_way(FULL) is (after > share_of(engine, 0)), "once more in another run"
        assert tiny.is_exact()
    drifted = Budget((budget.device_bytes or 0) + 1, host)
    assert engine.load(drifted, 5000).device_bytes < before.device_bytes
    assert "the device was full" in engine.snapshot().notes[0]
    other = Budget((budget.device_bytes or 0) * 5 // 4, host)
    assert engine.load(other, 5000).device_bytes >= before.device_bytes
    with engine.run():
        assert tiny.is_exact()


def test_nothing_gives_way_where_no_smaller_plan_exists(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(5, deep=True)
    fake = Activations()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    planned = engine.load(budget_of(engine, share_of, 0))
    assert run_twice(engine, tiny, fake, 1) == [False, False]
    assert engine.snapshot().notes == ()
    assert engine.snapshot().memory.device_bytes == planned.device_bytes


def test_only_a_full_device_in_a_run_is_given_way_to(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(5, deep=True)
    engine = engine_over(tiny, config=poisoned(margin_bytes=0))
    assert not engine.give_way(FULL)
    planned = engine.load(budget_of(engine, share_of, 60))
    assert not engine.give_way(FULL)
    with engine.run():
        for error in (ValueError("shape"), MemoryError(), KeyboardInterrupt()):
            assert not engine.give_way(error)
        assert tiny.is_exact()
    assert engine.snapshot().memory.device_bytes == planned.device_bytes
    assert engine.snapshot().notes == ()


def test_the_frames_of_the_pass_that_failed_hold_nothing_while_the_smaller_plan_loads(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(5, deep=True)
    engine = engine_over(tiny, config=poisoned(margin_bytes=0))
    engine.load(budget_of(engine, share_of, 60))
    activations: list[weakref.ref[torch.Tensor]] = []

    def take_and_fail(*_: object) -> None:
        mine = torch.ones(1000)
        activations.append(weakref.ref(mine))
        raise FULL

    gc.disable()
    try:
        with engine.run():
            handle = tiny.module.blocks[3].norm.register_forward_hook(take_and_fail)
            with pytest.raises(DeviceMemoryError) as caught:
                tiny.module(tiny.x)
            assert activations[0]() is not None
            assert engine.give_way(caught.value)
            assert activations[0]() is None
            handle.remove()
            assert tiny.is_exact()
    finally:
        gc.enable()


@pytest.mark.parametrize("roomy", [3, None])
def test_a_plan_that_gave_way_stays_smaller_though_the_budget_holds_everything(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, roomy: int | None
) -> None:
    tiny = make_tiny(5, deep=True)
    fake = Activations()
    fake.activations_bytes = 1000
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    whole = engine.plan(Budget()).device_bytes
    engine.load(Budget(None if roomy is None else roomy * whole, 0))
    with engine.run():
        assert engine.give_way(FULL)
        assert engine.snapshot().memory.device_bytes <= whole * 3 // 4
        for _ in range(4):
            assert tiny.is_exact()
            engine.end_pass()
            # The device refused this much a moment ago, and may be given way to once a run.
            assert engine.snapshot().memory.device_bytes <= whole * 3 // 4


class Forgetful(FakeBackend):
    """Measures from ``start_activation_peak`` on, as a real device does."""

    taken = 0

    def start_activation_peak(self) -> None:
        self.taken = 0

    def activation_peak_bytes(self) -> int | None:
        return self.taken


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_run_whose_last_pass_was_corrected_remembers_what_it_took(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    passes: int,
) -> None:
    tiny, fake = make_tiny(5, deep=True), Forgetful()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=1000))
    engine.load(budget_of(engine, share_of, 90), 100_000)
    with engine.run():
        for _ in range(passes):
            assert tiny.is_exact()
            fake.taken = 60_000
            engine.end_pass()
    assert engine.activation_need_bytes == 61_000
