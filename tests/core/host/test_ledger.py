from __future__ import annotations

import threading

import pytest

from offload_core.host import HostLedger, Reservation
from offload_core.values import GIB, MIB, ConfigError, HostBudgetError

# Case 38, the ledger's half.


@pytest.mark.parametrize("limit", [-1, "2GB", 1.5, True, None])
def test_a_budget_that_is_not_whole_bytes_is_refused(limit: object) -> None:
    with pytest.raises(ConfigError, match="the host budget must be whole bytes, 0 or more, not"):
        HostLedger(limit)  # type: ignore[arg-type]


def test_a_budget_of_nothing_reserves_nothing() -> None:
    ledger = HostLedger(0)
    assert ledger.try_reserve(1) is None
    assert ledger.used_bytes == 0


def test_a_layer_larger_than_the_budget_is_refused_with_the_budget_it_needs() -> None:
    ledger = HostLedger(MIB)
    with pytest.raises(
        HostBudgetError,
        match=r"layer 7 needs 1\.50 MiB of host memory, 1\.00 MiB of the 1\.00 MiB budget is left; "
        "raise the host budget",
    ) as caught:
        ledger.reserve(3 * MIB // 2, "layer 7")
    assert caught.value.smallest_bytes == 3 * MIB // 2
    assert ledger.used_bytes == 0


def test_a_budget_of_exactly_one_layer_holds_exactly_one() -> None:
    ledger = HostLedger(MIB)
    first = ledger.reserve(MIB, "layer 0")
    assert ledger.free_bytes == 0
    with pytest.raises(HostBudgetError, match=r"0 B of the 1\.00 MiB budget is left") as caught:
        ledger.reserve(1, "layer 1")
    assert caught.value.smallest_bytes == MIB + 1
    first.release()
    assert ledger.try_reserve(MIB) is not None


def test_a_budget_beyond_any_machine_is_only_a_number() -> None:
    assert HostLedger(1 << 70).try_reserve(100 * GIB) is not None


@pytest.mark.parametrize("size", [-1, "1", 0.5])
def test_a_reservation_that_is_not_whole_bytes_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="a reservation must be whole bytes"):
        HostLedger(MIB).try_reserve(size)  # type: ignore[arg-type]


# Case 40.


def test_releasing_twice_refunds_once() -> None:
    ledger = HostLedger(100)
    first, second = ledger.reserve(60, "a"), ledger.reserve(40, "b")
    first.release()
    first.release()
    assert ledger.used_bytes == 40
    second.release()
    assert ledger.used_bytes == 0


def test_a_forgotten_reservation_stays_charged() -> None:
    ledger = HostLedger(100)
    ledger.reserve(60, "memory that may well still be there")
    assert ledger.used_bytes == 60


def test_a_reservation_shows_its_bytes_and_state() -> None:
    reservation = HostLedger(100).reserve(60, "a")
    assert repr(reservation) == "Reservation(60, held)"
    reservation.release()
    assert repr(reservation) == "Reservation(60, released)"


def test_threads_never_reserve_more_than_the_budget_and_refund_all() -> None:
    ledger, taken = HostLedger(1000), []
    gate = threading.Barrier(4)

    def take() -> None:
        gate.wait()
        while (reservation := ledger.try_reserve(3)) is not None:
            taken.append(reservation)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 333
    assert ledger.used_bytes == 999
    for reservation in taken:
        reservation.release()
    assert ledger.used_bytes == 0


class ReleasingSize(int):
    """A size that releases another reservation while it is added up, as a finalizer might."""

    victim: Reservation

    def __radd__(self, other: int) -> int:
        self.victim.release()
        return other + int(self)


def test_a_release_from_inside_a_locked_section_neither_hangs_nor_is_lost() -> None:
    ledger = HostLedger(20)
    size = ReleasingSize(10)
    size.victim = ledger.reserve(10, "what a finalizer gives back")
    thread = threading.Thread(target=ledger.try_reserve, args=(size,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert ledger.used_bytes == 10
