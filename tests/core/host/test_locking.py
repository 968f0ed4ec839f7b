from __future__ import annotations

import ctypes
import gc
import mmap
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from offload_core.host import (
    PAGE_BYTES,
    FileMapping,
    HostLedger,
    LockedRange,
    LockRefused,
    MemoryKind,
    MlockBackend,
    PageLocker,
    maps_lines,
    maps_lookup,
    memory_kind,
    open_mapping,
    process_memory,
)
from offload_core.values import MIB, StateError

RunPython = Callable[..., subprocess.CompletedProcess[bytes]]

linux = pytest.mark.skipif(sys.platform != "linux", reason="compares with /proc/self/status")

FILE = MemoryKind.SHARED_READ_ONLY


@dataclass
class FakeBackend:
    """Locks nothing, remembers everything, and asks the test at the moment of each call."""

    held: dict[int, int] = field(default_factory=dict)
    kinds: list[MemoryKind] = field(default_factory=list)
    refuse_after: int | None = None
    on_lock: Callable[[int], None] = lambda address: None
    on_unlock: Callable[[int], None] = lambda address: None

    def lock(self, address: int, size_bytes: int, kind: MemoryKind) -> str | None:
        self.on_lock(address)
        assert address not in self.held
        self.kinds.append(kind)
        if self.refuse_after is not None and len(self.held) >= self.refuse_after:
            return "the driver has no more"
        self.held[address] = size_bytes
        return None

    def unlock(self, address: int, size_bytes: int) -> None:
        self.on_unlock(address)
        assert self.held.pop(address) == size_bytes


@pytest.fixture
def mapping(checkpoint: Path) -> FileMapping:
    """A mapping of a dozen pages."""
    found = open_mapping(checkpoint)
    assert found.lockable_range(0, found.header.identity.size_bytes)[1] >= 12 * PAGE_BYTES
    return found


def take(locker: PageLocker, mapping: FileMapping, page: int, pages: int = 1) -> LockedRange:
    locked = ask(locker, mapping, page, pages)
    assert isinstance(locked, LockedRange), locked
    return locked


def ask(
    locker: PageLocker, mapping: FileMapping, page: int, pages: int = 1
) -> LockedRange | LockRefused:
    address, size = mapping.lockable_range(page * PAGE_BYTES, pages * PAGE_BYTES)
    return locker.lock(address, size, mapping.owner, f"layer {page}", FILE)


def kernel_locked() -> int:
    found = process_memory().locked_bytes
    assert found is not None
    return found


@linux
def test_the_kernel_counts_as_locked_what_we_say_is_locked(mapping: FileMapping) -> None:
    before, ledger = kernel_locked(), HostLedger(MIB)
    locker = PageLocker(MlockBackend(), ledger)
    first, second = take(locker, mapping, 0, 2), take(locker, mapping, 2, 1)
    assert kernel_locked() - before == locker.locked_bytes == ledger.used_bytes == 3 * PAGE_BYTES
    first.release()
    assert kernel_locked() - before == locker.locked_bytes == ledger.used_bytes == PAGE_BYTES
    first.release()
    assert kernel_locked() - before == locker.locked_bytes == ledger.used_bytes == PAGE_BYTES
    second.release()
    assert kernel_locked() - before == locker.locked_bytes == ledger.used_bytes == 0


@linux
def test_locking_in_place_copies_nothing(mapping: FileMapping, checkpoint: Path) -> None:
    locker = PageLocker(MlockBackend(), HostLedger(MIB))
    locked = take(locker, mapping, 1, 2)
    line = maps_lookup(locked.address)
    assert line is not None
    assert (line.perms, line.path, line.offset) == ("r--s", str(checkpoint), PAGE_BYTES)


@linux
def test_a_dropped_range_unlocks_and_then_unmaps_without_the_collector(
    checkpoint: Path,
) -> None:
    before, ledger = kernel_locked(), HostLedger(MIB)
    locker = PageLocker(MlockBackend(), ledger)
    mapping = open_mapping(checkpoint)
    unmapped = mapping.unmapped()
    gc.disable()
    try:
        locked = take(locker, mapping, 0, 2)
        del mapping
        assert not unmapped()
        assert kernel_locked() - before == 2 * PAGE_BYTES
        del locked
        assert unmapped()
        assert kernel_locked() == before
        assert ledger.used_bytes == locker.locked_bytes == 0
    finally:
        gc.enable()


@linux
def test_a_range_in_a_cycle_is_released_by_the_collector(mapping: FileMapping) -> None:
    before, ledger = kernel_locked(), HostLedger(MIB)
    cycle: list[object] = [take(PageLocker(MlockBackend(), ledger), mapping, 0)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert kernel_locked() == before
    assert ledger.used_bytes == 0


# Case 37.


@linux
def test_pages_are_unlocked_before_the_mapping_goes_in_twenty_loads(checkpoint: Path) -> None:
    seen = []

    def still_mapped(address: int) -> None:
        line = maps_lookup(address)
        seen.append(line is not None and line.path == str(checkpoint))

    ledger = HostLedger(MIB)
    locker = PageLocker(FakeBackend(on_unlock=still_mapped), ledger)
    for _ in range(20):
        mapping = open_mapping(checkpoint)
        locked = take(locker, mapping, 0)
        del mapping
        if len(seen) % 2:
            locked.release()
        del locked
        assert not any(line.path == str(checkpoint) for line in maps_lines())
    assert seen == [True] * 20
    assert ledger.used_bytes == 0


# Case 36: the table.


@pytest.mark.parametrize(("page", "pages"), [(2, 2), (1, 2), (3, 2), (2, 1), (0, 6)])
def test_a_range_that_overlaps_a_locked_one_is_refused(
    mapping: FileMapping, page: int, pages: int
) -> None:
    backend, ledger = FakeBackend(), HostLedger(MIB)
    locker = PageLocker(backend, ledger)
    first = take(locker, mapping, 2, 2)
    with pytest.raises(StateError, match=r"layer \d: .* overlap the .* that are locked already"):
        ask(locker, mapping, page, pages)
    assert backend.held == {first.address: first.size_bytes}
    assert ledger.used_bytes == locker.locked_bytes == first.size_bytes
    neighbours = [take(locker, mapping, 1), take(locker, mapping, 4)]
    assert len(backend.held) == 1 + len(neighbours)


def test_a_released_range_can_be_locked_again(mapping: FileMapping) -> None:
    locker = PageLocker(FakeBackend(), HostLedger(2 * PAGE_BYTES))
    for _ in range(3):
        take(locker, mapping, 0, 2).release()
    assert locker.locked_bytes == 0


def test_a_second_release_unlocks_nothing(mapping: FileMapping) -> None:
    backend = FakeBackend()
    locker = PageLocker(backend, HostLedger(MIB))
    locked = take(locker, mapping, 0)
    locked.release()
    again = take(locker, mapping, 0)
    locked.release()
    assert backend.held == {again.address: PAGE_BYTES}
    assert repr(locked) == f"LockedRange({locked.address:#x}, {PAGE_BYTES}, released)"
    assert repr(again) == f"LockedRange({again.address:#x}, {PAGE_BYTES}, locked)"


@pytest.mark.parametrize(
    ("shift", "size"), [(1, PAGE_BYTES), (0, PAGE_BYTES - 1), (0, -PAGE_BYTES)]
)
def test_part_of_a_page_is_never_locked(mapping: FileMapping, shift: int, size: int) -> None:
    address, _ = mapping.lockable_range(0, PAGE_BYTES)
    locker = PageLocker(FakeBackend(), HostLedger(MIB))
    with pytest.raises(StateError, match="are not whole pages"):
        locker.lock(address + shift, size, mapping.owner, "layer 0", FILE)


def test_a_layer_within_one_page_is_refused_with_a_reason(mapping: FileMapping) -> None:
    address, size = mapping.lockable_range(1, 10)
    locker = PageLocker(FakeBackend(), HostLedger(MIB))
    refused = locker.lock(address, size, mapping, "layer 0", FILE)
    assert refused == LockRefused("layer 0 fills no whole page")


# Case 38 and 40: the budget holds at every moment.


def test_a_range_over_budget_is_refused_before_the_system_is_asked(mapping: FileMapping) -> None:
    backend, ledger = FakeBackend(), HostLedger(2 * PAGE_BYTES)
    locker = PageLocker(backend, ledger)
    refused = ask(locker, mapping, 0, 3)
    assert isinstance(refused, LockRefused)
    assert refused.reason.startswith("layer 0 needs 12.00 KiB of host memory, 8.00 KiB of the ")
    assert backend.held == {}
    kept = take(locker, mapping, 0, 2)
    assert isinstance(ask(locker, mapping, 2), LockRefused)
    assert backend.held == {kept.address: 2 * PAGE_BYTES}


def test_the_budget_is_charged_before_and_credited_after(mapping: FileMapping) -> None:
    ledger, charged = HostLedger(MIB), []

    def note(address: int) -> None:
        charged.append(ledger.used_bytes)

    locker = PageLocker(FakeBackend(on_lock=note, on_unlock=note), ledger)
    take(locker, mapping, 0, 2).release()
    assert charged == [2 * PAGE_BYTES, 2 * PAGE_BYTES]
    assert ledger.used_bytes == 0


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_exception_while_locking_refunds_exactly(
    mapping: FileMapping, error: type[BaseException]
) -> None:
    def fail(address: int) -> None:
        raise error("while locking")

    ledger = HostLedger(3 * PAGE_BYTES)
    with pytest.raises(error, match="while locking"):
        ask(PageLocker(FakeBackend(on_lock=fail), ledger), mapping, 0, 3)
    assert ledger.used_bytes == 0
    locker = PageLocker(FakeBackend(), ledger)
    kept = take(locker, mapping, 0, 3)
    assert ledger.used_bytes == locker.locked_bytes == kept.size_bytes == 3 * PAGE_BYTES


def test_a_failed_unlock_stays_charged_keeps_its_mapping_and_may_be_tried_again(
    checkpoint: Path,
) -> None:
    gone = [True]

    def fail(address: int) -> None:
        if gone[0]:
            raise StateError("the driver is gone")

    ledger = HostLedger(MIB)
    locker = PageLocker(FakeBackend(on_unlock=fail), ledger)
    mapping = open_mapping(checkpoint)
    unmapped = mapping.unmapped()
    locked = take(locker, mapping, 0)
    del mapping
    for _ in range(2):
        with pytest.raises(StateError, match="the driver is gone"):
            locked.release()
        assert not locked.released
        assert ledger.used_bytes == locker.locked_bytes == PAGE_BYTES
        assert not unmapped()
    gone[0] = False
    locked.release()
    assert locked.released
    assert ledger.used_bytes == locker.locked_bytes == 0
    locked.release()
    assert unmapped()


def test_a_range_being_unlocked_cannot_be_locked_yet(mapping: FileMapping) -> None:
    refused = []

    def lock_again(address: int) -> None:
        with pytest.raises(StateError, match="locked already") as caught:
            ask(locker, mapping, 0)
        refused.append(caught.value)

    locker = PageLocker(FakeBackend(on_unlock=lock_again), HostLedger(MIB))
    take(locker, mapping, 0).release()
    assert len(refused) == 1


def test_others_may_lock_while_one_waits_for_the_disk(mapping: FileMapping) -> None:
    others: list[LockedRange | LockRefused] = []
    in_time = []

    def lock_elsewhere(address: int) -> None:
        if not in_time:
            thread = threading.Thread(target=lambda: others.append(ask(locker, mapping, 5)))
            in_time.append(True)
            thread.start()
            thread.join(10)
            in_time[0] = not thread.is_alive()

    locker = PageLocker(FakeBackend(on_lock=lock_elsewhere), HostLedger(MIB))
    take(locker, mapping, 0)
    assert in_time == [True]
    assert isinstance(others[0], LockedRange)


def ordinary(pages: int) -> tuple[mmap.mmap, int]:
    """Whole pages of ordinary memory, and their address."""
    region = mmap.mmap(-1, pages * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return region, ctypes.addressof(ctypes.c_ubyte.from_buffer(region))


@linux
def test_ordinary_memory_is_locked_free_of_charge_and_counted(mapping: FileMapping) -> None:
    before, ledger = kernel_locked(), HostLedger(PAGE_BYTES)
    locker = PageLocker(MlockBackend(), ledger)
    region, address = ordinary(5)
    kind = memory_kind(address, 5 * PAGE_BYTES)
    locked = locker.lock(address, 5 * PAGE_BYTES, region, "a copy", kind)
    assert isinstance(locked, LockedRange), locked
    assert ledger.used_bytes == 0
    assert kernel_locked() - before == locker.locked_bytes == 5 * PAGE_BYTES
    # It takes nothing from what files may have.
    page = take(locker, mapping, 0)
    assert ledger.used_bytes == PAGE_BYTES
    assert isinstance(ask(locker, mapping, 1), LockRefused)
    locked.release()
    assert ledger.used_bytes == kernel_locked() - before == PAGE_BYTES
    page.release()
    assert ledger.used_bytes == locker.locked_bytes == kernel_locked() - before == 0


@pytest.mark.parametrize("kind", list(MemoryKind))
def test_the_backend_is_told_what_the_pages_are(mapping: FileMapping, kind: MemoryKind) -> None:
    backend, ledger = FakeBackend(), HostLedger(MIB)
    address, size = mapping.lockable_range(0, 2 * PAGE_BYTES)
    locked = PageLocker(backend, ledger).lock(address, size, mapping.owner, "layer 0", kind)
    assert isinstance(locked, LockedRange)
    assert backend.kinds == [kind]
    # What is not known to be there anyway is charged.
    assert ledger.used_bytes == (0 if kind is MemoryKind.ANONYMOUS else size)
    locked.release()
    assert ledger.used_bytes == 0


def test_ordinary_memory_stays_alive_while_it_is_locked() -> None:
    locker = PageLocker(FakeBackend(), HostLedger(0))
    region, address = ordinary(1)
    alive = weakref.ref(region)
    locked = locker.lock(address, PAGE_BYTES, region, "a copy", MemoryKind.ANONYMOUS)
    assert isinstance(locked, LockedRange)
    del region
    assert alive() is not None
    locked.release()
    assert alive() is None


def test_refused_ordinary_memory_leaves_no_row_and_no_charge() -> None:
    locker = PageLocker(FakeBackend(refuse_after=0), HostLedger(0))
    region, address = ordinary(2)
    for _ in range(2):
        refused = locker.lock(address, 2 * PAGE_BYTES, region, "a copy", MemoryKind.ANONYMOUS)
        assert refused == LockRefused("a copy: the driver has no more")
    assert locker.locked_bytes == 0


# Case 39: others use up what can be locked.


def test_what_locked_before_stays_when_the_system_begins_to_refuse(mapping: FileMapping) -> None:
    ledger = HostLedger(MIB)
    locker = PageLocker(FakeBackend(refuse_after=2), ledger)
    answers = [ask(locker, mapping, page) for page in range(4)]
    assert [isinstance(answer, LockedRange) for answer in answers] == [True, True, False, False]
    assert answers[2] == LockRefused("layer 2: the driver has no more")
    assert ledger.used_bytes == locker.locked_bytes == 2 * PAGE_BYTES


@linux
def test_a_file_that_shrank_is_refused_and_leaves_no_page_marked(
    checkpoint: Path, mapping: FileMapping
) -> None:
    before, ledger = kernel_locked(), HostLedger(MIB)
    with checkpoint.open("r+b") as file:
        file.truncate(PAGE_BYTES)
    refused = ask(PageLocker(MlockBackend(), ledger), mapping, 2, 4)
    assert isinstance(refused, LockRefused)
    assert refused.reason.startswith("layer 2: mlock of 16.00 KiB failed: ")
    assert kernel_locked() == before
    assert ledger.used_bytes == 0


@linux
def test_the_systems_limit_is_a_reason_and_not_an_error(
    checkpoint: Path, run_python: RunPython
) -> None:
    code = (
        "import os, resource, sys\n"
        "from offload_core.host import *\n"
        "mapping = open_mapping(sys.argv[1])\n"
        "page = PAGE_BYTES\n"
        "ledger = HostLedger(1 << 20)\n"
        "locker = PageLocker(MlockBackend(), ledger)\n"
        "def ask(pages):\n"
        "    where = mapping.lockable_range(0, pages * page)\n"
        "    return locker.lock(*where, mapping.owner, 'it', mapping.kind)\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (2 * page, 2 * page))\n"
        "if os.geteuid() == 0: os.setresuid(65534, 65534, 65534)\n"
        "print(ask(3).reason)\n"
        "assert process_memory().locked_bytes == ledger.used_bytes == 0\n"
        "kept = ask(2)\n"
        "assert process_memory().locked_bytes == ledger.used_bytes == 2 * page, kept\n"
        "kept.release()\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n"
        "print(ask(1).reason)\n"
    )
    done = run_python(code, checkpoint)
    assert done.returncode == 0, done.stderr.decode()
    over, none = done.stdout.decode().splitlines()
    size, limit = f"{3 * PAGE_BYTES / 1024:.2f} KiB", f"{2 * PAGE_BYTES / 1024:.2f} KiB"
    assert re.fullmatch(
        rf"it: mlock of {size} failed: .+; at most {limit} may be locked \(ulimit -l\)", over
    )
    assert none.endswith("; at most 0 B may be locked (ulimit -l)")


@linux
def test_locked_ranges_alive_at_exit_are_released_quietly(
    checkpoint: Path, run_python: RunPython
) -> None:
    code = (
        "import sys\n"
        "from offload_core.host import *\n"
        "class Backend(MlockBackend):\n"
        "    def unlock(self, address, size_bytes):\n"
        "        super().unlock(address, size_bytes)\n"
        "        print('unlocked', size_bytes, maps_lookup(address).path == sys.argv[1])\n"
        "mapping = open_mapping(sys.argv[1])\n"
        "locker = PageLocker(Backend(), HostLedger(1 << 20))\n"
        "where = mapping.lockable_range(0, PAGE_BYTES)\n"
        "kept = locker.lock(*where, mapping.owner, 'it', mapping.kind)\n"
    )
    done = run_python(code, checkpoint)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.split() == [b"unlocked", str(PAGE_BYTES).encode(), b"True"]


# Case 42.


def test_a_system_without_mlock_refuses_with_a_reason(
    mapping: FileMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    ledger = HostLedger(MIB)
    refused = ask(PageLocker(MlockBackend(), ledger), mapping, 0)
    assert refused == LockRefused("layer 0: this system offers no mlock")
    assert ledger.used_bytes == 0
