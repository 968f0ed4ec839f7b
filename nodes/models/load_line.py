"""What the log says of a load: one line, in words. Pure."""

from __future__ import annotations

from collections import Counter

from ...offload_core.values import EngineSnapshot, LayerRecord, Placement, size_text
from .status_json import bytes_by_placement, printable

_STREAMING = (Placement.PINNED, Placement.MAPPED, Placement.PAGEABLE)


def load_line(name: str, snapshot: EngineSnapshot, activation_bytes: int, patched: int) -> str:
    """How much is where, and why not more of it on the device, or locked.

    Args:
        activation_bytes: what the plan leaves for the run itself; 0 where nobody knows.
        patched: weights that a LoRA or its kin changes at use.
    """
    sums = bytes_by_placement(snapshot.layers)
    resident = size_text(sums[Placement.RESIDENT.value])
    after = f"; {patched} weights are patched at use" if patched else ""
    if not any(sums[place.value] for place in _STREAMING):
        return f"{printable(name)}: {resident} resident, nothing streams{after}"
    streams = ", ".join(f"{size_text(sums[place.value])} {place.value}" for place in _STREAMING)
    slots = size_text(snapshot.memory.slot_bytes)
    return (
        f"{printable(name)}: {resident} resident, with {slots} of slots for {streams} that stream; "
        f"{_why_not_resident(snapshot, activation_bytes)}{_why_not_pinned(snapshot.layers)}{after}"
    )


def _why_not_resident(snapshot: EngineSnapshot, activation_bytes: int) -> str:
    budget = snapshot.budget.device_bytes
    kept = f", {size_text(activation_bytes)} of it for the run itself" if activation_bytes else ""
    if budget is None:
        return f"the device has room for no more{kept}"
    return f"the device budget is {size_text(budget)}{kept}"


def _why_not_pinned(layers: tuple[LayerRecord, ...]) -> str:
    """The reason that holds for most bytes of what streams and is not locked as it could be."""
    reasons: Counter[str] = Counter()
    for layer in layers:
        if layer.placement in (Placement.MAPPED, Placement.PAGEABLE):
            reasons[_brief(layer.reason)] += layer.size_bytes - layer.resident_bytes
    return f"; not all is pinned: {reasons.most_common(1)[0][0]}" if reasons else ""


def _brief(reason: str) -> str:
    """Without what holds for the one layer only."""
    return reason.partition(": of what streams")[0].partition(";")[0]
