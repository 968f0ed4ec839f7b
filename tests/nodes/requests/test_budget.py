"""Another budget for a model: the plan is what comes of it, and nothing else changes anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Model:
    """An engine of the tests, and what the user asked for."""

    name = "tiny"

    def __init__(self, pack: Any, engine: Any) -> None:
        values = pack.module("offload_core.values")
        self.engine = engine
        self.asked = values.Budget()
        self.fails: list[Exception] = []
        self._loaded = values.EngineState.LOADED

    @property
    def is_loaded(self) -> bool:
        return self.engine.state is self._loaded

    def snapshot(self) -> Any:
        return self.engine.snapshot()

    def plan(self, budget: Any) -> Any:
        return self.engine.plan(budget)

    def ask(self, budget: Any) -> Callable[[], None]:
        before, self.asked = self.asked, budget

        def take_back() -> None:
            self.asked = before

        return take_back

    def apply(self) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.engine.load(self.asked)


class Host:
    """A ComfyUI with one model."""

    def __init__(self, busy: type[Exception], model: Model) -> None:
        self.model = model
        self.runs = False
        self._busy = busy

    def budgeted(self, model_id: str) -> Model | None:
        return self.model if model_id == "tiny-1" else None

    @contextmanager
    def nothing_runs(self, wait: bool, check: Any) -> Iterator[None]:
        if self.runs and not wait:
            raise self._busy("a prompt runs")
        check()
        yield


@pytest.fixture
def words(pack: Any) -> Any:
    return pack.module("nodes.requests.records")


@pytest.fixture
def model(pack: Any, make_engine: Any) -> Model:
    return Model(pack, make_engine())


@pytest.fixture
def host(words: Any, model: Model) -> Host:
    return Host(words.BusyError, model)


@pytest.fixture
def orders(pack: Any, host: Host) -> Any:
    return pack.module("nodes.requests.pending").OrderList()


@pytest.fixture
def service(pack: Any, host: Host, orders: Any) -> Any:
    return pack.module("nodes.requests.budget").BudgetService(host, orders)


def smallest(model: Model, pack: Any) -> int:
    values = pack.module("offload_core.values")
    with pytest.raises(values.DeviceBudgetError) as caught:
        model.engine.plan(values.Budget(0, 0))
    return int(caught.value.smallest_bytes)


def placements(layers: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    return [(layer["name"], layer["placement"], layer["resident_bytes"]) for layer in layers]


def test_a_plan_changes_nothing_and_is_json(
    service: Any, words: Any, model: Model, pack: Any, orders: Any
) -> None:
    before = model.snapshot()
    figure = smallest(model, pack)
    plan = service.plan(words.BudgetOrder("tiny-1", device_bytes=figure, host_bytes=0))
    json.dumps(plan, allow_nan=False)
    assert plan["fits"] is True
    assert plan["asked"] == {"device_bytes": figure, "host_bytes": 0}
    assert plan["smallest"]["device_bytes"] == figure
    assert plan["counts"]["resident"] == 1, "what is outside of the blocks"
    assert sum(plan["counts"].values()) == len(plan["layers"]) == 5
    assert "0 of 4 layers stay there whole" in plan["message"]
    assert (model.snapshot(), model.asked) == (before, type(model.asked)())
    assert orders.listed() == []


def test_a_plan_is_what_comes_of_the_budget(
    service: Any, words: Any, model: Model, pack: Any
) -> None:
    wire = pack.module("nodes.models.status_json")
    model.engine.load(model.asked)
    figure = smallest(model, pack) + 400
    order = words.BudgetOrder("tiny-1", device_bytes=figure, host_bytes=0)
    planned = service.plan(order)
    applied = service.set_budget(order)
    assert applied["applied"] == "now"
    now = [wire.layer_json(layer) for layer in model.snapshot().layers]
    assert placements(planned["layers"]) == placements(applied["layers"]) == placements(now)
    assert planned["planned"]["device_bytes"] == model.snapshot().memory.device_bytes
    assert planned["changes"] > 0
    assert service.plan(order)["changes"] == 0
    assert model.snapshot().budget.device_bytes == figure


def test_a_figure_that_is_left_out_stays(service: Any, words: Any, model: Model) -> None:
    service.set_budget(words.BudgetOrder("tiny-1", device_bytes=10**6, host_bytes=4096))
    assert service.set_budget(words.BudgetOrder("tiny-1", host_bytes=None))["asked"] == {
        "device_bytes": 10**6,
        "host_bytes": None,
    }
    assert (model.asked.device_bytes, model.asked.host_bytes) == (10**6, None)


def test_of_a_model_that_is_not_loaded_it_is_for_the_next_run(
    service: Any, words: Any, model: Model
) -> None:
    answer = service.set_budget(words.BudgetOrder("tiny-1", device_bytes=10**6))
    assert answer["applied"] == "next_run"
    assert "when the model is loaded or woken next" in answer["message"]
    assert model.asked.device_bytes == 10**6
    assert not model.is_loaded


def test_too_small_is_an_answer_of_a_plan_and_a_refusal_of_an_order(
    service: Any, words: Any, model: Model, pack: Any
) -> None:
    figure = smallest(model, pack)
    order = words.BudgetOrder("tiny-1", device_bytes=figure - 1)
    plan = service.plan(order)
    json.dumps(plan, allow_nan=False)
    assert (plan["fits"], plan["layers"]) == (False, [])
    assert plan["smallest"]["device_bytes"] == figure
    assert "is too small" in plan["message"]
    assert str(figure) in plan["message"]
    with pytest.raises(words.BudgetTooSmallError, match=rf"{figure} bytes.*Nothing was changed"):
        service.set_budget(order)
    assert model.asked.device_bytes is None


def test_while_a_prompt_runs_it_is_refused_or_waits_and_a_plan_is_not(
    service: Any, words: Any, model: Model, host: Host
) -> None:
    host.runs = True
    order = words.BudgetOrder("tiny-1", device_bytes=10**6)
    assert service.plan(order)["fits"]
    with pytest.raises(words.BusyError):
        service.set_budget(order)
    assert model.asked.device_bytes is None
    waiting = words.BudgetOrder("tiny-1", device_bytes=10**6, when=words.When.IDLE)
    assert service.set_budget(waiting)["applied"] == "next_run"


def test_only_models_of_couriers_have_one(service: Any, words: Any) -> None:
    for give in (service.plan, service.set_budget):
        with pytest.raises(words.UnknownModelError, match="Courier loader"):
            give(words.BudgetOrder("core-vae-1"))


def test_what_cannot_be_loaded_is_put_back(service: Any, words: Any, model: Model) -> None:
    model.engine.load(model.asked)
    model.fails = [RuntimeError("the device is full")]
    order = words.BudgetOrder("tiny-1", device_bytes=10**6)
    with pytest.raises(words.OrderFailedError, match=r"full.*its budget of before") as caught:
        service.set_budget(order)
    assert (model.asked.device_bytes, caught.value.receipt["state"]) == (None, "loaded")
    model.fails = [RuntimeError("the device is full"), RuntimeError("still")]
    with pytest.raises(words.OrderFailedError, match=r"not loaded now \(still\)"):
        service.set_budget(order)
    assert model.asked.device_bytes is None
