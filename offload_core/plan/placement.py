"""Which weights stay on the device, which stream, and how those are hosted. Arithmetic only.

The order of claims on the device budget: activations, then what cannot stream (weights outside
the block lists), then slots, then as many bytes of the layers as fit. On the host budget: copies
that exist anyway, then staging if anything streams unlocked, then page locks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ..values.errors import DeviceBudgetError, HostBudgetError
from ..values.states import Placement
from ..values.units import align_down, align_up, gib_text, size_text, whole_pages
from .layout import ALIGNMENT, Extent
from .windows import NOTHING, Footprint, Held, Streaming, Window, stream_least


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs wherever it may rest.

    ``extents`` are its weights' host bytes in the order of their addresses; ``mapped`` says of
    each whether a checkpoint mapping holds it (otherwise it is a copy in ordinary memory).
    """

    name: str
    extents: tuple[Extent, ...]
    mapped: tuple[bool, ...]

    @cached_property
    def device_sizes(self) -> tuple[int, ...]:
        """Device bytes of each weight."""
        return tuple(align_up(extent.size_bytes, ALIGNMENT) for extent in self.extents)

    @property
    def copied_bytes(self) -> int:
        """Ordinary host memory that holds weights with no usable file bytes."""
        return sum(
            extent.size_bytes
            for extent, mapped in zip(self.extents, self.mapped, strict=True)
            if not mapped
        )

    def lockable_bytes(self, window: Window, page_bytes: int, mapped: bool = True) -> int:
        """Whole pages inside the runs of mapped weights of ``window``, or inside each copied one:
        copies may touch, but each is memory of its own."""
        total, start, end = 0, 0, 0
        for index in range(window.first, window.last):
            extent = self.extents[index]
            if self.mapped[index] is not mapped or not extent.size_bytes:
                continue
            if extent.address != end or not mapped:
                total += whole_pages(start, end, page_bytes)[1]
                start = extent.address
            end = extent.address + extent.size_bytes
        return total + whole_pages(start, end, page_bytes)[1]


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
    """Page-locked staging that the backend would like once anything streams unlocked."""
    lock_refusal: str | None
    """Why no page can be locked here, or None."""
    staging_unit_bytes: int = 1
    """Staging is had in multiples of this."""
    page_bytes: int = 4096
    footprint: Footprint = field(default_factory=Footprint)
    held: tuple[Held, ...] | None = None
    """Of each layer, if all that is on the device is to stay as it is."""


@dataclass(frozen=True)
class LayerPlan:
    """Where one layer will rest and why. ``streamed`` is empty exactly for a resident layer.

    ``resident_bytes`` is what the device takes for what stays, ``resident_weight_bytes`` how many
    bytes of the layer's weights those are.
    ``lock_bytes`` of the file pages of what streams are to be locked, from their beginning; None
    if nothing of it is, not even copies, whose locks cost no budget.
    """

    placement: Placement
    reason: str
    streamed: Window
    resident_bytes: int
    lock_bytes: int | None = None
    resident_weight_bytes: int = 0


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
    is_added_to: bool = False
    """What stays of a layer is an allocation for each plan that added to it, not one for all."""

    @property
    def resident(self) -> tuple[int, ...]:
        """Indices of the layers that stay on the device whole."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.streamed.is_empty)

    @property
    def streamed(self) -> tuple[int, ...]:
        """Indices of the layers of which some weights stream."""
        return tuple(i for i, layer in enumerate(self.layers) if not layer.streamed.is_empty)


def make_plan(request: PlanRequest) -> Plan:
    """The plan that fills the device budget and then the host budget.

    Raises: DeviceBudgetError naming the smallest device budget that works; HostBudgetError if
    weights that had to be copied already exceed the host budget.
    """
    streaming = _choose_windows(request)
    copied = request.base_copied_bytes + sum(layer.copied_bytes for layer in request.layers)
    locks, staging = _choose_locks(request, streaming, copied)
    layers = tuple(
        _layer_plan(request, index, window, locks.get(index))
        for index, window in enumerate(streaming.windows)
    )
    return Plan(
        layers=layers,
        slots=streaming.slots,
        slot_bytes=streaming.slot_bytes,
        device_bytes=request.footprint.of(request.base_device_bytes) + streaming.device_bytes,
        activation_bytes=request.activation_bytes,
        lock_bytes=sum(locks.values()),
        copied_bytes=copied,
        staging_bytes=staging,
        is_added_to=request.held is not None,
    )


def smallest_device_bytes(request: PlanRequest) -> int:
    """The smallest device budget that runs this model: one slot, nothing else resident."""
    largest = max((sum(layer.device_sizes) for layer in request.layers), default=0)
    of = request.footprint.of
    return of(request.base_device_bytes) + request.activation_bytes + of(largest)


def _choose_windows(request: PlanRequest) -> Streaming:
    sizes = [layer.device_sizes for layer in request.layers]
    if request.device_budget_bytes is None:
        whole = sum(request.footprint.of(sum(layer)) for layer in sizes)
        return Streaming((NOTHING,) * len(sizes), 0, 0, whole)
    base_bytes = request.footprint.of(request.base_device_bytes)
    room = request.device_budget_bytes - request.activation_bytes - base_bytes
    for slots in range(max(1, min(request.slots, len(sizes))), 0, -1):
        found = stream_least(sizes, slots, room, request.footprint, request.held)
        if found is not None:
            return found
    smallest = smallest_device_bytes(request)
    largest = max(request.layers, key=lambda layer: sum(layer.device_sizes), default=None)
    slot = ""
    if largest:
        slot = f", one slot for {largest.name} {size_text(sum(largest.device_sizes))}"
    raise DeviceBudgetError(
        f"a device budget of {size_text(request.device_budget_bytes)} is too small: weights "
        f"outside the blocks take {size_text(base_bytes)}, activations "
        f"{size_text(request.activation_bytes)}{slot}; the smallest that works is "
        f"{size_text(smallest)} ({smallest} bytes), which is {gib_text(smallest)} GiB rounded up",
        smallest,
    )


def _choose_locks(
    request: PlanRequest, streaming: Streaming, copied: int
) -> tuple[dict[int, int], int]:
    """The bytes of file pages to lock by layer, and the bytes of staging.

    Where the budget does not hold all pages, every layer has the same share of its own locked: then
    the lanes carry the rest of each while its locked part is under way, and nothing waits for the
    lanes in one layer while they have nothing to do in the next.
    """
    budget = request.host_budget_bytes
    if budget is not None and 0 < budget < copied:
        raise HostBudgetError(
            f"a host budget of {size_text(budget)} is too small: {size_text(copied)} of weights "
            "had to be copied because their file bytes cannot be used as they are; raise the host "
            f"budget to {size_text(copied)} ({copied} bytes) or load an aligned "
            "safetensors file in its own dtype, which needs no copy",
            copied,
        )
    streamed = [i for i, window in enumerate(streaming.windows) if not window.is_empty]
    # A budget of 0 locks nothing, not even copies that exist anyway.
    allowed = request.lock_refusal is None and budget != 0
    cost = {
        index: _lock_cost(request, index, streaming.windows[index])
        for index in streamed
        if allowed and _is_lockable(request, request.layers[index], streaming.windows[index])
    }
    total = sum(cost.values())
    room = (1 << 62) if budget is None else max(0, budget - copied)
    if len(cost) == len(streamed) and total <= room:
        return cost, 0
    # A budget that does not even hold one lane of staging goes without: slower, never over.
    staging = align_down(min(request.staging_bytes, room), request.staging_unit_bytes)
    return _shared_out(cost, room - staging, request.page_bytes), staging


def _shared_out(cost: dict[int, int], room: int, page_bytes: int) -> dict[int, int]:
    """The same share of each cost, in whole pages, that fit in ``room`` together."""
    total = sum(cost.values())
    if total <= room:
        return cost
    shares, before, seen = {}, 0, 0
    for index, size in cost.items():
        # By the running sum, so that what rounding takes from one is given to the next.
        seen += size
        now = align_down(seen * room // total, page_bytes)
        shares[index] = now - before
        before = now
    return shares


def _lock_cost(request: PlanRequest, index: int, window: Window) -> int:
    # Locking a copy costs nothing more: its bytes are charged as a copy already.
    return request.layers[index].lockable_bytes(window, request.page_bytes)


def _is_lockable(request: PlanRequest, layer: LayerCost, window: Window) -> bool:
    return bool(
        layer.lockable_bytes(window, request.page_bytes)
        or layer.lockable_bytes(window, request.page_bytes, mapped=False)
    )


def _layer_plan(
    request: PlanRequest, index: int, window: Window, lock_bytes: int | None
) -> LayerPlan:
    layer = request.layers[index]
    sizes = layer.device_sizes
    resident_bytes = sum(sizes) - sum(sizes[window.first : window.last])
    placement, reason = _hosting(request, layer, window, lock_bytes)
    weight_bytes = sum(
        extent.size_bytes for index, extent in enumerate(layer.extents) if index not in window
    )
    return LayerPlan(placement, reason, window, resident_bytes, lock_bytes, weight_bytes)


def _hosting(
    request: PlanRequest, layer: LayerCost, window: Window, lock_bytes: int | None
) -> tuple[Placement, str]:
    if window.is_empty:
        return Placement.RESIDENT, "fits the device budget"
    indices = range(window.first, window.last)
    size = sum(layer.extents[i].size_bytes for i in indices)
    copied = sum(layer.extents[i].size_bytes for i in indices if not layer.mapped[i])
    lockable = layer.lockable_bytes(window, request.page_bytes)
    from_copies = copied * 2 > size
    if lock_bytes is not None and from_copies:
        return Placement.PINNED, "streams from page-locked copies; its file bytes cannot be used"
    if lock_bytes is not None and lock_bytes == lockable:
        return Placement.PINNED, "streams from its file pages, locked in place"
    if from_copies:
        return Placement.PAGEABLE, "its weights have no usable bytes in the file"
    if lock_bytes:
        return Placement.MAPPED, (
            f"the host budget is used up: of what streams {size_text(lock_bytes)} are locked in "
            f"place, {size_text(size - copied - lock_bytes)} stream from the file"
        )
    if request.lock_refusal is not None:
        return Placement.MAPPED, f"pages cannot be locked: {request.lock_refusal}"
    if not _is_lockable(request, layer, window):
        return Placement.MAPPED, "smaller than one whole page, so nothing to lock"
    if request.host_budget_bytes == 0:
        return Placement.MAPPED, "the host budget is 0; streams from the file"
    return Placement.MAPPED, "the host budget is used up; streams from the file"
