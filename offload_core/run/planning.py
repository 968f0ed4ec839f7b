"""From an inventory to a plan request: what each layer costs on this backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..device import DeviceBackend
from ..plan import LayerCost, Plan, PlanRequest, smallest_device_bytes
from ..values import Budget, EngineConfig
from .source import LayerSource
from .weights import Inventory, WeightGroup


def plan_request(
    inventory: Inventory,
    sources: Sequence[LayerSource],
    backend: DeviceBackend,
    config: EngineConfig,
    budget: Budget,
    activation_bytes: int,
) -> PlanRequest:
    """Everything the planner has to know, in bytes."""
    layers = tuple(
        _cost(group, source) for group, source in zip(inventory.layers, sources, strict=True)
    )
    base = inventory.base
    refusal = backend.lock_refusal if config.switches.in_place else "switched off"
    return PlanRequest(
        layers=layers,
        base_device_bytes=base.layout.size_bytes + base.solid_bytes + inventory.buffer_bytes,
        base_copied_bytes=base.copied_bytes,
        device_budget_bytes=budget.device_bytes,
        host_budget_bytes=budget.host_bytes,
        activation_bytes=activation_bytes,
        slots=config.slots,
        staging_bytes=backend.staging_bytes,
        lock_refusal=refusal,
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


def _cost(group: WeightGroup, source: LayerSource) -> LayerCost:
    return LayerCost(
        name=group.name,
        device_bytes=group.layout.size_bytes,
        lockable_bytes=source.lockable_bytes,
        copied_bytes=group.copied_bytes,
        mapped_bytes=group.mapped_bytes,
    )
