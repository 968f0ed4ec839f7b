"""Pages that are kept locked in memory, each at most once, under the ledger of the host budget."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

from ..values import StateError, size_text
from .ledger import HostLedger, Reservation
from .process_memory import MemoryKind

if sys.platform != "win32":
    import resource


class PageLockBackend(Protocol):
    """How pages are locked: mlock here, the device driver's own call elsewhere."""

    def lock(self, address: int, size_bytes: int, kind: MemoryKind) -> str | None:
        """Lock whole pages; the reason when the system will not.

        After a refusal or an exception nothing of the range is locked.
        """

    def unlock(self, address: int, size_bytes: int) -> None:
        """Undo one successful ``lock`` of exactly this range. Any thread; must not fail."""


class MlockBackend:
    """Locks pages with ``mlock``: for machines without a device driver that wants its own call.

    Threads: any.
    """

    def __init__(self) -> None:
        self._libc = _libc_with_mlock()

    def lock(self, address: int, size_bytes: int, kind: MemoryKind) -> str | None:
        """Reads the pages from disk first when they are not in memory: seconds for a cold layer."""
        if self._libc is None:
            return "this system offers no mlock"
        try:
            code = 0 if self._libc.mlock(address, size_bytes) == 0 else ctypes.get_errno()
        except BaseException:
            # A Ctrl-C during those seconds is raised as the call returns, with the pages locked.
            self._libc.munlock(address, size_bytes)
            raise
        if code == 0:
            return None
        # Linux marks the range before it reads the pages in, and keeps the mark when that fails:
        # without this VmLck would go on counting pages that nobody holds.
        self._libc.munlock(address, size_bytes)
        text = f"mlock of {size_text(size_bytes)} failed: {os.strerror(code)}"
        if code in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
            text += f"; at most {_memlock_limit_text()} may be locked (ulimit -l)"
        return text

    def unlock(self, address: int, size_bytes: int) -> None:
        if self._libc is not None and self._libc.munlock(address, size_bytes) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise StateError(f"munlock of {size_bytes} bytes at {address:#x} failed: {reason}")


@dataclass(frozen=True)
class LockRefused:
    """Pages that stay pageable, and why, for people."""

    reason: str


@dataclass(eq=False)
class _Held:
    """One row of a locker's table. ``owner`` keeps the pages mapped for as long as the row is."""

    start: int
    end: int
    owner: object
    reservation: Reservation
    is_locked: bool = False

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


class PageLocker:
    """Locks page ranges under a ledger, each at most once, and never past its mapping's end.

    The backend is trusted to lock and unlock; this class sees to it that no range is locked twice
    or unlocked twice, that the ledger is charged before and credited after, and that a mapping
    outlives its locks. Locking a range that the system refuses is an answer, not an error.

    Threads: any. ``_held`` is guarded by ``_lock``, which is re-entrant for the reason in
    ledger.py, "Who may run a finalizer". The backend is called outside it, because locking a cold
    layer reads it from disk.
    """

    def __init__(self, backend: PageLockBackend, ledger: HostLedger) -> None:
        self._backend = backend
        self._ledger = ledger
        self._lock = threading.RLock()
        self._held: dict[int, _Held] = {}

    @property
    def locked_bytes(self) -> int:
        """Really locked at this moment."""
        return sum(row.size_bytes for row in list(self._held.values()) if row.is_locked)

    def lock(
        self, address: int, size_bytes: int, owner: object, what: str, kind: MemoryKind
    ) -> LockedRange | LockRefused:
        """Lock whole pages, as ``FileMapping.lockable_range`` gives them.

        Args:
            owner: kept alive until the pages are unlocked; a ``FileMapping.owner``.
            what: what the bytes are, for the reason of a refusal.
            kind: what the pages are. Pages of a file are charged to the ledger; ordinary memory is
                not, because it is there, and charged as a copy, whether it is locked or not.
        Raises: StateError for a range that is not whole pages, or that overlaps a locked one.
        """
        if address % mmap.PAGESIZE or size_bytes % mmap.PAGESIZE or size_bytes < 0:
            raise StateError(f"{what}: {size_bytes} bytes at {address:#x} are not whole pages")
        if size_bytes == 0:
            return LockRefused(f"{what} fills no whole page")
        charged = 0 if kind is MemoryKind.ANONYMOUS else size_bytes
        reservation = self._ledger.try_reserve(charged)
        if reservation is None:
            return LockRefused(self._ledger.shortage_text(size_bytes, what))
        row = _Held(address, address + size_bytes, owner, reservation)
        try:
            self._enter(row, what)
            reason = self._backend.lock(address, size_bytes, kind)
            if reason is not None:
                self._leave(row)
                return LockRefused(f"{what}: {reason}")
            row.is_locked = True
            return LockedRange(self, row)
        except BaseException:
            # Whatever it was, Ctrl-C too: a range that nobody was given is not locked, nor charged.
            self._unlock(row)
            raise

    def _enter(self, row: _Held, what: str) -> None:
        address, size_bytes, end = row.start, row.size_bytes, row.end
        with self._lock:
            # A copy of the keys, and get: a finalizer may take rows away while this looks.
            for start in list(self._held):
                held = self._held.get(start)
                if held is not None and start < end and address < held.end:
                    raise StateError(
                        f"{what}: {size_bytes} bytes at {address:#x} overlap the "
                        f"{held.end - start} bytes at {start:#x} that are locked already; release "
                        "those first"
                    )
            self._held[address] = row

    def _leave(self, row: _Held) -> None:
        with self._lock:
            # Not another's at that place: this may be called again where it was interrupted.
            if self._held.get(row.start) is row:
                del self._held[row.start]
        row.reservation.release()
        row.owner = None  # last, and outside the lock: this may be what unmaps the file

    def _unlock(self, row: _Held) -> None:
        """Each step at most once, however often this is called."""
        # The row stays until the pages are free: a second lock of them in between would be undone
        # by this call, and a failure leaves pages that are locked, charged and still mapped.
        if row.is_locked:
            self._backend.unlock(row.start, row.size_bytes)
            row.is_locked = False
        self._leave(row)


class LockedRange:
    """Pages that stay in memory until ``release``, or until nobody holds this object.

    Threads: any.
    """

    def __init__(self, locker: PageLocker, row: _Held) -> None:
        """Only a locker makes one."""
        self.address = row.start
        self.size_bytes = row.size_bytes
        self._row = row
        self._unlock = locker._unlock
        # A finalizer runs once, whoever calls it, and at exit while the mapping still stands.
        self._finalizer = weakref.finalize(self, locker._unlock, row)

    def __repr__(self) -> str:
        state = "released" if self.released else "locked"
        return f"LockedRange({self.address:#x}, {self.size_bytes}, {state})"

    @property
    def released(self) -> bool:
        """True once ``release`` was begun."""
        return not self._finalizer.alive

    def release(self) -> None:
        """Unlock the pages, then credit the ledger, once; any further call does nothing.

        After an error of the backend the pages are locked and charged as before, and a further
        call tries again; so it does what an interrupt left undone.
        """
        finalizer, unlock, row = self._finalizer, self._unlock, self._row
        try:
            # None for all but one of those who call at once.
            if finalizer.detach() is not None:
                unlock(row)
        except BaseException:
            if not finalizer.alive:
                self._finalizer = weakref.finalize(self, unlock, row)
            raise


def _libc_with_mlock() -> ctypes.CDLL | None:
    if sys.platform == "win32":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mlock"):
        return None
    for call in (libc.mlock, libc.munlock):
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        call.restype = ctypes.c_int
    return libc


def _memlock_limit_text() -> str:
    if sys.platform == "win32":
        return "an unknown amount"
    else:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return "as much as there is" if soft == resource.RLIM_INFINITY else size_text(soft)
