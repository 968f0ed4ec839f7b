"""Another budget for a model: what it would bring, and setting it. JSON-ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from ...offload_core.plan import LayerPlan, Plan
from ...offload_core.run import BASE_NAME
from ...offload_core.values import (
    Budget,
    BudgetError,
    DeviceBudgetError,
    EngineSnapshot,
    LayerRecord,
    LayerState,
    Placement,
    size_text,
)
from ..models.status_json import bytes_by_placement, counts_by_placement, layer_json
from .pending import OrderList
from .records import (
    KEEP,
    BudgetOrder,
    BudgetTooSmallError,
    OrderFailedError,
    UnknownModelError,
    When,
)

NOW, NEXT_RUN = "now", "next_run"


class Budgeted(Protocol):
    """One model of Courier's, as budgets see it. Threads: as each method says."""

    name: str

    @property
    def asked(self) -> Budget:
        """What the user asked for. Any thread."""

    @property
    def is_loaded(self) -> bool:
        """Whether another budget can be applied at once. Any thread."""

    def snapshot(self) -> EngineSnapshot:
        """The model now. Any thread."""

    def plan(self, budget: Budget) -> Plan:
        """What that budget would bring. Any thread. Raises: BudgetError."""

    def ask(self, budget: Budget) -> Callable[[], None]:
        """The user asks for that from now on. While nothing runs. Returns: what takes it back."""

    def apply(self) -> None:
        """Load anew with what was asked. While nothing runs; raises what a load raises, without
        paths, and then nothing is loaded."""


class BudgetHost(Protocol):
    """What budgets need to know of ComfyUI. Threads: any."""

    def budgeted(self, model_id: str) -> Budgeted | None:
        """Courier's model of that id; None if there is none."""

    def nothing_runs(self, wait: bool, check: Callable[[], None]) -> AbstractContextManager[None]:
        """See ``sleep.Host``."""


class BudgetService:
    """Answers ``BudgetControl``. Threads: any."""

    def __init__(self, host: BudgetHost, under_way: OrderList) -> None:
        self._host = host
        self._under_way = under_way

    def plan(self, order: BudgetOrder) -> dict[str, Any]:
        """See BudgetControl."""
        model = self._found(order)
        wanted = _wanted(model, order)
        try:
            plan = model.plan(wanted)
        except BudgetError as error:
            return _misfit_json(order.model, model, wanted, error)
        return _plan_json(order.model, model, wanted, plan)

    def set_budget(self, order: BudgetOrder) -> dict[str, Any]:
        """See BudgetControl."""
        with (
            self._under_way.entered("budget") as entry,
            self._host.nothing_runs(order.when is When.IDLE, entry.check),
        ):
            entry.waits = False
            model = self._found(order)
            wanted = _wanted(model, order)
            try:
                plan = model.plan(wanted)
            except BudgetError as error:
                raise BudgetTooSmallError(f"{error}. Nothing was changed") from error
            answer = _plan_json(order.model, model, wanted, plan)
            applied = NOW if model.is_loaded else NEXT_RUN
            _give(model, wanted, applied == NOW)
        when = "at once" if applied == NOW else "when the model is loaded or woken next"
        return {**answer, "applied": applied, "message": f"{answer['message']}, {when}"}

    def _found(self, order: BudgetOrder) -> Budgeted:
        model = self._host.budgeted(order.model)
        if model is None:
            raise UnknownModelError(
                "no model that a Courier loader made has this id, and others have no budget; "
                "GET /courier/v1/status lists them"
            )
        return model


def _wanted(model: Budgeted, order: BudgetOrder) -> Budget:
    wanted = model.asked
    if order.device_bytes is not KEEP:
        wanted = replace(wanted, device_bytes=order.device_bytes)
    if order.host_bytes is not KEEP:
        wanted = replace(wanted, host_bytes=order.host_bytes)
    return wanted


def _give(model: Budgeted, wanted: Budget, at_once: bool) -> None:
    """All or nothing. Raises: OrderFailedError."""
    take_back = model.ask(wanted)
    if not at_once:
        return
    try:
        model.apply()
    except Exception as error:
        take_back()
        text = f"the model could not be loaded under this budget: {error}. "
        try:
            model.apply()
            text += "It has its budget of before."
        except Exception as problem:
            text += f"It is not loaded now ({problem}); its next run loads it, as before."
        state = model.snapshot().state.value
        raise OrderFailedError(text, {"message": text, "state": state}) from error


def _misfit_json(
    model_id: str, model: Budgeted, wanted: Budget, error: BudgetError
) -> dict[str, Any]:
    smallest = getattr(error, "smallest_bytes", None)
    is_device = isinstance(error, DeviceBudgetError)
    return {
        "model": model_id,
        "fits": False,
        "message": str(error),
        "asked": _figures(wanted),
        "smallest": {
            "device_bytes": smallest if is_device else None,
            "host_bytes": None if is_device else smallest,
        },
        "planned": None,
        "counts": None,
        "bytes": None,
        "changes": 0,
        "layers": [],
    }


def _plan_json(model_id: str, model: Budgeted, wanted: Budget, plan: Plan) -> dict[str, Any]:
    now = [layer for layer in model.snapshot().layers if layer.name != BASE_NAME]
    base = [layer for layer in model.snapshot().layers if layer.name == BASE_NAME]
    planned = [_planned(*pair) for pair in zip(now, plan.layers, strict=True)]
    layers = planned + [_planned_base(layer) for layer in base]
    return {
        "model": model_id,
        "fits": True,
        "message": _plan_text(planned, plan),
        "asked": _figures(wanted),
        "smallest": {"device_bytes": _smallest_device_bytes(model, wanted), "host_bytes": None},
        "planned": {
            "device_bytes": plan.device_bytes,
            "activation_bytes": plan.activation_bytes,
            "host_locked_bytes": plan.lock_bytes,
            "host_copied_bytes": plan.copied_bytes,
            "host_staging_bytes": plan.staging_bytes,
        },
        "counts": counts_by_placement(layers),
        "bytes": bytes_by_placement(layers),
        "changes": sum(_differ(*pair) for pair in zip(now, planned, strict=True)),
        "layers": [
            {key: value for key, value in layer_json(layer).items() if key != "state"}
            for layer in layers
        ],
    }


def _figures(budget: Budget) -> dict[str, int | None]:
    return {"device_bytes": budget.device_bytes, "host_bytes": budget.host_bytes}


def _smallest_device_bytes(model: Budgeted, wanted: Budget) -> int | None:
    """None where even nothing is enough."""
    try:
        model.plan(replace(wanted, device_bytes=0))
    except DeviceBudgetError as error:
        return error.smallest_bytes
    except BudgetError:
        return None
    return None


def _planned(now: LayerRecord, plan: LayerPlan) -> LayerRecord:
    """A layer as the status shows it once it has run under that plan."""
    resident = now.size_bytes if plan.streamed.is_empty else plan.resident_weight_bytes
    return replace(
        now,
        resident_bytes=resident,
        locked_bytes=plan.lock_bytes or 0,
        placement=plan.placement,
        in_place=plan.placement is Placement.PINNED and bool(plan.lock_bytes),
        reason=plan.reason,
        state=LayerState.ABSENT,
    )


def _planned_base(now: LayerRecord) -> LayerRecord:
    reason = "belongs to no single layer, so it never streams"
    return replace(now, resident_bytes=now.size_bytes, placement=Placement.RESIDENT, reason=reason)


def _differ(now: LayerRecord, planned: LayerRecord) -> bool:
    return (now.placement, now.resident_bytes) != (planned.placement, planned.resident_bytes)


def _plan_text(layers: Sequence[LayerRecord], plan: Plan) -> str:
    whole = sum(layer.placement is Placement.RESIDENT for layer in layers)
    streams = sum(layer.size_bytes - layer.resident_bytes for layer in layers)
    return (
        f"{size_text(plan.device_bytes)} of weights and buffers on the card, {whole} of "
        f"{len(layers)} layers stay there whole, {size_text(streams)} stream in each pass"
    )
