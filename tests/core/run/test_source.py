"""Parts of a layer and their host bytes: page runs, copies cut at the locks, locks that stay."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from offload_core.device import CopyPiece, FakePageLocker
from offload_core.host import PAGE_BYTES, FileMapping, HostLedger, MemoryKind, PageLocker
from offload_core.plan import find_block_lists
from offload_core.run.source import LayerSource
from offload_core.run.weights import Inventory, WeightGroup, take_inventory
from offload_core.values import StateError

BUDGET = 1 << 20


class Stack(nn.Module):
    """Weights of one to a few pages each; their places in the file follow their names."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        for index, size in enumerate(sizes):
            weight = torch.randint(0, 256, (size,), dtype=torch.uint8)
            self.register_parameter(f"w{index:02}", nn.Parameter(weight, requires_grad=False))

    def forward(self) -> None:
        """What cannot be called is no layer."""


SIZES = (10_000, 5_000, 300, 0, 20_000, 9_000, 4_096)


@pytest.fixture
def make_group(mapped: Callable[..., FileMapping]) -> Callable[..., WeightGroup]:
    """One layer's weights over a real file; those named are copies in ordinary memory instead."""

    def make(copies: Sequence[str] = (), sizes: Sequence[int] = SIZES) -> WeightGroup:
        torch.manual_seed(0)
        model = nn.ModuleList([Stack(sizes)])
        mapping = mapped(model)
        for name in copies:
            home = getattr(model[0], name)
            setattr(model[0], name, nn.Parameter(home.detach().clone(), requires_grad=False))
        return inventory_of(model, mapping).layers[0]

    return make


def inventory_of(model: nn.Module, mapping: FileMapping, **more: Any) -> Inventory:
    return take_inventory(model, find_block_lists(model), [mapping], **more)


@pytest.fixture
def driver() -> FakePageLocker:
    return FakePageLocker()


@pytest.fixture
def ledger() -> HostLedger:
    return HostLedger(BUDGET)


@pytest.fixture
def source_over(driver: FakePageLocker, ledger: HostLedger) -> Callable[..., LayerSource]:
    return lambda group: LayerSource(group, PageLocker(driver, ledger))


def ship(source: LayerSource, part: WeightGroup, lock: bool = True) -> list[CopyPiece]:
    """Fill a buffer from the source, and see that every weight is there."""
    memory = torch.zeros(part.layout.size_bytes, dtype=torch.uint8)
    pieces = source.copies_into(memory, part, lock)
    for piece in pieces:
        piece.destination.copy_(piece.source)
    for weight, offset in zip(part.weights, part.layout.offsets, strict=True):
        size = weight.extent.size_bytes
        assert torch.equal(memory[offset : offset + size], weight.home.view(torch.uint8))
    return pieces


def locked_pages(driver: FakePageLocker) -> set[int]:
    return {
        page
        for address, size in driver.locked.items()
        for page in range(address, address + size, PAGE_BYTES)
    }


def pages_of(part: WeightGroup) -> set[int]:
    return {
        page
        for run in part.runs
        for page in range(run.address, run.address + run.size_bytes, PAGE_BYTES)
    }


def check_flags(pieces: Sequence[CopyPiece], driver: FakePageLocker) -> None:
    """A piece is called locked exactly if every page that it touches is."""
    pages = locked_pages(driver)
    for piece in pieces:
        start = piece.source.data_ptr()
        end = start + piece.source.numel()
        touched = range(start // PAGE_BYTES * PAGE_BYTES, end, PAGE_BYTES)
        assert piece.locked is all(page in pages for page in touched)


# Parts


def test_a_part_has_its_own_layout_and_runs(make_group: Callable[..., WeightGroup]) -> None:
    group = make_group()
    count = len(group.weights)
    whole = group.part(range(count))
    assert (whole.weights, whole.layout, whole.runs) == (group.weights, group.layout, group.runs)
    for first in range(count):
        for last in range(first, count + 1):
            part = group.part(range(first, last))
            assert part.weights == group.weights[first:last]
            assert part.name == group.name
            assert part.size_bytes == sum(w.extent.size_bytes for w in part.weights)
            aligned = sum(-(-w.extent.size_bytes // 256) * 256 for w in part.weights)
            assert part.layout.size_bytes == aligned
            assert pages_of(part) <= pages_of(group)
    assert group.part([]).layout.size_bytes == 0
    edges = group.part([0, count - 1])
    assert edges.weights == (group.weights[0], group.weights[-1])


def test_runs_of_neighbours_never_share_a_page_and_lose_no_page_inside(
    make_group: Callable[..., WeightGroup],
) -> None:
    group = make_group()
    (run,) = group.runs
    assert run.kind is MemoryKind.SHARED_READ_ONLY
    # A weight without bytes has no address, and comes first.
    start = next(w.extent.address for w in group.weights if w.extent.size_bytes)
    end = max(w.extent.address + w.extent.size_bytes for w in group.weights)
    assert start <= run.address < start + PAGE_BYTES
    assert end - PAGE_BYTES < run.address + run.size_bytes <= end
    for cut in range(1, len(group.weights)):
        before = pages_of(group.part(range(cut)))
        behind = pages_of(group.part(range(cut, len(group.weights))))
        assert not before & behind
        assert len(before) + len(behind) >= len(pages_of(group)) - 1


def test_copies_have_runs_of_their_own_that_keep_them_alive(
    make_group: Callable[..., WeightGroup],
) -> None:
    group = make_group(copies=("w04", "w01", "w02"))
    copies = [run for run in group.runs if run.mapping is None]
    homes = {w.home.data_ptr(): w for w in group.weights if w.mapping is None}
    for run in copies:
        assert run.kind is MemoryKind.ANONYMOUS
        (weight,) = (w for a, w in homes.items() if a <= run.address < a + w.extent.size_bytes)
        assert run.address + run.size_bytes <= weight.home.data_ptr() + weight.extent.size_bytes
        assert isinstance(run.owner, torch.Tensor)
        assert run.owner.data_ptr() == weight.home.data_ptr()
    # 20,000 bytes hold three pages wherever they begin, 300 none.
    assert sum(run.size_bytes for run in copies) >= 3 * PAGE_BYTES
    assert len(copies) <= 2
    in_file = [run for run in group.runs if run.mapping is not None]
    assert all(run.kind is MemoryKind.SHARED_READ_ONLY for run in in_file)


# Locks


def test_locks_are_taken_by_the_first_shipment_that_may(
    make_group: Callable[..., WeightGroup],
    source_over: Callable[..., LayerSource],
    driver: FakePageLocker,
    ledger: HostLedger,
) -> None:
    group = make_group(copies=("w04",))
    source = source_over(group)
    source.hold(group)
    check_flags(ship(source, group, lock=False), driver)
    assert driver.locked == {}
    assert source.unlocked_bytes(group) == group.size_bytes
    check_flags(ship(source, group), driver)
    assert locked_pages(driver) == pages_of(group)
    in_file = sum(run.size_bytes for run in group.runs if run.mapping is not None)
    assert source.locked_bytes == ledger.used_bytes == in_file > 0
    assert source.locked_copy_bytes == sum(driver.locked.values()) - in_file > 0
    assert source.unlocked_bytes(group) == group.size_bytes - sum(driver.locked.values())
    before = dict(driver.locked)
    ship(source, group)
    assert driver.locked == before
    source.release_locks()
    assert (driver.locked, ledger.used_bytes, source.locked_bytes) == ({}, 0, 0)
    ship(source, group)
    assert driver.locked == {}


@pytest.mark.parametrize("pages", [0, 1, 2, 3, 5, 8, 1000])
def test_no_more_file_pages_are_locked_than_allowed_and_copies_always(
    make_group: Callable[..., WeightGroup],
    source_over: Callable[..., LayerSource],
    driver: FakePageLocker,
    ledger: HostLedger,
    pages: int,
) -> None:
    group = make_group(copies=("w04",))
    source = source_over(group)
    in_file = sum(run.size_bytes for run in group.runs if run.mapping is not None)
    copied = sum(run.size_bytes for run in group.runs if run.mapping is None)
    for _ in range(2):
        source.hold(group, file_limit_bytes=pages * PAGE_BYTES)
        check_flags(ship(source, group), driver)
        assert source.locked_bytes == ledger.used_bytes == min(in_file, pages * PAGE_BYTES)
        assert source.locked_copy_bytes == copied
        assert locked_pages(driver) <= pages_of(group)
    source.hold(group, file_limit_bytes=PAGE_BYTES)
    assert source.locked_bytes <= PAGE_BYTES, "what is too much goes"
    check_flags(ship(source, group), driver)
    assert source.locked_bytes == ledger.used_bytes == PAGE_BYTES
    source.release_locks()
    assert (driver.locked, ledger.used_bytes) == ({}, 0)


@pytest.mark.parametrize("window", [(0, 3), (2, 5), (4, 7), (1, 2), (0, 7), (3, 3)])
@pytest.mark.parametrize("before", [(0, 7), (1, 5), (0, 2)])
@pytest.mark.parametrize("keep_larger", [False, True])
def test_windows_that_change_lock_what_is_missing_and_release_what_is_not_wanted(
    make_group: Callable[..., WeightGroup],
    source_over: Callable[..., LayerSource],
    driver: FakePageLocker,
    ledger: HostLedger,
    before: tuple[int, int],
    window: tuple[int, int],
    keep_larger: bool,
) -> None:
    group = make_group()
    source = source_over(group)
    old, new = group.part(range(*before)), group.part(range(*window))
    source.hold(old)
    ship(source, old)
    locks = dict(driver.locked)
    source.hold(new, keep_larger)
    kept = dict(driver.locked)
    assert kept.items() <= locks.items()
    touching = {
        address: size
        for address, size in locks.items()
        if any(
            address < run.address + run.size_bytes and run.address < address + size
            for run in new.runs
        )
    }
    if keep_larger:
        assert kept == touching
    else:
        assert locked_pages(driver) <= pages_of(new)
    assert source.locked_bytes == ledger.used_bytes == sum(kept.values())
    check_flags(ship(source, new), driver)
    assert kept.items() <= driver.locked.items(), "what stays is not locked anew"
    assert locked_pages(driver) == pages_of(new) | {
        page for a, size in kept.items() for page in range(a, a + size, PAGE_BYTES)
    }
    # Another part of the layer, such as what is to be resident: any of its pages may be locked.
    check_flags(ship(source, group, lock=False), driver)
    source.hold(None)
    assert (driver.locked, ledger.used_bytes) == ({}, 0)


def test_a_refusal_releases_all_that_was_had_and_is_not_tried_again_until_the_next_hold(
    make_group: Callable[..., WeightGroup],
    source_over: Callable[..., LayerSource],
    driver: FakePageLocker,
    ledger: HostLedger,
) -> None:
    group = make_group(copies=("w04",))
    assert len(group.runs) >= 2
    source = source_over(group)
    source.hold(group)
    driver.refuse_after = 1
    check_flags(ship(source, group), driver)
    text = "layer 0: the fake system has no page locks left"
    assert source.lock_refusal == text
    assert (driver.locked, ledger.used_bytes) == ({}, 0)
    driver.refuse_after = None
    ship(source, group)
    assert (driver.locked, source.lock_refusal) == ({}, text)
    source.hold(group)
    assert source.lock_refusal is None
    check_flags(ship(source, group), driver)
    assert locked_pages(driver) == pages_of(group)
    source.release_locks()


def test_a_budget_that_does_not_hold_the_locks_is_a_refusal(
    make_group: Callable[..., WeightGroup],
    source_over: Callable[..., LayerSource],
    driver: FakePageLocker,
    ledger: HostLedger,
) -> None:
    group = make_group()
    source = source_over(group)
    ledger.limit_bytes = PAGE_BYTES
    source.hold(group)
    check_flags(ship(source, group), driver)
    assert source.lock_refusal is not None
    assert "of host memory, 4.00 KiB of the 4.00 KiB budget is left" in source.lock_refusal
    assert driver.locked == {}


def test_a_lock_that_raised_is_tried_again(
    make_group: Callable[..., WeightGroup], ledger: HostLedger
) -> None:
    class Raising(FakePageLocker):
        raising = True

        def lock(self, address: int, size_bytes: int, kind: MemoryKind) -> str | None:
            if self.raising:
                raise KeyboardInterrupt
            return super().lock(address, size_bytes, kind)

    driver = Raising()
    group = make_group()
    source = LayerSource(group, PageLocker(driver, ledger))
    source.hold(group)
    with pytest.raises(KeyboardInterrupt):
        ship(source, group)
    assert ledger.used_bytes == 0
    driver.raising = False
    ship(source, group)
    pages = locked_pages(driver)
    source.release_locks()
    assert pages == pages_of(group)


def test_bytes_that_are_no_longer_the_weights_are_refused(
    make_group: Callable[..., WeightGroup], source_over: Callable[..., LayerSource]
) -> None:
    group = make_group()
    source = source_over(group)
    group.weights[1].home.data = torch.zeros_like(group.weights[1].home)
    with pytest.raises(StateError, match=r"weight 0\.w\d\d was given other memory since it was"):
        ship(source, group)


# Reading ahead


def test_only_what_is_cold_is_read_ahead_and_only_while_the_host_has_room(
    make_group: Callable[..., WeightGroup],
    source_over: Callable[..., LayerSource],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = make_group(copies=("w05",))
    source = source_over(group)
    advised: list[tuple[int, int]] = []
    cached = [False]
    free = [1 << 40]

    class Limits:
        @property
        def available_bytes(self) -> int:
            return free[0]

    monkeypatch.setattr(FileMapping, "is_cached", lambda *_: cached[0])
    monkeypatch.setattr(FileMapping, "advise", lambda _, *span: advised.append(span))
    monkeypatch.setattr("offload_core.run.source.host_limits", Limits)
    part = group.part(range(3, len(group.weights)))
    in_file = [run for run in part.runs if run.mapping is not None]
    want = [(run.address - run.mapping.base_address, run.size_bytes) for run in in_file]  # type: ignore[union-attr]
    source.read_ahead(part)
    assert advised == want
    ship(source, part)
    assert advised == want * 2
    free[0] = 1
    source.read_ahead(part)
    free[0], cached[0] = 1 << 40, True
    source.read_ahead(part)
    assert advised == want * 2
    assert want
    # What is locked is in memory and stays there; what is not is read as ever.
    cached[0] = False
    source.hold(part, file_limit_bytes=PAGE_BYTES)
    ship(source, part)
    assert source.locked_bytes == PAGE_BYTES < want[0][1]
    advised.clear()
    source.read_ahead(part)
    assert advised == want
    source.hold(part)
    ship(source, part)
    advised.clear()
    source.read_ahead(part)
    assert advised == []


# Recodes


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(128, 4).bfloat16())  # 1024 bytes
        self.b = nn.Parameter(torch.randn(100).bfloat16())  # 200 bytes
        self.c = nn.Parameter(torch.randn(7).bfloat16())
        self.d = nn.Parameter(torch.randn(5))  # as wide as nothing else here
        self.e = nn.Parameter(torch.randn(3).half())
        self.f = nn.Parameter(torch.empty(0, 2).bfloat16())
        self.g = nn.Parameter(torch.arange(4, dtype=torch.int16), requires_grad=False)

    def forward(self) -> None:
        """What cannot be called is no layer."""


def test_neighbours_that_are_rounded_alike_share_one_span(
    mapped: Callable[..., FileMapping],
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Mixed()])
    mapping = mapped(model)
    wanted = {f"0.{name}": torch.float16 for name in "abcdefg"}
    group = inventory_of(model, mapping, device_dtypes=wanted).layers[0]
    used = {weight.name[2:]: weight.device_dtype for weight in group.weights}
    assert used["d"] is torch.float32, "another width"
    assert used["g"] is torch.int16, "no floating number"
    assert [used[name] for name in "abcef"] == [torch.float16] * 5
    memory = torch.zeros(group.layout.size_bytes, dtype=torch.uint8)
    recodes = group.recodes(memory)
    assert {(recode.stored, recode.used) for recode in recodes} == {(torch.bfloat16, torch.float16)}
    covered = set()
    for recode in recodes:
        start = recode.memory.data_ptr() - memory.data_ptr()
        covered.update(range(start, start + recode.memory.numel()))
    placed = dict(zip((w.name[2:] for w in group.weights), group.layout.offsets, strict=True))
    sizes = {w.name[2:]: w.extent.size_bytes for w in group.weights}
    for name in "abc":
        assert set(range(placed[name], placed[name] + sizes[name])) <= covered
    for name in "deg":
        assert not set(range(placed[name], placed[name] + sizes[name])) & covered
    order = "".join(sorted("abcdeg", key=placed.__getitem__))
    runs = [run for run in re.split("[deg]", order) if run]
    assert len(recodes) == len(runs)
    assert group.part([]).recodes(memory) == []


def test_nothing_is_rounded_where_nothing_was_asked_for(
    mapped: Callable[..., FileMapping],
) -> None:
    model = nn.ModuleList([Mixed()])
    mapping = mapped(model)
    for asked in (None, {}, {"another.name": torch.float16}, {"0.a": torch.bfloat16}):
        group = inventory_of(model, mapping, device_dtypes=asked).layers[0]
        assert group.recodes(torch.zeros(group.layout.size_bytes, dtype=torch.uint8)) == []
        assert all(weight.device_dtype is weight.home.dtype for weight in group.weights)


def test_eight_bit_numbers_are_never_rounded_into_each_other() -> None:
    model = nn.ModuleList([Stack(())])
    model[0].w = nn.Parameter(torch.zeros(8).to(torch.float8_e4m3fn), requires_grad=False)
    found = take_inventory(model, find_block_lists(model), [], {"0.w": torch.float8_e5m2}).layers[0]
    assert found.weights[0].device_dtype is torch.float8_e4m3fn


def test_pieces_keep_what_they_read_alive(
    make_group: Callable[..., WeightGroup], source_over: Callable[..., LayerSource]
) -> None:
    group = make_group(copies=("w04",))
    pieces = source_over(group).copies_into(
        torch.zeros(group.layout.size_bytes, dtype=torch.uint8), group
    )
    want = [bytes(piece.source.tolist()) for piece in pieces]
    addresses = [(piece.source.data_ptr(), piece.source.numel()) for piece in pieces]
    del group
    for (address, size), expected in zip(addresses, want, strict=True):
        assert ctypes.string_at(address, size) == expected
