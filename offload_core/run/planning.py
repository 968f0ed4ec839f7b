"""From what an engine is made of to a plan, and what was learned about the device meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..host import PAGE_BYTES
from ..plan import LayerCost, Plan, PlanRequest, make_plan, smallest_device_bytes
from ..values import Budget
from .parts import EngineParts
from .weights import WeightGroup

_FULL_NOTE = (
    "the device was full in the middle of a run; a smaller plan runs until another budget is asked"
)


@dataclass(frozen=True)
class _Cap:
    """How many bytes of weights were to be had under a budget that promised ``asked_bytes`` of the
    device (None: all of it)."""

    weight_bytes: int
    asked_bytes: int | None

    def covers(self, budget: Budget) -> bool:
        """Whether ``budget`` is much like the one that led here: the figures that ComfyUI offers
        change a little from run to run, and a user's other figure is a new try."""
        asked, now = self.asked_bytes, budget.device_bytes
        if asked is None or now is None:
            return asked is now
        return abs(now - asked) <= asked // 8


class Planner:
    """Makes an engine's requests. Remembers where the device had less than a budget promised.

    Threads: the compute thread; ``request`` from any.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._layers = tuple(_cost(group) for group in parts.inventory.layers)
        self._cap: _Cap | None = None
        self._loan_bytes: int | None = None
        """How many bytes of weights there may be while others have what was left to them."""

    def request(self, budget: Budget, activation_bytes: int) -> PlanRequest:
        """Everything the planner has to know, in bytes."""
        base, backend = self._parts.inventory.base, self._parts.backend
        return PlanRequest(
            layers=self._layers,
            base_device_bytes=base.layout.size_bytes
            + base.solid_bytes
            + self._parts.inventory.buffer_bytes
            + self._parts.patches.device_bytes,
            base_copied_bytes=base.copied_bytes,
            device_budget_bytes=self._device_bytes(budget, activation_bytes),
            host_budget_bytes=budget.host_bytes,
            activation_bytes=activation_bytes,
            slots=self._parts.config.slots,
            staging_bytes=backend.staging_bytes,
            lock_refusal=self._parts.lock_refusal,
            staging_unit_bytes=backend.staging_unit_bytes,
            page_bytes=PAGE_BYTES,
            footprint=backend.footprint,
        )

    def notes(self, budget: Budget) -> tuple[str, ...]:
        """What the status has to say about plans for ``budget``."""
        return (_FULL_NOTE,) if self._cap is not None and self._cap.covers(budget) else ()

    def give_way(self, budget: Budget, plan: Plan) -> Plan | None:
        """A smaller plan than one under which a run found the device full; None if there is none.
        Plans for such a budget stay that small: a run like that one would end like that one."""
        smaller = smaller_budget(self.request(budget, plan.activation_bytes), plan)
        if smaller is None or smaller.device_budget_bytes is None:
            return None
        weight_bytes = smaller.device_budget_bytes - smaller.activation_bytes
        self._cap = _Cap(weight_bytes, budget.device_bytes)
        return make_plan(smaller)

    def shrunk(self, budget: Budget, plan: Plan, freed_bytes: int) -> Plan | None:
        """A plan that leaves ``freed_bytes`` more of the device to others, or as many as can be
        left; None if there is none. Until ``forget_loan``, no plan takes more.

        Somebody else's model is loaded in the middle of a run, and soon gone again.
        """
        request = self.request(budget, plan.activation_bytes)
        most = max(
            plan.device_bytes + plan.activation_bytes - freed_bytes, smallest_device_bytes(request)
        )
        if most >= plan.device_bytes + plan.activation_bytes:
            return None
        self._loan_bytes = most - plan.activation_bytes
        return make_plan(replace(request, device_budget_bytes=most))

    def forget_loan(self) -> None:
        """What was left to others may be taken again."""
        self._loan_bytes = None

    def half_way(self, budget: Budget, plan: Plan, before: Plan) -> Plan:
        """Between a plan that fitted and one that did not. Raises: DeviceBudgetError."""
        weight_bytes = (plan.device_bytes + before.device_bytes) // 2
        self._cap = _Cap(weight_bytes, budget.device_bytes)
        return make_plan(self.request(budget, plan.activation_bytes))

    def _device_bytes(self, budget: Budget, activation_bytes: int) -> int | None:
        limits = [budget.device_bytes]
        if self._cap is not None and self._cap.covers(budget):
            limits.append(self._cap.weight_bytes + activation_bytes)
        if self._loan_bytes is not None:
            limits.append(self._loan_bytes + activation_bytes)
        return min((limit for limit in limits if limit is not None), default=None)


def smaller_budget(request: PlanRequest, plan: Plan) -> PlanRequest | None:
    """The same request with three quarters of the plan's device bytes, or None if that cannot run.

    A quarter, because the allocation that failed says nothing about how much there is; one try,
    because each one costs a load.
    """
    target = plan.device_bytes * 3 // 4 + plan.activation_bytes
    smallest = smallest_device_bytes(request)
    if plan.device_bytes + plan.activation_bytes <= smallest:
        return None
    return replace(request, device_budget_bytes=max(target, smallest))


def _cost(group: WeightGroup) -> LayerCost:
    return LayerCost(
        name=group.name,
        extents=tuple(weight.extent for weight in group.weights),
        mapped=tuple(weight.mapping is not None for weight in group.weights),
    )
