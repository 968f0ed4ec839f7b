"""What one engine holds on the device and locks on the host, and how it gets from plan to plan."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ..plan import Plan
from ..values import Placement
from .parts import NO_LIMIT_BYTES, EngineParts
from .residency import Resident, move_buffers
from .source import LayerSource
from .weights import WeightGroup


class Occupancy:
    """Base weights, resident layers, slots and page locks of one engine.

    ``settle_into`` may fail half-way; whoever calls it then calls ``release``, which leaves the
    device and the locks empty from any state.

    Threads: the compute thread. The byte counts may be read by any.
    """

    def __init__(self, root: nn.Module, parts: EngineParts) -> None:
        self._root = weakref.ref(root)
        self._parts = parts
        self._base: Resident | None = None
        self._residents: dict[int, Resident] = {}
        self.resident: frozenset[int] = frozenset()
        self.resident_bytes = 0
        self.peak_bytes = 0

    @property
    def device_bytes(self) -> int:
        """Resident weights, buffers and slots."""
        return self.resident_bytes + self._parts.stream.slot_bytes

    def settle_into(self, plan: Plan, host_limit_bytes: int | None) -> None:
        """Bring device and locks to ``plan``; what is there already stays. Raises: CourierError."""
        parts = self._parts
        parts.stream.close()
        # Give back before taking: the old plan and the new one need not fit side by side.
        for index in sorted(self.resident - set(plan.resident)):
            self._residents.pop(index).offload()
        self._publish()
        for index, layer in enumerate(plan.layers):
            parts.sources[index].wants_lock = layer.placement is Placement.PINNED
            parts.sources[index].lock_refusal = None  # another load may meet a kinder system
            if layer.placement is not Placement.PINNED:
                parts.sources[index].release_locks()
        # Copies exist and staging is about to: what is left of the budget may be locked.
        fixed = plan.copied_bytes + plan.staging_bytes
        parts.ledger.limit_bytes = (
            NO_LIMIT_BYTES if host_limit_bytes is None else max(0, host_limit_bytes - fixed)
        )
        parts.backend.reserve_staging(plan.staging_bytes)
        self._move_buffers(parts.backend.device)
        if self._base is None:
            self._base = self._onload(parts.inventory.base, parts.base_source)
        slots = [parts.backend.allocate(plan.slot_bytes) for _ in range(plan.slots)]
        for index in sorted(set(plan.resident) - self.resident):
            self._residents[index] = self._onload(
                parts.inventory.layers[index], parts.sources[index]
            )
        self._publish()
        parts.stream.open([i for i in range(len(plan.layers)) if i not in self.resident], slots)
        self.peak_bytes = max(self.peak_bytes, self.device_bytes)

    def release(self) -> None:
        """Leave the device, the page locks and the staging."""
        parts = self._parts
        parts.stream.close()
        while self._residents:
            self._residents.popitem()[1].offload()
        if self._base is not None:
            self._base.offload()
            self._base = None
        self._publish()
        for source in parts.sources:
            source.wants_lock = False
            source.release_locks()
        parts.backend.reserve_staging(0)
        self._move_buffers(torch.device("cpu"))

    def _onload(self, group: WeightGroup, source: LayerSource) -> Resident:
        resident = Resident(group, source, self._parts.backend)
        try:
            resident.onload()
        except BaseException:
            resident.offload()
            raise
        return resident

    def _move_buffers(self, device: torch.device) -> None:
        root = self._root()
        if root is not None:
            move_buffers(root, device)

    def _publish(self) -> None:
        base = 0
        if self._base is not None:
            base = self._base.size_bytes + self._parts.inventory.buffer_bytes
        self.resident_bytes = base + sum(r.size_bytes for r in self._residents.values())
        self.resident = frozenset(self._residents)
