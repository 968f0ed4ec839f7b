"""Which layers stay on the device, which stream, and how each is hosted. Arithmetic only.

The order of claims on the device budget: activations, then what cannot stream (weights outside
the block lists), then slots, then as many resident layers as fit. On the host budget: copies that
exist anyway, then staging if anything streams unlocked, then page locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..values.errors import DeviceBudgetError, HostBudgetError
from ..values.states import Placement
from ..values.units import gib_text, size_text


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs wherever it may rest, in bytes."""

    name: str
    device_bytes: int
    lockable_bytes: int
    """Whole pages of the checkpoint mapping that are this layer's alone; 0 if none."""
    copied_bytes: int
    """Ordinary host memory that holds weights with no usable file bytes."""
    mapped_bytes: int


@dataclass(frozen=True)
class PlanRequest:
    """Everything the planner looks at. A budget of None has no limit."""

    layers: tuple[LayerCost, ...]
    base_device_bytes: int
    base_copied_bytes: int
    device_budget_bytes: int | None
    host_budget_bytes: int | None
    activation_bytes: int
    slots: int
    staging_bytes: int
    """Page-locked staging that the backend needs once anything streams unlocked."""
    lock_refusal: str | None
    """Why no page can be locked here, or None."""


@dataclass(frozen=True)
class LayerPlan:
    """Where one layer will rest and why."""

    placement: Placement
    reason: str


@dataclass(frozen=True)
class Plan:
    """A whole plan. ``device_bytes`` leaves activations out; they are in ``activation_bytes``."""

    layers: tuple[LayerPlan, ...]
    slots: int
    slot_bytes: int
    device_bytes: int
    activation_bytes: int
    lock_bytes: int
    copied_bytes: int
    staging_bytes: int

    @property
    def resident(self) -> tuple[int, ...]:
        """Indices of the layers that stay on the device."""
        return tuple(
            index
            for index, layer in enumerate(self.layers)
            if layer.placement is Placement.RESIDENT
        )


def make_plan(request: PlanRequest) -> Plan:
    """The plan that fills the device budget and then the host budget.

    Raises: DeviceBudgetError naming the smallest device budget that works; HostBudgetError if
    weights that had to be copied already exceed the host budget.
    """
    sizes = [layer.device_bytes for layer in request.layers]
    resident, slots = _choose_resident(request, sizes)
    streamed = [index for index in range(len(sizes)) if index not in resident]
    copied = request.base_copied_bytes + sum(layer.copied_bytes for layer in request.layers)
    locked, staging = _choose_locked(request, streamed, copied)
    layers = tuple(
        _layer_plan(request, index, index in resident, index in locked)
        for index in range(len(sizes))
    )
    slot_bytes = max((sizes[index] for index in streamed), default=0)
    return Plan(
        layers=layers,
        slots=slots,
        slot_bytes=slot_bytes,
        device_bytes=request.base_device_bytes
        + sum(sizes[index] for index in resident)
        + slots * slot_bytes,
        activation_bytes=request.activation_bytes,
        lock_bytes=sum(request.layers[index].lockable_bytes for index in locked),
        copied_bytes=copied,
        staging_bytes=staging,
    )


def smallest_device_bytes(request: PlanRequest) -> int:
    """The smallest device budget that runs this model: one slot, nothing else resident."""
    largest = max((layer.device_bytes for layer in request.layers), default=0)
    return request.base_device_bytes + request.activation_bytes + largest


def spread(count: int, total: int) -> frozenset[int]:
    """``count`` of ``total`` positions, as evenly spaced as whole numbers allow."""
    return frozenset(
        index for index in range(total) if (index + 1) * count // total > index * count // total
    )


def _choose_resident(request: PlanRequest, sizes: Sequence[int]) -> tuple[frozenset[int], int]:
    everything = frozenset(range(len(sizes)))
    if request.device_budget_bytes is None:
        return everything, 0
    room = request.device_budget_bytes - request.activation_bytes - request.base_device_bytes
    if sum(sizes) <= room:
        return everything, 0
    for slots in range(request.slots, 0, -1):
        if _need(sizes, frozenset(), slots) <= room:
            return _fill(sizes, slots, room), min(slots, len(sizes))
    smallest = smallest_device_bytes(request)
    largest = max(request.layers, key=lambda layer: layer.device_bytes, default=None)
    slot = f", one slot for {largest.name} {size_text(largest.device_bytes)}" if largest else ""
    raise DeviceBudgetError(
        f"a device budget of {size_text(request.device_budget_bytes)} is too small: weights "
        f"outside the blocks take {size_text(request.base_device_bytes)}, activations "
        f"{size_text(request.activation_bytes)}{slot}; the smallest that works is "
        f"{size_text(smallest)} ({smallest} bytes), which is {gib_text(smallest)} GiB rounded up",
        smallest,
    )


def _need(sizes: Sequence[int], resident: frozenset[int], slots: int) -> int:
    streamed = [size for index, size in enumerate(sizes) if index not in resident]
    kept = sum(sizes[index] for index in resident)
    return kept + min(slots, len(streamed)) * max(streamed, default=0)


def _fill(sizes: Sequence[int], slots: int, room: int) -> frozenset[int]:
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high + 1) // 2
        if _need(sizes, spread(middle, len(sizes)), slots) <= room:
            low = middle
        else:
            high = middle - 1
    resident = spread(low, len(sizes))
    # Layers of unequal size leave a rest that a smaller layer may still use.
    for index in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
        if index not in resident and _need(sizes, resident | {index}, slots) <= room:
            resident |= {index}
    return resident


def _choose_locked(
    request: PlanRequest, streamed: Sequence[int], copied: int
) -> tuple[frozenset[int], int]:
    budget = request.host_budget_bytes
    if budget is not None and 0 < budget < copied:
        raise HostBudgetError(
            f"a host budget of {size_text(budget)} is too small: {size_text(copied)} of weights "
            "had to be copied because their file bytes cannot be used as they are; raise the host "
            f"budget to {size_text(copied)} ({copied} bytes) or load an aligned "
            "safetensors file in its own dtype, which needs no copy",
            copied,
        )
    lockable = [
        index
        for index in streamed
        if request.layers[index].lockable_bytes and request.lock_refusal is None
    ]
    unlocked_anyway = len(lockable) < len(streamed)
    if budget is None:
        return frozenset(lockable), request.staging_bytes if unlocked_anyway else 0
    cost = [request.layers[index].lockable_bytes for index in lockable]
    room = budget - copied
    if not unlocked_anyway and sum(cost) <= room:
        return frozenset(lockable), 0
    # A budget that does not even hold the staging chunks goes without: slower, never over.
    staging = request.staging_bytes if request.staging_bytes <= room else 0
    room -= staging
    count = len(lockable)
    while count and sum(cost[i] for i in spread(count, len(cost))) > room:
        count -= 1
    chosen = frozenset(lockable[i] for i in spread(count, len(lockable))) if count else frozenset()
    return chosen, staging if len(chosen) < len(streamed) else 0


def _layer_plan(request: PlanRequest, index: int, resident: bool, locked: bool) -> LayerPlan:
    layer = request.layers[index]
    if resident:
        return LayerPlan(Placement.RESIDENT, "fits the device budget")
    if locked:
        return LayerPlan(Placement.PINNED, "streams from its file pages, locked in place")
    if layer.copied_bytes > layer.mapped_bytes:
        return LayerPlan(Placement.PAGEABLE, "its weights have no usable bytes in the file")
    if request.lock_refusal is not None:
        return LayerPlan(Placement.MAPPED, f"pages cannot be locked: {request.lock_refusal}")
    if not layer.lockable_bytes:
        return LayerPlan(Placement.MAPPED, "smaller than one whole page, so nothing to lock")
    if request.host_budget_bytes == 0:
        return LayerPlan(Placement.MAPPED, "the host budget is 0; streams from the file")
    return LayerPlan(Placement.MAPPED, "the host budget is used up; streams from the file")
