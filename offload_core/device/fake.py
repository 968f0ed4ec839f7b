"""A device whose copies complete when told, for tests of order and lifetime.

It lies the way real hardware does. Fresh memory is poison. A copy moves no byte until it is told
to, or until the compute side waits for it as it must; work that waits for nothing reads poison.
Freed memory is poisoned at once. And it keeps the books: a copy into memory that the compute side
may still be reading, or freeing such memory, is recorded in ``violations``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from ..host import FileMapping, MemoryKind, PageLockBackend
from ..plan import Footprint
from ..values import DeviceMemoryError
from .backend import CopyPiece, DeviceEvent, DeviceMemory, Recode, shipped
from .low_rank import LowRank, add_low_rank

POISON = 0xFF
"""As bf16, fp16, fp32 and fp64 a NaN; as an integer, -1 or the largest value."""


@dataclass(eq=False)
class FakeEvent:
    """Passes when its copies were done, or for a mark, when its work is said to be done.

    ``copies`` are those still to be done: an event keeps nobody's memory. ``targets`` are the
    addresses that they go to, and stay.
    """

    number: int
    copies: list[CopyPiece] = field(default_factory=list)
    targets: tuple[int, ...] = ()
    after: FakeEvent | None = None
    passed: bool = False


@dataclass(eq=False)
class _Block:
    """One live allocation and the last compute work that may read it."""

    start: int
    end: int
    in_use: bool = False
    last_reader: FakeEvent | None = None


class FakePageLocker:
    """Locks by bookkeeping; ``refuse_after`` makes it refuse like a system that runs out."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuse_after: int | None = None
        self.peak_bytes = 0

    def lock(self, address: int, size_bytes: int, kind: MemoryKind) -> str | None:
        """Refuses a range that is locked already, as a driver does (error 712)."""
        if self.refuse_after is not None and len(self.locked) >= self.refuse_after:
            return "the fake system has no page locks left"
        if address in self.locked:
            return "the range is locked already"
        self.locked[address] = size_bytes
        self.peak_bytes = max(self.peak_bytes, sum(self.locked.values()))
        return None

    def unlock(self, address: int, size_bytes: int) -> None:
        """Exactly what was locked."""
        assert self.locked.pop(address) == size_bytes, "unlocked a range that was not locked"


class FakeBackend:
    """See the head of this file. ``on_ship`` runs in the shipping thread before anything else: a
    gate to hold the courier at, or an error to raise. ``fail_allocation`` counts allocations down
    to a failure.

    Threads: as DeviceBackend; its own lock guards every field.
    """

    name = "fake"
    staging_bytes = 0
    staging_unit_bytes = 1
    footprint = Footprint()
    lock_refusal: str | None = None

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self.device = torch.device("cpu")
        self.capacity_bytes = capacity_bytes
        self.violations: list[str] = []
        self.on_ship: Callable[[Sequence[CopyPiece]], None] | None = None
        self.fail_allocation: int | None = None
        self.activations_bytes: int | None = None
        self.locker = FakePageLocker()
        self._lock = threading.RLock()
        self._blocks: dict[int, _Block] = {}
        self._pending: list[FakeEvent] = []
        self._count = 0
        self.peak_bytes = 0

    def probe_locks(self, mapping: FileMapping) -> str | None:
        """What a test says."""
        return self.lock_refusal

    def enter_thread(self) -> None:
        """Nothing to make current."""

    def page_locker(self) -> PageLockBackend:
        """The bookkeeping one."""
        return self.locker

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live allocations."""
        return sum(block.end - block.start for block in self._blocks.values())

    @property
    def pending(self) -> int:
        """Copies issued and not yet completed."""
        return len(self._pending)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Poisoned memory; poisoned again when its last reference goes."""
        with self._lock:
            if self.fail_allocation is not None:
                self.fail_allocation -= 1
                if self.fail_allocation < 0:
                    self.fail_allocation = None
                    raise DeviceMemoryError("the fake device was told to fail here", size_bytes)
            if self.allocated_bytes + size_bytes > self.capacity_bytes:
                raise DeviceMemoryError("the fake device is full", size_bytes)
            raw = torch.full((size_bytes + 256,), POISON, dtype=torch.uint8)
            start = -raw.data_ptr() % 256
            block = _Block(raw.data_ptr() + start, raw.data_ptr() + start + size_bytes)
            handle = raw[start : start + size_bytes].untyped_storage()
            self._blocks[block.start] = block
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        memory = torch.empty(0, dtype=torch.uint8).set_(handle, start, (size_bytes,), (1,))
        # The raw tensor is kept by the finaliser, so the poison lands before the memory goes.
        weakref.finalize(memory, self._freed, block, raw)
        return memory

    def reserve_staging(self, size_bytes: int) -> None:
        """None is used."""

    def ship(self, pieces: Sequence[CopyPiece], after: DeviceEvent | None) -> Future[DeviceEvent]:
        """Queue the copies; they are done by ``complete`` or by the compute side's wait."""
        if self.on_ship is not None:
            self.on_ship(pieces)
        assert after is None or isinstance(after, FakeEvent)
        with self._lock:
            event = self._event()
            event.copies = list(pieces)
            event.targets = tuple(piece.destination.data_ptr() for piece in pieces)
            event.after = after
            for address in event.targets:
                self._check_overwrite(address, after)
            self._pending.append(event)
        return shipped(event)

    def complete(self, count: int | None = None) -> int:
        """Let the oldest ``count`` pending copies (all when None) happen; how many did."""
        with self._lock:
            events = self._pending[: len(self._pending) if count is None else count]
            for event in events:
                self._perform(event)
            return len(events)

    def wait(self, event: DeviceEvent) -> None:
        """The compute side waits: the copies happen now, and their memory is being read."""
        assert isinstance(event, FakeEvent)
        with self._lock:
            self._perform(event)
            for address in event.targets:
                block = self._block_of(address)
                if block is not None:
                    block.in_use = True

    def recode(self, recodes: Sequence[Recode]) -> None:
        """Now: it belongs to the compute side, which has waited for the bytes."""
        with self._lock:
            for recode in recodes:
                recode.perform()

    def add_low_rank(self, updates: Sequence[LowRank]) -> None:
        """Now, as ``recode``."""
        with self._lock:
            add_low_rank(updates)

    def mark(self) -> DeviceEvent:
        """Work issued so far; it counts as unfinished until somebody waits for this event."""
        with self._lock:
            event = self._event()
            for block in self._blocks.values():
                if block.in_use:
                    block.in_use = False
                    block.last_reader = event
            return event

    def settle(self, event: DeviceEvent) -> None:
        """The host waits: copies happen, marks pass."""
        assert isinstance(event, FakeEvent)
        with self._lock:
            self._perform(event)
            event.passed = True
            # Marks of one stream pass in order: with this one, all that were made before it.
            if not event.targets:
                for block in self._blocks.values():
                    reader = block.last_reader
                    if reader is not None and reader.number <= event.number:
                        reader.passed = True

    def memory(self) -> DeviceMemory:
        """The fake capacity."""
        return DeviceMemory(self.capacity_bytes, self.capacity_bytes - self.allocated_bytes)

    def trim(self) -> None:
        """Nothing is cached."""

    def start_activation_peak(self) -> None:
        """What was told in ``activations_bytes`` counts from here on."""

    def activation_peak_bytes(self) -> int | None:
        """What a test says that the run takes; None if it says nothing."""
        return self.activations_bytes

    def is_out_of_memory(self, error: BaseException) -> bool:
        """The fake's own error, as if an activation had found no room."""
        return isinstance(error, DeviceMemoryError)

    def close(self) -> None:
        """Nothing is held."""

    def _event(self) -> FakeEvent:
        self._count += 1
        return FakeEvent(self._count)

    def _perform(self, event: FakeEvent) -> None:
        """Copies of one stream happen in order: whatever was issued before comes first."""
        while event in self._pending:
            first = self._pending.pop(0)
            if first.after is not None:
                first.after.passed = True
            for piece in first.copies:
                piece.destination.copy_(piece.source)
            first.copies = []
            first.passed = True

    def _block_of(self, address: int) -> _Block | None:
        for block in self._blocks.values():
            if block.start <= address < block.end:
                return block
        return None

    def _check_overwrite(self, address: int, after: FakeEvent | None) -> None:
        block = self._block_of(address)
        if block is None:
            self.violations.append("a copy into memory that was freed")
            return
        if block.in_use:
            self.violations.append("a copy into memory that is in use")
        reader = block.last_reader
        if reader and not reader.passed and (after is None or after.number < reader.number):
            self.violations.append("a copy that does not wait for the memory's last reader")

    def _freed(self, block: _Block, raw: torch.Tensor) -> None:
        with self._lock:
            del self._blocks[block.start]
            if block.in_use or (block.last_reader and not block.last_reader.passed):
                self.violations.append("memory freed while work that reads it may still run")
            for event in self._pending:
                if any(block.start <= address < block.end for address in event.targets):
                    self.violations.append("memory freed while a copy into it is pending")
            raw.fill_(POISON)
