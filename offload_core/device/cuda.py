"""CUDA and ROCm. The one file that names ``torch.cuda``.

Streams: the *compute stream* is whichever is current where the model runs; the *copy stream*
carries what is read from page-locked memory; each *lane* has a stream of its own for what goes
through its chunks; the *loose stream* carries what the driver stages where there are no lanes, such
as the bytes before the first whole page of a layer and behind its last; the *join stream* carries
nothing and makes one event out of several. All copies overlap with the compute stream. A slot's
memory is allocated on the compute stream and written on others; that is safe without
``record_stream`` because the engine keeps the slot alive until both its events have passed.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import platform
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch

from ..host import PAGE_BYTES, FileMapping, MemoryKind, PageLockBackend
from ..plan import Footprint
from ..values import CHUNK_BYTES, DeviceMemoryError, align_up, size_text
from .backend import CopyPiece, DeviceEvent, DeviceMemory, Recode, shipped
from .driver import DriverError
from .lanes import CopyLanes
from .low_rank import LowRank, add_low_rank
from .low_rank_kernel import LowRankKernels
from .nvrtc import compile_cuda
from .rounding import UNIT_BYTES, Rounder
from .rounding import load as load_rounder

_LOG = logging.getLogger("courier")

_REGISTER_FLAGS = {
    MemoryKind.SHARED_READ_ONLY: 8,  # cudaHostRegisterReadOnly
    MemoryKind.ANONYMOUS: 0,
}
_CHUNKS = 2
"""One is filled while the other is read."""
_MOST_LANES = 7
"""More bring little, and with two chunks of 8 MiB each this is 112 MiB of the host."""
_HUGE_PAGE_BYTES = 2 << 20
_PATIENCE_SECONDS = 60.0
_MOST_BESIDES_BYTES = 512 << 20
_RETRY_BYTES = 256 << 20
_LINK_PROBE_BYTES = 256 << 20
_LINK_PROBE_COPIES = 8

_BF16_TO_FP16 = (torch.bfloat16, torch.float16)

_ROUNDERS: dict[int, Rounder | None] = {}
"""By device index; None where torch's own operator does it. Written by whoever first needs one."""

_LOW_RANK: dict[int, LowRankKernels] = {}
"""By device index: compiled and proved once in a process. Written by the compute thread."""

_PROBED: dict[tuple[int, int], str | None] = {}
"""By device index and file system: why pages of its files are not locked, or None. Written by
whoever loads; two that probe at once find the same."""


class _RegisterBackend:
    """``cudaHostRegister`` on our own MAP_SHARED, PROT_READ mappings and on anonymous memory.

    A MAP_PRIVATE read-only mapping hangs the process for ever (docs/engine.md, "Page locks"), so
    callers ask the kernel what a range is; where it does not tell, nothing is locked.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, size_bytes: int, kind: MemoryKind) -> str | None:
        flags = _REGISTER_FLAGS.get(kind)
        if flags is None:
            return f"its memory is of a kind that the driver may not lock ({kind.value})"
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


class _CudaLane:
    """A stream and two page-locked chunks, given back to the system whole.

    Not torch's pinned memory: its allocator keeps freed blocks, rounded up to powers of two, for
    the life of the process.
    """

    def __init__(self, device: torch.device, locker: _RegisterBackend) -> None:
        self._device = device
        self._locker = locker
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        size = _CHUNKS * (CHUNK_BYTES + PAGE_BYTES)
        self._pages = _own_memory(size + _HUGE_PAGE_BYTES)
        memory = torch.frombuffer(self._pages, dtype=torch.uint8)
        start = align_up(memory.data_ptr(), _HUGE_PAGE_BYTES) - memory.data_ptr()
        self._address, self._size = memory.data_ptr() + start, size
        self._chunks = memory[start : start + size].view(_CHUNKS, -1)
        self._chunks.zero_()
        # A refused chunk still stages, only more slowly: the driver copies it once more.
        self._locked = locker.lock(self._address, size, MemoryKind.ANONYMOUS) is None
        self._events: list[torch.cuda.Event | None] = [None] * _CHUNKS
        self._turn = 0

    def enter_thread(self) -> None:
        """A new thread starts on device 0 and its default stream, whatever its parent used."""
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)

    def begin(self, after: DeviceEvent | None) -> None:
        """The lane's stream waits."""
        if after is not None:
            assert isinstance(after, torch.cuda.Event)
            # The slot's last layer may still be executing; only its event makes it ours.
            self._stream.wait_event(after)

    def carry(self, destination: torch.Tensor, address: int) -> DeviceEvent:
        """Through the chunk whose turn it is, once its last copy has been read."""
        turn = self._turn
        self._turn = (turn + 1) % _CHUNKS
        last = self._events[turn]
        if last is not None:
            last.synchronize()
        # At the same place in a page as the source: memmove is slower between unlike alignments.
        start, size = address % PAGE_BYTES, destination.numel()
        chunk = self._chunks[turn, start : start + size]
        # memmove releases the interpreter and needs no second page-fault pass over the file.
        ctypes.memmove(chunk.data_ptr(), address, size)
        destination.copy_(chunk, non_blocking=True)
        # Blocking: a dozen threads that spin for the link would take the cores of those that copy.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._events[turn] = event
        return event

    def settle(self) -> None:
        """The stream has run dry."""
        self._stream.synchronize()

    def close(self) -> None:
        """Unlock the pages; they go with the last view of the chunks."""
        self._stream.synchronize()  # the last copies still read them
        if self._locked:
            self._locked = False
            self._locker.unlock(self._address, self._size)


def _own_memory(size_bytes: int) -> mmap.mmap:
    """Anonymous memory of this process alone, on huge pages (fewer page walks) where it may be."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, size_bytes)
    # Python's own default is shared: that is a file in memory, not counted as anonymous, and has no
    # huge pages on most systems.
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages refuses the advice, and nothing is lost.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def is_available() -> bool:
    """Whether torch finds a device that this file can drive."""
    return torch.cuda.is_available()


def most_lanes() -> int:
    """The most copy lanes that a device has, whatever the machine's processors."""
    return _MOST_LANES


def link_bytes_per_second() -> float:
    """Page-locked copies to the current device, by events on it. Allocates 256 MiB on each side."""
    source = torch.empty(_LINK_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    target.copy_(source, non_blocking=True)  # what a first copy sets up
    begin.record()
    for _ in range(_LINK_PROBE_COPIES):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    seconds = float(begin.elapsed_time(end)) / 1000
    return _LINK_PROBE_COPIES * _LINK_PROBE_BYTES / seconds


def _lane_count() -> int:
    """One for two cores, up to where more are not worth their memory (docs/engine.md,
    "Staging")."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(_MOST_LANES, cores // 2))


def _lock_refusal() -> str | None:
    """Why pages of a file are not locked on this system, or None."""
    if sys.platform == "win32":
        return "on Windows, transfers from registered file pages are reported to be corrupted"
    if "microsoft" in platform.release().lower():
        return "under WSL, the system limits page locks to a fraction of a GiB"
    if torch.version.hip is not None:
        return "ROCm has not been tried with read-only file pages"
    return None


def _recode_all(recodes: Sequence[Recode]) -> None:
    if recodes:
        torch._foreach_copy_(
            [recode.memory.view(recode.used) for recode in recodes],
            [recode.memory.view(recode.stored) for recode in recodes],
        )


class CudaBackend:
    """Streams and events of one CUDA or ROCm device.

    ``_lanes`` is set and taken away by the compute thread while nothing ships.
    Threads: see DeviceBackend.
    """

    name = "cuda"
    staging_unit_bytes = _CHUNKS * (CHUNK_BYTES + PAGE_BYTES)
    # torch's allocator gives 10 MiB and more a segment of its own, in steps of 2 MiB.
    footprint = Footprint(large_bytes=10 << 20, granularity_bytes=2 << 20)

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        """``limit_bytes`` caps what torch may allocate on the device, for tests."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        # Before the first stream: with it torch makes all that it will ever have, and they take
        # device memory too.
        self._beside_torch_bytes = self._beside_torch()
        if limit_bytes is not None:
            share = min(1.0, limit_bytes / torch.cuda.get_device_properties(index).total_memory)
            torch.cuda.set_per_process_memory_fraction(share, index)
        self.lock_refusal = _lock_refusal()
        self.staging_bytes = _lane_count() * self.staging_unit_bytes
        self._locker = _RegisterBackend(self.device)
        self._copy_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._loose_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._join_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._joining = threading.Lock()
        self._lanes: CopyLanes | None = None
        self._staging_bytes = 0
        self._allocated_at_start = 0
        self._retries_at_start = 0

    def enter_thread(self) -> None:
        """A new thread starts on device 0, whatever its parent used."""
        torch.cuda.set_device(self.device)

    def page_locker(self) -> PageLockBackend:
        """``cudaHostRegister``, read-only for files."""
        return self._locker

    def probe_locks(self, mapping: FileMapping) -> str | None:
        """Lock a page in place, read it through the device, compare; the answer is kept."""
        if self.lock_refusal is not None:
            return self.lock_refusal
        key = (self.device.index, mapping.header.identity.device)
        if key not in _PROBED:
            address, size = mapping.lockable_range(0, mapping.header.identity.size_bytes)
            if not size:
                return None  # too small a file to say anything about its file system
            _PROBED[key] = self._try_page(address, mapping)
        return _PROBED[key]

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
        """Have ``size_bytes // staging_unit_bytes`` lanes."""
        count = size_bytes // self.staging_unit_bytes
        if count * self.staging_unit_bytes == self._staging_bytes:
            return
        if self._lanes is not None:
            self._lanes.close(_PATIENCE_SECONDS)
            self._lanes = None
            self._staging_bytes = 0
        if count:
            lanes = [_CudaLane(self.device, self._locker) for _ in range(count)]
            self._lanes = CopyLanes(lanes, CHUNK_BYTES)
            self._staging_bytes = count * self.staging_unit_bytes

    def ship(self, pieces: Sequence[CopyPiece], after: DeviceEvent | None) -> Future[DeviceEvent]:
        """Locked pieces go straight from their pages, the others through the lanes."""
        lanes = self._lanes
        locked = [piece for piece in pieces if piece.locked]
        loose = [piece for piece in pieces if not piece.locked]
        events: list[DeviceEvent] = []
        try:
            if locked:
                events.append(self._copy(self._copy_stream, locked, after))
            if lanes is not None and loose:
                return lanes.submit(
                    loose, after, lambda carried: self._join([*events, *carried]), self._run_dry
                )
            if loose or not events:
                # The driver stages unlocked bytes itself, and only once its stream has run dry: on
                # the stream of the locked ones the link would have nothing to do meanwhile.
                events.append(self._copy(self._loose_stream, loose, after))
            return shipped(self._join(events))
        except BaseException:
            # Whatever it was, Ctrl-C too: pieces already issued are still under way.
            self._run_dry()
            raise

    def wait(self, event: DeviceEvent) -> None:
        """The current stream of this device waits."""
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self.device).wait_event(event)

    def recode(self, recodes: Sequence[Recode]) -> None:
        """Between what the current stream did and what it will do.

        Not while the model's own kernels run: a wide kernel waits for room between them and costs
        more than it hides (1.56 against 1.05 times the resident step).
        """
        rest: list[Recode] = []
        for recode in recodes:
            done = 0
            if (recode.stored, recode.used) == _BF16_TO_FP16:
                done = self._round(recode.memory)
            if done < recode.memory.numel():
                rest.append(replace(recode, memory=recode.memory[done:]))
        _recode_all(rest)

    def add_low_rank(self, updates: Sequence[LowRank]) -> None:
        """On the current stream, by a kernel where it was seen to come to torch's own bits.

        Not on a stream of its own: the card has no room for it beside the model's kernels, and the
        step took as long (11.0 to 11.5 ms a layer on either, H200, 2026-12-01).
        """
        rest = list(updates)
        kernels = self._low_rank_kernels()
        if kernels is not None and rest:
            stream = torch.cuda.current_stream(self.device).cuda_stream
            with torch.cuda.device(self.device):
                rest = kernels.add(rest, stream)
        add_low_rank(rest)

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

    def trim(self) -> None:
        """Empty torch's cache."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def start_activation_peak(self) -> None:
        """torch's own peak counter of what it has from the driver, taken from here; what counts
        as there before is what is in use, for the rest of its segments is room for the run."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self._allocated_at_start = torch.cuda.memory_allocated(self.device)
        self._retries_at_start = self._retries()

    def activation_peak_bytes(self) -> int | None:
        """What torch had from the driver at its peak beyond what was in use at the start (its cache
        is in it, because nobody else can use that), and what the driver took besides, such as for
        kernels."""
        reserved = torch.cuda.max_memory_reserved(self.device) - self._allocated_at_start
        besides = self._beside_torch() - self._beside_torch_bytes
        if self._retries() > self._retries_at_start:
            # The card was full and torch had to empty its cache in the middle: slow, and the peak
            # is what there was, not what was wanted.
            reserved += _RETRY_BYTES
        # Other processes come and go in the second figure; more than this is not the driver's.
        return max(0, reserved) + min(max(0, besides), _MOST_BESIDES_BYTES)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """torch's own type for it."""
        return isinstance(error, torch.cuda.OutOfMemoryError)

    def close(self) -> None:
        """End the lanes once their last copies are done."""
        self.reserve_staging(0)

    def _round(self, memory: torch.Tensor) -> int:
        """By the kernel, from the beginning; how many bytes are done."""
        rounder, units = self._rounder(), memory.numel() // UNIT_BYTES
        if rounder is None or memory.data_ptr() % UNIT_BYTES:
            return 0
        stream = torch.cuda.current_stream(self.device).cuda_stream
        try:
            with torch.cuda.device(self.device):
                rounder.round(memory.data_ptr(), units, stream)
        except DriverError:
            return 0  # torch says better what is wrong with the device
        return units * UNIT_BYTES

    def _rounder(self) -> Rounder | None:
        """The kernel, once it was seen to round every bfloat16 as torch does."""
        index = self.device.index
        if index not in _ROUNDERS:
            try:
                with torch.cuda.device(self.device):
                    _ROUNDERS[index] = self._tried_rounder()
            except (DriverError, RuntimeError) as error:
                if self.is_out_of_memory(error):
                    return None  # for now; there may be room when it is asked again
                _LOG.info("bfloat16 is rounded by torch on %s: %s", self.device, error)
                _ROUNDERS[index] = None
        return _ROUNDERS[index]

    def _tried_rounder(self) -> Rounder:
        if torch.version.hip is not None:
            raise DriverError("the kernel is for NVIDIA's driver")
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=self.device)
        stored = every.view(torch.bfloat16)
        wanted = stored.to(torch.float16)
        # After the first work on this thread: only then the device's context is current on it.
        rounder = load_rounder()
        stream = torch.cuda.current_stream(self.device).cuda_stream
        rounder.round(stored.data_ptr(), stored.nbytes // UNIT_BYTES, stream)
        if not torch.equal(every, wanted.view(torch.int16)):
            raise DriverError("the kernel does not round as torch does")
        return rounder

    def _low_rank_kernels(self) -> LowRankKernels | None:
        if torch.version.hip is not None or torch.version.cuda is None:
            return None
        index = self.device.index
        if index not in _LOW_RANK:
            major, minor = torch.cuda.get_device_capability(index)
            version, architecture = torch.version.cuda, f"sm_{major}{minor}"
            _LOW_RANK[index] = LowRankKernels(
                lambda source, macros: compile_cuda(source, architecture, macros, version)
            )
        return _LOW_RANK[index]

    def _retries(self) -> int:
        stats = torch.cuda.memory_stats(self.device)
        return int(stats.get("num_alloc_retries", 0))

    def _beside_torch(self) -> int:
        """Device memory in use that torch's allocator did not ask for: the context, kernels and
        other processes."""
        return self.memory().used_bytes - torch.cuda.memory_reserved(self.device)

    def _try_page(self, address: int, mapping: FileMapping) -> str | None:
        refusal = self._locker.lock(address, PAGE_BYTES, mapping.kind)
        if refusal is not None:
            return refusal
        try:
            page = torch.frombuffer(
                (ctypes.c_ubyte * PAGE_BYTES).from_address(address), dtype=torch.uint8
            )
            there = self.allocate(PAGE_BYTES).copy_(page, non_blocking=True)
            if not torch.equal(there.cpu(), page):
                return "a page locked in place arrived on the device with other bytes"
        finally:
            self._locker.unlock(address, PAGE_BYTES)
        return None

    def _copy(
        self, stream: torch.cuda.Stream, pieces: Sequence[CopyPiece], after: DeviceEvent | None
    ) -> DeviceEvent:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            if after is not None:
                assert isinstance(after, torch.cuda.Event)
                # The slot's last layer may still be executing; only its event makes it ours.
                stream.wait_event(after)
            for piece in pieces:
                # From unlocked memory the call returns once the driver has read the bytes.
                piece.destination.copy_(piece.source, non_blocking=True)
            done.record(stream)
        return done

    def _run_dry(self) -> None:
        """After an error: no event tells when the pieces already issued are done, and the caller
        is about to take the memory for free."""
        self._copy_stream.synchronize()
        self._loose_stream.synchronize()

    def _join(self, events: Sequence[DeviceEvent]) -> DeviceEvent:
        if len(events) == 1:
            return events[0]
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Held so that no other thread's events come between these and the one that stands for them.
        with self._joining:
            for event in events:
                assert isinstance(event, torch.cuda.Event)
                self._join_stream.wait_event(event)
            done.record(self._join_stream)
        return done
