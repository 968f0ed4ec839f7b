"""The host side of one layer: which bytes to copy, and the page locks that make copying fast."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import torch

from ..device import CopyPiece
from ..host import FileMapping, LockedRange, LockRefused, PageLocker
from ..plan import Piece
from ..values import StateError
from .weights import WeightGroup


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
        self.wants_lock = False
        self._pieces = group.layout.pieces
        self._weights = tuple(weight for weight in group.weights if weight.extent.size_bytes)
        # Not the parameters themselves: ``param.data = other`` would let go of the bytes at the
        # addresses that are read here.
        self._keepalive = tuple(weight.home.detach() for weight in self._weights)
        self._runs = _mapped_runs(group)
        self._locker = locker
        self._locks: list[LockedRange] = []

    @property
    def lockable_bytes(self) -> int:
        """Whole pages that are this layer's alone."""
        return sum(size for _, _, size in self._runs)

    @property
    def locked_bytes(self) -> int:
        """Bytes locked now."""
        return sum(lock.size_bytes for lock in self._locks)

    def copies_into(self, memory: torch.Tensor) -> list[CopyPiece]:
        """The copies that fill ``memory`` (uint8, 1-d, at least the layout's size).

        Takes the page locks first if they are wanted and due. A refused lock is remembered in
        ``lock_refusal`` and not tried again.

        Raises: StateError if a weight was given other memory: its old values would come silently.
        """
        self._check_homes()
        if self.wants_lock and not self._locks and self.lock_refusal is None:
            self.lock_refusal = self._lock_all()
        return [
            CopyPiece(memory[offset : offset + size], self._bytes(address, size), locked)
            for piece in self._pieces
            for address, size, offset, locked in self._cut(piece)
        ]

    def release_locks(self) -> None:
        """Unlock everything."""
        while self._locks:
            self._locks.pop().release()

    def _check_homes(self) -> None:
        for weight in self._weights:
            if weight.home.data_ptr() != weight.extent.address:
                raise StateError(
                    f"weight {weight.name} was given other memory since it was attached (by .data, "
                    ".to() or the like); detach the engine before such a change, then attach again"
                )

    def _lock_all(self) -> str | None:
        for mapping, address, size in self._runs:
            if not size:
                continue
            locked = self._locker.lock(address, size, mapping.owner, f"layer {self.name}")
            if isinstance(locked, LockRefused):
                self.release_locks()
                return locked.reason
            self._locks.append(locked)
        return None

    def _cut(self, piece: Piece) -> list[tuple[int, int, int, bool]]:
        """(address, size, offset, locked) of each part of ``piece`` that is locked alike."""
        borders = {piece.address, piece.address + piece.size_bytes}
        for lock in self._locks:
            borders.update((lock.address, lock.address + lock.size_bytes))
        inside = sorted(
            b for b in borders if piece.address <= b <= piece.address + piece.size_bytes
        )
        return [
            (start, end - start, piece.offset + start - piece.address, self._is_locked(start))
            for start, end in itertools.pairwise(inside)
        ]

    def _is_locked(self, address: int) -> bool:
        return any(lock.address <= address < lock.address + lock.size_bytes for lock in self._locks)

    def _bytes(self, address: int, size: int) -> torch.Tensor:
        # A piece may span several tensors, each a storage of its own, so the view is made from
        # the address. The tensors that own the memory ride along in the buffer object.
        buffer = (ctypes.c_ubyte * size).from_address(address)
        buffer._owners = self._keepalive  # type: ignore[attr-defined]
        return torch.frombuffer(buffer, dtype=torch.uint8)


def _mapped_runs(group: WeightGroup) -> list[tuple[FileMapping, int, int]]:
    """(mapping, address, size) of the whole pages inside each contiguous run of file bytes."""
    spans: list[tuple[FileMapping, int, int]] = []
    mapped = [w for w in group.weights if w.mapping is not None and w.extent.size_bytes]
    for weight in sorted(mapped, key=lambda w: w.extent.address):
        assert weight.mapping is not None
        start, end = weight.extent.address, weight.extent.address + weight.extent.size_bytes
        if spans and spans[-1][0] is weight.mapping and spans[-1][2] >= start:
            spans[-1] = (weight.mapping, spans[-1][1], max(end, spans[-1][2]))
        else:
            spans.append((weight.mapping, start, end))
    runs = []
    for mapping, start, end in spans:
        address, size = mapping.lockable_range(start - mapping.base_address, end - start)
        runs.append((mapping, address, size))
    return runs


def _file_name(group: WeightGroup) -> str:
    names: Sequence[str] = sorted(
        {weight.mapping.header.path.name for weight in group.weights if weight.mapping is not None}
    )
    return ", ".join(names)
