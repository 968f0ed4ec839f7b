"""Device memory that another model needs in the middle of a run is lent until the run ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload_core.device import FakeBackend
from offload_core.run import LayerEngine
from offload_core.values import Budget

Over = Callable[..., LayerEngine]


def run(tiny: Any, engine: LayerEngine, act: Callable[[], None] = lambda: None) -> None:
    with engine.run():
        assert tiny.is_exact()
        engine.end_pass()
        act()
        assert tiny.is_exact()
        engine.end_pass()


@pytest.mark.parametrize("plan", ["resident", "mixed"])
def test_it_is_freed_between_two_passes_and_had_again_by_the_next_load(
    make_tiny: Callable[..., Any], engine_over: Over, budget_for: Callable[..., Budget], plan: str
) -> None:
    tiny, fake = make_tiny(6), FakeBackend()
    engine = engine_over(tiny, fake)
    budget = budget_for(engine, plan)
    engine.load(budget)
    before, lent = fake.allocated_bytes, []

    def lend() -> None:
        lent.append(engine.lend(5000))
        lent.append(before - fake.allocated_bytes)

    run(tiny, engine, lend)
    assert lent[0] == lent[1] >= 5000
    engine.load(budget)
    assert fake.allocated_bytes == before
    run(tiny, engine)


def test_no_more_is_lent_than_the_smallest_plan_leaves(
    make_tiny: Callable[..., Any], engine_over: Over, budget_for: Callable[..., Budget]
) -> None:
    tiny, fake = make_tiny(6), FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "mixed"))
    lent: list[int] = []
    run(tiny, engine, lambda: lent.extend(engine.lend(1 << 40) for _ in range(2)))
    assert lent[0] > 0
    assert lent[1] == 0


def test_nothing_is_lent_while_a_layer_runs_or_no_run_is_under_way(
    make_tiny: Callable[..., Any], engine_over: Over, budget_for: Callable[..., Budget]
) -> None:
    tiny = make_tiny(6)
    engine = engine_over(tiny)
    engine.load(budget_for(engine, "resident"))
    assert engine.lend(5000) == 0
    lent: list[int] = []
    inside = tiny.module.blocks[3].norm
    handle = inside.register_forward_hook(lambda *_: lent.append(engine.lend(5000)))
    run(tiny, engine)
    handle.remove()
    assert lent == [0, 0]


def test_a_layer_that_an_exception_left_holds_nothing_back_for_longer_than_its_run(
    make_tiny: Callable[..., Any], engine_over: Over, budget_for: Callable[..., Budget]
) -> None:
    class Stop(BaseException):
        pass

    tiny = make_tiny(6)
    engine = engine_over(tiny)
    engine.load(budget_for(engine, "resident"))

    def stop(*_: Any) -> None:
        raise Stop

    handle = tiny.module.blocks[2].norm.register_forward_hook(stop)
    with pytest.raises(Stop), engine.run(), torch.no_grad():
        tiny.module(tiny.x)
    handle.remove()
    lent: list[int] = []
    run(tiny, engine, lambda: lent.append(engine.lend(5000)))
    assert lent[0] >= 5000
