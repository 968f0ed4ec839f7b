"""CUDA and ROCm. The one file that names ``torch.cuda``.

Streams: the *compute stream* is whichever is current where the model runs; the *copy stream* of
this backend carries every host-to-device copy and overlaps with it. A slot's memory is allocated
on the compute stream and written on the copy stream; that is safe without ``record_stream``
because the engine keeps the slot alive until both its events have passed.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Sequence

import torch

from ..host import PageLockBackend
from ..values import CHUNK_BYTES, DeviceMemoryError, size_text
from .backend import CopyPiece, DeviceEvent, DeviceMemory

_REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly; the only flag our mappings may be locked with
_REGISTER_DEFAULT = 0  # for our own anonymous memory
_CHUNKS = 2


class _RegisterBackend:
    """``cudaHostRegister`` on our own MAP_SHARED, PROT_READ mappings, and on nothing else.

    A MAP_PRIVATE read-only mapping hangs the process for ever (docs/engine.md, "Page locks"), so
    callers hand in ranges of ``FileMapping`` only, or (with default flags) writable memory of
    their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, size_bytes: int, flags: int = _REGISTER_READ_ONLY) -> str | None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            code = int(runtime.cudaHostRegister(address, size_bytes, flags))
            if code == 0:
                return None
            self._clear_error()
        return f"cudaHostRegister answered {code} for {size_text(size_bytes)}"

    def unlock(self, address: int, size_bytes: int) -> None:
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(runtime.cudaHostUnregister(address)) != 0:
                self._clear_error()

    def _clear_error(self) -> None:
        # A refused call stays latched, and the next unrelated CUDA call would report it. torch
        # checks (and so consumes) the latched error after a kernel launch.
        try:
            torch.zeros(1, device=self._device)
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            torch.zeros(1, device=self._device)


class _Chunk:
    """One page-locked staging chunk, given back to the system whole.

    Not torch's pinned memory: its allocator keeps freed blocks, rounded up to powers of two, for
    the life of the process.
    """

    def __init__(self, locker: _RegisterBackend) -> None:
        self._locker = locker
        self._pages = mmap.mmap(-1, CHUNK_BYTES)
        self.memory = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._address = self.memory.data_ptr()
        refusal = locker.lock(self._address, CHUNK_BYTES, _REGISTER_DEFAULT)
        # A refused chunk still stages, only more slowly: the driver copies it once more.
        self._locked = refusal is None

    def release(self) -> None:
        """Unlock the pages; they go with the last view of ``memory``."""
        if self._locked:
            self._locked = False
            self._locker.unlock(self._address, CHUNK_BYTES)


def _lock_refusal() -> str | None:
    """Why pages of a file are not locked on this system, or None."""
    if sys.platform == "win32":
        return "on Windows, transfers from registered file pages are reported to be corrupted"
    if "microsoft" in platform.release().lower():
        return "under WSL, the system limits page locks to a fraction of a GiB"
    if torch.version.hip is not None:
        return "ROCm has not been tried with read-only file pages"
    return None


class CudaBackend:
    """Streams and events of one CUDA or ROCm device.

    Fields ``_chunks`` and ``_chunk_events`` belong to the courier while it runs.
    Threads: see DeviceBackend.
    """

    name = "cuda"
    staging_bytes = _CHUNKS * CHUNK_BYTES

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        """``limit_bytes`` caps what torch may allocate on the device, for tests."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        if limit_bytes is not None:
            share = min(1.0, limit_bytes / torch.cuda.get_device_properties(index).total_memory)
            torch.cuda.set_per_process_memory_fraction(share, index)
        self.lock_refusal = _lock_refusal()
        self._locker = _RegisterBackend(self.device)
        self._copy_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._chunks: list[_Chunk] = []
        self._chunk_events: list[torch.cuda.Event | None] = []
        self._allocated_at_start = 0

    def enter_thread(self) -> None:
        """A new thread starts on device 0, whatever its parent used."""
        torch.cuda.set_device(self.device)

    def page_locker(self) -> PageLockBackend:
        """``cudaHostRegister``, read-only."""
        return self._locker

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """From torch's caching allocator, on the current stream of this device."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            free = self.memory().free_bytes
            raise DeviceMemoryError(
                f"{self.device} has no {size_text(size_bytes)} left ({size_text(free)} free at the "
                "driver); lower the device budget or free other models",
                size_bytes,
            ) from error

    def reserve_staging(self, size_bytes: int) -> None:
        """Have ``size_bytes // CHUNK_BYTES`` page-locked chunks."""
        count = size_bytes // CHUNK_BYTES
        if count == len(self._chunks):
            return
        self._copy_stream.synchronize()  # their last copies still read them
        while self._chunks:
            self._chunks.pop().release()
        self._chunk_events = [None] * count
        for _ in range(count):
            self._chunks.append(_Chunk(self._locker))

    def ship(self, pieces: Sequence[CopyPiece], after: DeviceEvent | None) -> DeviceEvent:
        """Issue the copies on the copy stream."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copy_stream):
            if after is not None:
                assert isinstance(after, torch.cuda.Event)
                # The slot's last layer may still be executing; only its event makes it ours.
                self._copy_stream.wait_event(after)
            try:
                for piece in pieces:
                    self._ship_piece(piece)
            except BaseException:
                # No event will tell when the pieces already issued are done, and the caller is
                # about to take the memory for free.
                self._copy_stream.synchronize()
                raise
            done.record(self._copy_stream)
        return done

    def wait(self, event: DeviceEvent) -> None:
        """The current stream of this device waits."""
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self.device).wait_event(event)

    def mark(self) -> DeviceEvent:
        """An event on the current stream of this device."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self, event: DeviceEvent) -> None:
        """Wait on the host."""
        assert isinstance(event, torch.cuda.Event)
        event.synchronize()

    def memory(self) -> DeviceMemory:
        """``cudaMemGetInfo``."""
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(total, free)

    def start_activation_peak(self) -> None:
        """torch's own peak counter, taken from here."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self._allocated_at_start = torch.cuda.memory_allocated(self.device)

    def activation_peak_bytes(self) -> int | None:
        """What torch allocated at its peak beyond the start of the run."""
        return max(0, torch.cuda.max_memory_allocated(self.device) - self._allocated_at_start)

    def close(self) -> None:
        """Drop the chunks once their last copies are done."""
        self.reserve_staging(0)

    def _ship_piece(self, piece: CopyPiece) -> None:
        if piece.locked:
            piece.destination.copy_(piece.source, non_blocking=True)
        elif self._chunks:
            self._ship_through_chunks(piece)
        else:
            # No staging in the budget: the driver copies from pageable memory, blocking.
            piece.destination.copy_(piece.source)

    def _ship_through_chunks(self, piece: CopyPiece) -> None:
        size = piece.source.numel()
        for number, start in enumerate(range(0, size, CHUNK_BYTES)):
            length = min(CHUNK_BYTES, size - start)
            slot = number % len(self._chunks)
            event = self._chunk_events[slot]
            if event is not None:
                event.synchronize()  # this chunk's last copy still reads it
            chunk = self._chunks[slot].memory[:length]
            # memmove releases the interpreter and needs no second page-fault pass over the file.
            ctypes.memmove(chunk.data_ptr(), piece.source.data_ptr() + start, length)
            piece.destination[start : start + length].copy_(chunk, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._copy_stream)
            self._chunk_events[slot] = event
