"""A byte ledger of the host budget.

Note "Who may run a finalizer": a locked range that ends up in a reference cycle is released by the
garbage collector, on whatever thread allocates next, possibly one that is inside a locked section
here. So the locks are re-entrant, and no locked section relies on a number or a table that it read
before its last allocation.
"""

from __future__ import annotations

import threading

from ..values import ConfigError, HostBudgetError, size_text


class HostLedger:
    """Host bytes promised and held, never more than the budget.

    A reservation is taken before its memory and released after that memory is really gone, so the
    sum is at every moment at least what is held.

    Threads: any. ``_used_bytes`` is guarded by ``_lock``; see "Who may run a finalizer".
    """

    def __init__(self, limit_bytes: int) -> None:
        """``limit_bytes`` of 0 means that nothing may be reserved. Raises: ConfigError."""
        self.limit_bytes = _whole_bytes(limit_bytes, "the host budget")
        self._lock = threading.RLock()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Reserved at this moment."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Left to reserve at this moment; another thread may be quicker."""
        return self.limit_bytes - self._used_bytes

    def try_reserve(self, size_bytes: int) -> Reservation | None:
        """A reservation, or None when the budget does not allow it. Raises: ConfigError."""
        _whole_bytes(size_bytes, "a reservation")
        reservation = Reservation(self, size_bytes)
        with self._lock:
            if self._used_bytes + size_bytes > self.limit_bytes:
                return None
            self._used_bytes += size_bytes
            reservation.held = True
        return reservation

    def reserve(self, size_bytes: int, what: str) -> Reservation:
        """A reservation for ``what``, which an error names.

        Raises: HostBudgetError with the budget that would have sufficed, ConfigError.
        """
        reservation = self.try_reserve(size_bytes)
        if reservation is None:
            used = self._used_bytes
            raise HostBudgetError(self.shortage_text(size_bytes, what), used + size_bytes)
        return reservation

    def shortage_text(self, size_bytes: int, what: str) -> str:
        """Why ``what`` does not fit and what to do, for a refusal or an error."""
        return (
            f"{what} needs {size_text(size_bytes)} of host memory, {size_text(self.free_bytes)} of "
            f"the {size_text(self.limit_bytes)} budget is left; raise the host budget, or let it "
            "stay mapped"
        )

    def _give_back(self, reservation: Reservation) -> None:
        with self._lock:
            if reservation.held:
                reservation.held = False
                self._used_bytes -= reservation.size_bytes


class Reservation:
    """Bytes of a ledger that are spoken for until ``release``.

    It is not released when it is merely forgotten: only its holder knows when the memory is gone.

    Threads: any. ``held`` is guarded by the ledger's lock.
    """

    def __init__(self, ledger: HostLedger, size_bytes: int) -> None:
        """Only a ledger makes one."""
        self.size_bytes = size_bytes
        self.held = False
        self._ledger = ledger

    def __repr__(self) -> str:
        return f"Reservation({self.size_bytes}, {'held' if self.held else 'released'})"

    def release(self) -> None:
        """Give the bytes back, once; any further call does nothing."""
        self._ledger._give_back(self)


def _whole_bytes(value: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{what} must be whole bytes, 0 or more, not {value!r}")
    return value
