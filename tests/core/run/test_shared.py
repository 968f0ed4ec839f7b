"""One budget for several models: the sum stays under it, and the least recently used give way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from offload_core.device import FakeBackend
from offload_core.run import LayerEngine, SharedBudget
from offload_core.run.shared import promised_host_bytes
from offload_core.values import Budget, DeviceBudgetError

Over = Callable[..., LayerEngine]


def load(share: SharedBudget, engine: LayerEngine, wanted: Budget | None = None) -> None:
    engine.load(share.take(engine, wanted or Budget(), 0))


def whole(engine: LayerEngine) -> int:
    return engine.plan(Budget()).device_bytes


@pytest.fixture
def three(make_tiny: Callable[..., Any], engine_over: Over) -> list[tuple[Any, LayerEngine]]:
    models = [make_tiny(4, seed=seed) for seed in range(3)]
    return [(tiny, engine_over(tiny, FakeBackend())) for tiny in models]


def held(three: list[tuple[Any, LayerEngine]]) -> list[int]:
    return [engine.device_bytes for _, engine in three]


def test_the_sum_stays_under_the_budget_and_the_least_recent_give_way(three: Any) -> None:
    size = whole(three[0][1])
    share = SharedBudget(Budget(2 * size, 0))
    for _, engine in three[:2]:
        load(share, engine)
    assert held(three) == [size, size, 0]
    load(share, three[2][1])
    assert held(three) == [0, size, size] or held(three)[0] < size // 2
    assert held(three)[1:] == [size, size]
    load(share, three[1][1])  # used again: the third is the one to go next
    load(share, three[0][1])
    assert held(three)[:2] == [size, size]
    assert sum(held(three)) <= 2 * size
    for tiny, engine in three[:2]:
        with engine.run():
            assert tiny.is_exact()


def test_only_as_much_gives_way_as_is_needed(three: Any) -> None:
    size = whole(three[0][1])
    share = SharedBudget(Budget(2 * size - 1, 0))
    for _, engine in three[:2]:
        load(share, engine)
    assert held(three)[1] == size
    assert size // 4 < held(three)[0] < size
    assert sum(held(three)) <= 2 * size - 1
    with three[0][1].run():
        assert three[0][0].is_exact()


def test_a_running_model_keeps_what_it_has(three: Any) -> None:
    size = whole(three[0][1])
    share = SharedBudget(Budget(size + size // 2, 0))
    load(share, three[0][1])
    with three[0][1].run():
        load(share, three[1][1])
        assert held(three)[0] == size
        assert held(three)[1] <= size // 2
        assert three[0][0].is_exact()
        assert three[1][0].is_exact()


def test_a_model_too_large_for_what_the_running_one_leaves_is_refused(three: Any) -> None:
    size = whole(three[0][1])
    share = SharedBudget(Budget(size + 1, 0))
    load(share, three[0][1])
    with three[0][1].run(), pytest.raises(DeviceBudgetError, match="too small"):
        load(share, three[1][1])
    assert held(three)[:2] == [size, 0]


def streaming(three: Any) -> tuple[Budget, int]:
    """A budget under which all streams, and what is locked then."""
    engine = three[0][1]
    smallest = smallest_of(engine)
    return Budget(smallest, None), engine.plan(Budget(smallest, None)).lock_bytes


def locked(three: Any) -> list[int]:
    return [engine.snapshot().memory.locked_bytes for _, engine in three]


def test_page_locks_of_all_models_share_the_host_budget_and_the_least_recent_give_way(
    three: Any,
) -> None:
    wanted, lockable = streaming(three)
    limit = lockable + lockable // 2
    share = SharedBudget(Budget(None, limit))
    for tiny, engine in three:
        load(share, engine, wanted)
        with engine.run():
            assert tiny.is_exact()
        assert sum(locked(three)) <= limit
    first, second, third = locked(three)
    assert (first, third) == (0, lockable)
    assert 0 < second <= lockable // 2
    # Used again, they are exact with what they have left, and take what they need back.
    for tiny, engine in three:
        with engine.run():
            assert tiny.is_exact()
    load(share, three[0][1], wanted)
    with three[0][1].run():
        assert three[0][0].is_exact()
    assert locked(three)[0] == lockable
    assert sum(locked(three)) <= limit


def test_a_running_model_keeps_its_locks(three: Any) -> None:
    wanted, lockable = streaming(three)
    share = SharedBudget(Budget(None, lockable + lockable // 4))
    load(share, three[0][1], wanted)
    with three[0][1].run():
        assert three[0][0].is_exact()
        load(share, three[1][1], wanted)
        with three[1][1].run():
            assert three[1][0].is_exact()
        assert locked(three)[0] == lockable
        assert 0 < locked(three)[1] <= lockable // 4
        assert three[0][0].is_exact()


def test_a_model_that_sleeps_gives_up_the_locks_that_it_kept(three: Any) -> None:
    wanted, lockable = streaming(three)
    share = SharedBudget(Budget(None, lockable))
    load(share, three[0][1], wanted)
    with three[0][1].run():
        assert three[0][0].is_exact()
    three[0][1].sleep(keep_locks=True)
    assert locked(three)[0] == lockable
    load(share, three[1][1], wanted)
    with three[1][1].run():
        assert three[1][0].is_exact()
    assert locked(three)[:2] == [0, lockable]
    assert three[0][1].slept_with is not None
    three[0][1].wake(share.take(three[0][1], *three[0][1].slept_with))
    with three[0][1].run():
        assert three[0][0].is_exact()
    assert sum(locked(three)) <= lockable


def test_a_model_that_is_gone_holds_nothing(make_tiny: Callable[..., Any], three: Any) -> None:
    size = whole(three[0][1])
    share = SharedBudget(Budget(size, 0))
    load(share, three[0][1])
    three[0][1].detach()
    load(share, three[1][1])
    assert held(three) == [0, size, 0]


def test_without_figures_nobody_gives_way(three: Any) -> None:
    share = SharedBudget(Budget())
    for _, engine in three:
        load(share, engine)
    assert held(three) == [whole(engine) for _, engine in three]


def test_locks_that_are_kept_larger_than_the_plan_count_against_the_others(
    make_tiny: Callable[..., Any], engine_over: Over
) -> None:
    tiny = make_tiny(5, deep=True)
    engine = engine_over(tiny, FakeBackend())
    smallest = smallest_of(engine)
    engine.load(Budget(smallest, None))
    with engine.run():
        assert tiny.is_exact()
    locked = engine.snapshot().memory.locked_bytes
    plan = engine.load(Budget((smallest + whole(engine)) // 2, None))
    assert engine.snapshot().memory.locked_bytes == locked > plan.lock_bytes
    assert promised_host_bytes(engine) >= locked


def test_a_correction_stays_within_what_the_others_leave_now(three: Any) -> None:
    size = whole(three[0][1])
    share = SharedBudget(Budget(size + size // 2, 0))
    first, second = three[0][1], three[1][1]
    first.load(Budget(smallest_of(first), 0))
    share.take(first, Budget(), 0)
    load(share, second)
    with first.run():
        first.allow(share.take(first, Budget(), 0))
        first.end_pass()
        assert three[0][0].is_exact()
    assert sum(held(three)) <= size + size // 2


def smallest_of(engine: LayerEngine) -> int:
    try:
        engine.plan(Budget(0))
    except DeviceBudgetError as error:
        return error.smallest_bytes
    raise AssertionError("a device budget of nothing was accepted")


def test_a_model_that_wakes_has_the_others_make_room(three: Any) -> None:
    size = whole(three[0][1])
    share = SharedBudget(Budget(2 * size, 0))
    load(share, three[0][1])
    three[0][1].sleep()
    load(share, three[1][1])
    load(share, three[2][1])
    assert held(three) == [0, size, size]
    engine = three[0][1]
    assert engine.slept_with is not None
    engine.wake(share.take(engine, *engine.slept_with))
    assert held(three)[0] == size
    assert held(three)[2] == size
    assert sum(held(three)) <= 2 * size
    for tiny, each in (three[0], three[2]):
        with each.run():
            assert tiny.is_exact()
