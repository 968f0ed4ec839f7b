"""The seam between the engine and a device: bytes in, events out.

Two threads meet here. The *compute thread* runs the model: it alone calls ``wait`` and ``mark``.
The *courier* brings bytes: it calls ``ship``. Each method says which of them may call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from ..host import FileMapping, PageLockBackend
from ..plan import Footprint
from .low_rank import LowRank


@dataclass(frozen=True)
class CopyPiece:
    """One contiguous copy, host to device.

    Both tensors are uint8, 1-d, of one length; ``destination`` is on the device, ``source`` on
    the CPU. ``locked`` says that every page of the source is page-locked for this device.
    """

    destination: torch.Tensor
    source: torch.Tensor
    locked: bool

    def __post_init__(self) -> None:
        if self.destination.shape != self.source.shape:
            # copy_ would broadcast one element over a whole buffer without a word.
            raise ValueError(
                f"a piece of shape {tuple(self.source.shape)} cannot fill "
                f"{tuple(self.destination.shape)}"
            )


@dataclass(frozen=True)
class Recode:
    """Numbers that are rounded where they arrive: ``memory`` (uint8, 1-d, on the device) holds
    ``stored`` and is to hold ``used``. Both are floating and of one size an element."""

    memory: torch.Tensor
    stored: torch.dtype
    used: torch.dtype

    def perform(self) -> None:
        """In place: each element is read before it is written, and by whoever writes it."""
        self.memory.view(self.used).copy_(self.memory.view(self.stored))


class DeviceEvent(Protocol):
    """A point in a stream. Opaque to all but the backend that made it."""


@dataclass(frozen=True)
class DeviceMemory:
    """Driver-level figures in bytes; ``used_bytes`` counts everybody on the device."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes in use by every process together."""
        return self.total_bytes - self.free_bytes


@dataclass(frozen=True)
class CudaTraits:
    """Figures of the CUDA backend that hold without a device.

    Attributes:
        staging_bytes: page-locked host memory that all copy lanes together hold at most.
        staging_unit_bytes: what one of them holds.
        footprint: what an allocation of so many bytes takes of the device.
    """

    staging_bytes: int
    staging_unit_bytes: int
    footprint: Footprint


class DeviceBackend(Protocol):
    """What the engine needs of a device."""

    name: str
    device: torch.device
    staging_bytes: int
    """Page-locked host memory that is of use once something is shipped from unlocked pages."""
    staging_unit_bytes: int
    """``reserve_staging`` takes multiples of this; at least 1."""
    footprint: Footprint
    """What an allocation costs the device, beyond its own size."""
    lock_refusal: str | None
    """Why nothing can be page-locked on this system, or None."""

    def enter_thread(self) -> None:
        """Make this device current for the calling thread. Threads: any, once each."""

    def page_locker(self) -> PageLockBackend:
        """What locks pages for this device. Threads: any."""

    def probe_locks(self, mapping: FileMapping) -> str | None:
        """Why this mapping's pages cannot be locked, or None; tried once a file system. Threads:
        compute."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Uninitialised uint8 memory, shape (size_bytes,), aligned to 256 bytes.

        Raises: DeviceMemoryError. Threads: the compute thread.
        """

    def reserve_staging(self, size_bytes: int) -> None:
        """Have exactly this much staging (0 gives it back). Threads: compute, nothing shipping."""

    def ship(self, pieces: Sequence[CopyPiece], after: DeviceEvent | None) -> Future[DeviceEvent]:
        """Issue copies that start once ``after`` has passed.

        Returns: answered once all are issued, maybe by another thread, maybe at once; its event
            passes when all bytes are there. With an error, nothing of it is under way any more.
        Raises: as the future would, if it fails at once.
        Threads: the courier (or compute, when there is no courier).
        """

    def wait(self, event: DeviceEvent) -> None:
        """Work issued from here on starts after ``event``. Threads: compute."""

    def recode(self, recodes: Sequence[Recode]) -> None:
        """Round in place, behind what was waited for and before what is issued from here on.
        Threads: compute."""

    def add_low_rank(self, updates: Sequence[LowRank]) -> None:
        """Add products of thin matrices to weights in place; ordered as ``recode`` is. Equal bit
        for bit to ``low_rank.add_low_rank``. Threads: compute."""

    def mark(self) -> DeviceEvent:
        """An event that passes when all work issued so far is done. Threads: compute."""

    def settle(self, event: DeviceEvent) -> None:
        """Block the host until ``event`` has passed. Threads: any."""

    def memory(self) -> DeviceMemory:
        """Driver-level memory now. Threads: any."""

    def trim(self) -> None:
        """Give memory that only an allocator's cache holds back to the device. Threads: compute."""

    def start_activation_peak(self) -> None:
        """Begin to measure what a run takes. Threads: compute."""

    def activation_peak_bytes(self) -> int | None:
        """Most bytes taken since then beyond what was held then; None if not measurable."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the model failed because the device is full. Threads: any."""

    def close(self) -> None:
        """Give back staging and streams. Threads: any, after the courier has ended."""


def shipped(event: DeviceEvent) -> Future[DeviceEvent]:
    """The answer of a ``ship`` that has issued everything when it returns."""
    future: Future[DeviceEvent] = Future()
    future.set_result(event)
    return future
