"""The CPU as a device: its memory is ordinary anonymous RAM, its copies are done on return.

Nothing is pretended: resident layers really occupy anonymous memory, pinned ones are really
``mlock``-ed, so that placement can be checked on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from ..host import FileMapping, MlockBackend, PageLockBackend, system_memory
from ..plan import ALIGNMENT, Footprint
from ..values import DeviceMemoryError, size_text
from .backend import CopyPiece, DeviceEvent, DeviceMemory, Recode, shipped
from .low_rank import LowRank, add_low_rank


@dataclass(frozen=True)
class _Passed:
    """Copies are synchronous, so every event has passed by the time it exists."""


_PASSED = _Passed()


class CpuBackend:
    """Synchronous backend for CPU-only machines.

    ``limit_bytes`` bounds what may be allocated at once, for tests; None is the machine.
    Threads: see DeviceBackend.
    """

    name = "cpu"
    staging_bytes = 0
    staging_unit_bytes = 1
    footprint = Footprint()

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.limit_bytes = limit_bytes
        self._locker = MlockBackend()
        self.lock_refusal: str | None = None

    def probe_locks(self, mapping: FileMapping) -> str | None:
        """Nothing to try."""
        return self.lock_refusal

    def enter_thread(self) -> None:
        """Nothing to do: there is one CPU."""

    def page_locker(self) -> PageLockBackend:
        """``mlock``."""
        return self._locker

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Anonymous memory, cut to an aligned start."""
        if self.limit_bytes is not None and size_bytes > self.limit_bytes:
            raise DeviceMemoryError(
                f"{size_text(size_bytes)} asked of a device limited to "
                f"{size_text(self.limit_bytes)}",
                size_bytes,
            )
        try:
            raw = torch.empty(size_bytes + ALIGNMENT, dtype=torch.uint8)
        except RuntimeError as error:  # torch has no type of its own for a failed CPU allocation
            raise DeviceMemoryError(
                f"the system has no {size_text(size_bytes)} of memory left; lower the device "
                "budget",
                size_bytes,
            ) from error
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + size_bytes]

    def reserve_staging(self, size_bytes: int) -> None:
        """A CPU copies straight from the page cache."""

    def ship(self, pieces: Sequence[CopyPiece], after: DeviceEvent | None) -> Future[DeviceEvent]:
        """Copy now."""
        for piece in pieces:
            piece.destination.copy_(piece.source)
        return shipped(_PASSED)

    def wait(self, event: DeviceEvent) -> None:
        """Nothing is ever pending."""

    def recode(self, recodes: Sequence[Recode]) -> None:
        """Now."""
        for recode in recodes:
            recode.perform()

    def add_low_rank(self, updates: Sequence[LowRank]) -> None:
        """Now."""
        add_low_rank(updates)

    def mark(self) -> DeviceEvent:
        """Work is done when its call returns."""
        return _PASSED

    def settle(self, event: DeviceEvent) -> None:
        """Nothing is ever pending."""

    def memory(self) -> DeviceMemory:
        """The machine's memory: on a CPU, device and host are the same bytes."""
        memory = system_memory()
        return DeviceMemory(memory.total_bytes, memory.available_bytes)

    def trim(self) -> None:
        """No cache that we could name."""

    def start_activation_peak(self) -> None:
        """Not measurable."""

    def activation_peak_bytes(self) -> int | None:
        """None: activations share the process heap with everything else."""
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """These raise a plain RuntimeError, which says nothing for certain."""
        return False

    def close(self) -> None:
        """Nothing is held."""
