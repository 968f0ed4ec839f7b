"""From an inventory to a plan request: what each layer costs on this backend."""

from __future__ import annotations

from dataclasses import replace

from ..device import DeviceBackend
from ..host import PAGE_BYTES
from ..plan import LayerCost, Plan, PlanRequest, smallest_device_bytes
from ..values import Budget
from .weights import Inventory, WeightGroup


def plan_request(
    inventory: Inventory,
    backend: DeviceBackend,
    slots: int,
    lock_refusal: str | None,
    budget: Budget,
    activation_bytes: int,
) -> PlanRequest:
    """Everything the planner has to know, in bytes."""
    base = inventory.base
    return PlanRequest(
        layers=tuple(_cost(group) for group in inventory.layers),
        base_device_bytes=base.layout.size_bytes + base.solid_bytes + inventory.buffer_bytes,
        base_copied_bytes=base.copied_bytes,
        device_budget_bytes=budget.device_bytes,
        host_budget_bytes=budget.host_bytes,
        activation_bytes=activation_bytes,
        slots=slots,
        staging_bytes=backend.staging_bytes,
        lock_refusal=lock_refusal,
        staging_unit_bytes=backend.staging_unit_bytes,
        page_bytes=PAGE_BYTES,
        footprint=backend.footprint,
    )


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
