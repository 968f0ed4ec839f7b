"""The host side of one layer: which bytes to copy, and the page locks that make copying fast."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ..device import CopyPiece
from ..host import LockedRange, LockRefused, PageLocker, host_limits
from ..plan import Piece
from ..values import CourierStoppedError, StateError, TransferError
from .weights import PageRun, WeightGroup

_HEADROOM = 2
"""Read ahead only while the host has this many times the bytes free: pages that push others of the
same file out of the cache are read twice."""


class LayerSource:
    """Copies of a layer's host bytes, cut where page locks begin and end.

    Locks are taken when the layer is first shipped, not at load: locking a cold file reads it from
    the disk, and that belongs behind the first step rather than before it.

    Threads: whoever ships the layer, one at a time (the courier while an order is pending, the
    compute thread otherwise; an order's hand-over orders the two).
    """

    def __init__(self, group: WeightGroup, locker: PageLocker) -> None:
        self.name = group.name
        self.file = _file_name(group)
        self.lock_refusal: str | None = None
        self._weights = tuple(weight for weight in group.weights if weight.extent.size_bytes)
        # Not the parameters themselves: ``param.data = other`` would let go of the bytes at the
        # addresses that are read here.
        self._keepalive = tuple(weight.home.detach() for weight in self._weights)
        self._locker = locker
        self._locks: list[tuple[LockedRange, bool]] = []
        self._wanted: list[PageRun] = []
        self._is_due = False

    @property
    def locked_bytes(self) -> int:
        """Bytes of the file locked now."""
        return sum(lock.size_bytes for lock, in_place in self._locks if in_place)

    @property
    def locked_copy_bytes(self) -> int:
        """Bytes of copies in ordinary memory that are locked now."""
        return sum(lock.size_bytes for lock, in_place in self._locks if not in_place)

    def unlocked_bytes(self, part: WeightGroup) -> int:
        """Bytes of ``part`` that no page lock covers now."""
        return sum(
            size
            for piece in part.layout.pieces
            for _, size, _, locked in self._cut(piece)
            if not locked
        )

    def hold(
        self,
        part: WeightGroup | None,
        keep_larger: bool = False,
        file_limit_bytes: int | None = None,
    ) -> None:
        """Have the pages of ``part`` locked from its next shipment on; None releases all.

        What is locked already and still wanted stays locked: locking again costs as much as it did.

        Args:
            file_limit_bytes: so many bytes of file pages and no more (whole pages; None: all),
                from the part's beginning; copies always.
            keep_larger: keep also a lock that is wanted in part; the host budget must allow it.
        """
        self.lock_refusal = None  # another load may meet a kinder system
        self._wanted = [] if part is None else list(_limited(part.runs, file_limit_bytes))
        for held in list(self._locks):
            if not any(_is_of_use(held[0], run, keep_larger) for run in self._wanted):
                held[0].release()
                self._locks.remove(held)
        self._is_due = bool(self._wanted)

    def file_bytes_kept(self, part: WeightGroup | None, file_limit_bytes: int | None) -> int:
        """Bytes of the file that are locked in the end if ``hold`` keeps larger locks."""
        wanted = [] if part is None else list(_limited(part.runs, file_limit_bytes))
        kept = [
            lock
            for lock, in_place in self._locks
            if in_place and any(_is_of_use(lock, run, True) for run in wanted)
        ]
        new = sum(size for run in wanted if run.mapping is not None for _, size in _gaps(run, kept))
        return sum(lock.size_bytes for lock in kept) + new

    def release_locks(self) -> None:
        """Unlock everything, and lock nothing more."""
        self.hold(None)

    def copies_into(
        self, memory: torch.Tensor, part: WeightGroup, lock: bool = True
    ) -> list[CopyPiece]:
        """The copies that fill ``memory`` (uint8, 1-d, at least the part's layout).

        Takes the page locks first if they are wanted and due. A refused lock is remembered in
        ``lock_refusal`` and not tried again.

        Args:
            lock: whether this is the shipment that takes the locks.
        Raises: StateError if a weight was given other memory: its old values would come silently.
        """
        self._check_homes()
        self.read_ahead(part)
        if lock and self._is_due:
            self.lock_refusal = self._lock_all()
            self._is_due = False
        return [
            CopyPiece(memory[offset : offset + size], self._bytes(address, size), locked)
            for piece in part.layout.pieces
            for address, size, offset, locked in self._cut(piece)
        ]

    def read_ahead(self, part: WeightGroup) -> None:
        """Have the system read what is not in its cache, in the order of the file.

        Otherwise it would be read a few pages at a time as they are touched. Threads: any.
        """
        held = [lock for lock, _ in self._locks]
        for run in part.runs:
            mapping = run.mapping
            if mapping is None or not any(_gaps(run, held)):
                continue  # in memory, and kept there
            offset = run.address - mapping.base_address
            if mapping.is_cached(offset, run.size_bytes):
                continue
            if host_limits().available_bytes > _HEADROOM * run.size_bytes:
                mapping.advise(offset, run.size_bytes)

    def _check_homes(self) -> None:
        for weight in self._weights:
            if weight.home.data_ptr() != weight.extent.address:
                raise StateError(
                    f"weight {weight.name} was given other memory since it was attached (by .data, "
                    ".to() or the like); detach the engine before such a change, then attach again"
                )

    def _lock_all(self) -> str | None:
        held = [lock for lock, _ in self._locks]
        for run in self._wanted:
            for address, size in _gaps(run, held):
                locked = self._locker.lock(address, size, run.owner, f"layer {self.name}", run.kind)
                if isinstance(locked, LockRefused):
                    while self._locks:
                        self._locks[-1][0].release()
                        self._locks.pop()
                    return locked.reason
                self._locks.append((locked, run.mapping is not None))
        return None

    def _cut(self, piece: Piece) -> list[tuple[int, int, int, bool]]:
        """(address, size, offset, locked) of each part of ``piece`` that is locked alike."""
        borders = {piece.address, piece.address + piece.size_bytes}
        for lock, _ in self._locks:
            borders.update((lock.address, lock.address + lock.size_bytes))
        inside = sorted(
            b for b in borders if piece.address <= b <= piece.address + piece.size_bytes
        )
        return [
            (start, end - start, piece.offset + start - piece.address, self._is_locked(start))
            for start, end in itertools.pairwise(inside)
        ]

    def _is_locked(self, address: int) -> bool:
        return any(
            lock.address <= address < lock.address + lock.size_bytes for lock, _ in self._locks
        )

    def _bytes(self, address: int, size: int) -> torch.Tensor:
        # A piece may span several tensors, each a storage of its own, so the view is made from
        # the address. The tensors that own the memory ride along in the buffer object.
        buffer = (ctypes.c_ubyte * size).from_address(address)
        buffer._owners = self._keepalive  # type: ignore[attr-defined]
        return torch.frombuffer(buffer, dtype=torch.uint8)


def transfer_error(source: LayerSource, error: BaseException) -> TransferError:
    """What a run has to say of a layer whose copies failed with ``error``."""
    kind = CourierStoppedError if isinstance(error, CourierStoppedError) else TransferError
    where = f" from {source.file}" if source.file else ""
    return kind(
        f"layer {source.name} could not be brought to the device{where}: "
        f"{type(error).__name__}: {error}"
    )


def _is_of_use(lock: LockedRange, run: PageRun, in_part: bool) -> bool:
    start, end = lock.address, lock.address + lock.size_bytes
    run_end = run.address + run.size_bytes
    if in_part:
        return start < run_end and run.address < end
    return run.address <= start and end <= run_end


def _limited(runs: Sequence[PageRun], file_limit_bytes: int | None) -> Iterator[PageRun]:
    """The runs, those of files only up to so many bytes together."""
    left = file_limit_bytes
    for run in runs:
        if run.mapping is None or left is None:
            yield run
        elif left:
            size = min(left, run.size_bytes)
            left -= size
            yield replace(run, size_bytes=size)


def _gaps(run: PageRun, held: Sequence[LockedRange]) -> Iterator[tuple[int, int]]:
    """(address, size) of what of ``run`` no lock covers yet."""
    start, end = run.address, run.address + run.size_bytes
    for lock in sorted(held, key=lambda lock: lock.address):
        if lock.address >= end or lock.address + lock.size_bytes <= start:
            continue
        if lock.address > start:
            yield start, lock.address - start
        start = max(start, lock.address + lock.size_bytes)
    if start < end:
        yield start, end - start


def _file_name(group: WeightGroup) -> str:
    names: Sequence[str] = sorted(
        {weight.mapping.header.path.name for weight in group.weights if weight.mapping is not None}
    )
    return ", ".join(names)
