"""Snapshots of state: frozen, made in one piece, safe to read from any thread."""

from __future__ import annotations

from dataclasses import dataclass

from .config import Budget
from .states import EngineState, LayerState, Placement


@dataclass(frozen=True)
class LayerRecord:
    """One layer as it is now. ``size_bytes`` is what its weights occupy where they rest.

    ``resident_bytes`` of them are on the device all the time; ``placement`` says how the others
    are held, and is RESIDENT when there are none. ``locked_bytes`` are page-locked on the host:
    all that can be of a PINNED layer, a part of a MAPPED one where the host budget ends.
    """

    name: str
    size_bytes: int
    resident_bytes: int
    locked_bytes: int
    placement: Placement
    in_place: bool
    """The layer's own file pages are locked, as against pages of a copy; only true of PINNED."""
    reason: str
    """Why it is there, for people. Never empty."""
    state: LayerState
    tensors: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class MemoryRecord:
    """What an engine holds, in bytes, all measured by its own ledgers.

    ``activation_peak_bytes`` is None where the backend cannot measure it (a CPU: its activations
    share one heap with everything else).
    """

    resident_bytes: int
    slot_bytes: int
    device_peak_bytes: int
    activation_peak_bytes: int | None
    locked_bytes: int
    """Pages of files, locked in place."""
    copied_bytes: int
    """Weights in ordinary memory; ``locked_copy_bytes`` of them are page-locked."""
    staging_bytes: int
    locked_copy_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """Device bytes held at this moment: resident weights and slots."""
        return self.resident_bytes + self.slot_bytes

    @property
    def host_bytes(self) -> int:
        """Host bytes that the host budget is charged with at this moment."""
        return self.locked_bytes + self.copied_bytes + self.staging_bytes


@dataclass(frozen=True)
class TrafficRecord:
    """What the courier did since the engine was attached."""

    layers_shipped: int = 0
    shipped_bytes: int = 0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    prefetches_discarded: int = 0


@dataclass(frozen=True)
class EngineSnapshot:
    """Everything the status shows about one engine."""

    state: EngineState
    budget: Budget
    layers: tuple[LayerRecord, ...]
    memory: MemoryRecord
    traffic: TrafficRecord
    block_lists: tuple[str, ...]
    streamable_layers: int
    notes: tuple[str, ...]
    """Loud fallbacks and switches, in words; empty when everything is as planned."""
