"""Accelerators without a streaming backend of their own (MPS, XPU, NPU, ...): right, not fast."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from ..host import FileMapping, MemoryKind, PageLockBackend, system_memory
from ..plan import Footprint
from ..values import DeviceMemoryError, size_text
from .backend import CopyPiece, DeviceEvent, DeviceMemory, Recode, shipped
from .low_rank import LowRank, add_low_rank


class _NoPageLocks:
    """Pinning is a CUDA notion here; elsewhere it is refused, in words."""

    def lock(self, address: int, size_bytes: int, kind: MemoryKind) -> str | None:
        return "this kind of device takes no page-locked memory from us"

    def unlock(self, address: int, size_bytes: int) -> None:
        raise AssertionError("nothing can have been locked")


class SynchronousBackend:
    """Blocking copies on any torch device. Threads: see DeviceBackend."""

    staging_bytes = 0
    staging_unit_bytes = 1
    footprint = Footprint()

    def __init__(self, device: torch.device) -> None:
        self.name = device.type
        self.device = device
        self.lock_refusal: str | None = f"{device.type} devices take no page-locked memory"

    def probe_locks(self, mapping: FileMapping) -> str | None:
        """Nothing to try."""
        return self.lock_refusal

    def enter_thread(self) -> None:
        """The tensors name their device; nothing has to be made current."""

    def page_locker(self) -> PageLockBackend:
        """Refuses."""
        return _NoPageLocks()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Through torch's allocator for the device."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            raise DeviceMemoryError(
                f"{self.device} has no {size_text(size_bytes)} left; lower the device budget",
                size_bytes,
            ) from error

    def reserve_staging(self, size_bytes: int) -> None:
        """None is used."""

    def ship(self, pieces: Sequence[CopyPiece], after: DeviceEvent | None) -> Future[DeviceEvent]:
        """Copy, blocking."""
        for piece in pieces:
            piece.destination.copy_(piece.source)
        return shipped(object())

    def wait(self, event: DeviceEvent) -> None:
        """Copies were done when ``ship`` returned."""

    def recode(self, recodes: Sequence[Recode]) -> None:
        """Now."""
        for recode in recodes:
            recode.perform()

    def add_low_rank(self, updates: Sequence[LowRank]) -> None:
        """Now."""
        add_low_rank(updates)

    def mark(self) -> DeviceEvent:
        """Copies into a slot are ordered behind its readers by the device's one queue."""
        return object()

    def settle(self, event: DeviceEvent) -> None:
        """Nothing is pending."""

    def memory(self) -> DeviceMemory:
        """Unified or unknown: the machine's own figures."""
        memory = system_memory()
        return DeviceMemory(memory.total_bytes, memory.available_bytes)

    def trim(self) -> None:
        """No cache that we could name."""

    def start_activation_peak(self) -> None:
        """Not measurable in one way on all of these."""

    def activation_peak_bytes(self) -> int | None:
        """None."""
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """These raise a plain RuntimeError, which says nothing for certain."""
        return False

    def close(self) -> None:
        """Nothing is held."""
