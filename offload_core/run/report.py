"""Snapshots: what is where, from counters that are written by one thread and read by any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import Plan
from ..values import (
    Budget,
    EngineSnapshot,
    EngineState,
    LayerRecord,
    LayerState,
    MemoryRecord,
    Placement,
    shortened,
    size_text,
)
from .source import LayerSource
from .stream import LayerStream
from .weights import Inventory, WeightGroup

_REASON_CHARACTERS = 300


@dataclass(frozen=True)
class Published:
    """The engine's own part of a snapshot, taken at one moment."""

    state: EngineState
    budget: Budget
    plan: Plan | None
    layer_bytes: tuple[int, ...]
    staging_bytes: int
    resident_bytes: int
    device_peak_bytes: int
    activation_peak_bytes: int | None
    block_lists: tuple[str, ...]
    notes: tuple[str, ...]


def snapshot_of(
    inventory: Inventory,
    sources: Sequence[LayerSource],
    stream: LayerStream,
    published: Published,
) -> EngineSnapshot:
    """One frozen picture; nothing is locked and nothing is waited for."""
    layers = [
        _layer_record(group, sources[index], published, index, stream.states[index])
        for index, group in enumerate(inventory.layers)
    ]
    if inventory.base.weights or inventory.base.solid:
        layers.append(_base_record(inventory.base, published))
    groups = (inventory.base, *inventory.layers)
    copied_bytes = sum(group.copied_bytes for group in groups)
    return EngineSnapshot(
        state=published.state,
        budget=published.budget,
        layers=tuple(layers),
        memory=MemoryRecord(
            resident_bytes=published.resident_bytes,
            slot_bytes=stream.slot_bytes,
            device_peak_bytes=published.device_peak_bytes,
            activation_peak_bytes=published.activation_peak_bytes,
            locked_bytes=sum(source.locked_bytes for source in sources),
            copied_bytes=copied_bytes,
            staging_bytes=published.staging_bytes,
            locked_copy_bytes=sum(source.locked_copy_bytes for source in sources),
        ),
        traffic=stream.traffic,
        block_lists=published.block_lists,
        streamable_layers=len(inventory.layers),
        notes=published.notes + _copies(published.budget, copied_bytes) + _refusals(sources),
    )


def _layer_record(
    group: WeightGroup,
    source: LayerSource,
    published: Published,
    index: int,
    state: LayerState,
) -> LayerRecord:
    at_rest = Placement.PAGEABLE if group.copied_bytes > group.mapped_bytes else Placement.MAPPED
    plan, held = published.plan, published.layer_bytes[index]
    if plan is None:
        return _record_at_rest(group, source, at_rest, published.state, state)
    planned = plan.layers[index]
    if planned.placement is Placement.RESIDENT:
        if held == group.size_bytes:
            return _record(group, Placement.RESIDENT, planned.reason, LayerState.READY, held)
        return _record(group, at_rest, "is being loaded", state, held)
    if planned.lock_bytes is None:
        return _record(group, planned.placement, planned.reason, state, held)
    # Only what is locked is called so; the intention is in the reason.
    locked = source.locked_bytes + source.locked_copy_bytes
    if locked:
        in_place = planned.placement is Placement.PINNED and source.locked_bytes > 0
        return _record(group, planned.placement, planned.reason, state, held, locked, in_place)
    if source.lock_refusal is not None:
        return _record(group, at_rest, f"not locked: {source.lock_refusal}", state, held)
    if planned.lock_bytes or planned.placement is Placement.PINNED:
        return _record(group, at_rest, "its pages are locked when it first runs", state, held)
    return _record(group, planned.placement, planned.reason, state, held)


def _record_at_rest(
    group: WeightGroup,
    source: LayerSource,
    at_rest: Placement,
    engine: EngineState,
    state: LayerState,
) -> LayerRecord:
    """A layer of a model that is not loaded: it may be asleep, with its locks held."""
    locked = source.locked_bytes + source.locked_copy_bytes
    reason = "asleep" if engine is EngineState.ASLEEP else "not loaded"
    if not locked:
        return _record(group, at_rest, reason, state)
    # What was resident is not locked: such a layer is mapped, and locked in part.
    is_whole = locked >= sum(run.size_bytes for run in group.runs)
    placement = Placement.PINNED if is_whole else at_rest
    in_place = is_whole and source.locked_bytes > 0
    pages = "its pages stay locked" if is_whole else "those of its pages that streamed stay locked"
    return _record(group, placement, f"{reason}; {pages}", state, 0, locked, in_place)


def _base_record(base: WeightGroup, published: Published) -> LayerRecord:
    if published.plan is not None:
        sentences = ["belongs to no single layer, so it never streams", *base.notes]
        reason = shortened("; ".join(sentences), _REASON_CHARACTERS)
        size = base.size_bytes
        return _record(base, Placement.RESIDENT, reason, LayerState.READY, size)
    at_rest = Placement.PAGEABLE if base.copied_bytes > base.mapped_bytes else Placement.MAPPED
    reason = "asleep" if published.state is EngineState.ASLEEP else "not loaded"
    return _record(base, at_rest, reason, LayerState.ABSENT)


def _record(
    group: WeightGroup,
    placement: Placement,
    reason: str,
    state: LayerState,
    resident_bytes: int = 0,
    locked_bytes: int = 0,
    in_place: bool = False,
) -> LayerRecord:
    mixed = group.copied_bytes and group.mapped_bytes and placement is not Placement.RESIDENT
    if mixed:
        reason = f"{reason}; {group.copied_bytes} of {group.size_bytes} bytes are copies in memory"
    return LayerRecord(
        name=group.name,
        size_bytes=group.size_bytes,
        resident_bytes=resident_bytes,
        locked_bytes=locked_bytes,
        placement=placement,
        in_place=in_place,
        reason=reason,
        state=state,
        tensors=len(group.weights) + len(group.solid),
        dtypes=group.dtype_names,
    )


def _copies(budget: Budget, copied_bytes: int) -> tuple[str, ...]:
    if budget.host_bytes != 0 or not copied_bytes:
        return ()
    return (
        f"{size_text(copied_bytes)} of weights are copied in host memory although its budget is 0: "
        "their file bytes cannot be used as they are",
    )


def _refusals(sources: Sequence[LayerSource]) -> tuple[str, ...]:
    refused = [source.lock_refusal for source in sources if source.lock_refusal is not None]
    if not refused:
        return ()
    # Said once, with the count: forty layers refuse for one reason.
    return (
        f"{len(refused)} layers stream from the file although their pages were to be locked: "
        f"{refused[0]}",
    )
