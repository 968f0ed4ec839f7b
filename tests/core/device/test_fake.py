"""The fake device itself: it lies as hardware does, and it sees what must not happen."""

from __future__ import annotations

import pytest
import torch

from offload_core.device import POISON, CopyPiece, FakeBackend, Recode
from offload_core.host import MemoryKind
from offload_core.values import DeviceMemoryError


def piece(destination: torch.Tensor, value: int = 7) -> CopyPiece:
    return CopyPiece(destination, torch.full_like(destination, value), False)


def test_fresh_memory_is_poison_and_aligned() -> None:
    fake = FakeBackend()
    memory = fake.allocate(1000)
    assert memory.shape == (1000,)
    assert memory.data_ptr() % 256 == 0
    assert bool((memory == POISON).all())
    assert bool(memory[:512].view(torch.bfloat16).isnan().all())
    assert fake.allocated_bytes == fake.peak_bytes == 1000


def test_a_copy_moves_nothing_until_it_is_told_or_waited_for() -> None:
    fake = FakeBackend()
    one, other = fake.allocate(256), fake.allocate(256)
    fake.ship([piece(one)], None)
    second = fake.ship([piece(other, 8)], None).result(0)
    assert fake.pending == 2
    assert int(one[0]) == POISON
    assert fake.complete(1) == 1
    assert (int(one[0]), int(other[0])) == (7, POISON)
    fake.wait(second)
    assert int(other[0]) == 8
    assert fake.pending == 0


def test_waiting_for_a_later_copy_does_the_earlier_ones_first() -> None:
    fake = FakeBackend()
    memory = fake.allocate(256)
    fake.ship([piece(memory, 1)], None)
    fake.wait(fake.ship([piece(memory, 2)], None).result(0))
    assert int(memory[0]) == 2


def test_memory_is_poisoned_when_its_last_reference_goes() -> None:
    fake = FakeBackend()
    memory = fake.allocate(256)
    memory.fill_(1)
    # The same bytes without a reference to the tensor, as a kernel that runs too late has them.
    late = torch.empty(0, dtype=torch.uint8)
    late.set_(memory.untyped_storage(), memory.storage_offset(), (256,), (1,))
    del memory
    assert bool((late == POISON).all())
    assert fake.allocated_bytes == 0
    assert fake.violations == []


def test_overwriting_memory_in_use_is_a_violation() -> None:
    fake = FakeBackend()
    memory = fake.allocate(256)
    fake.wait(fake.ship([piece(memory)], None).result(0))
    fake.ship([piece(memory)], None)
    assert fake.violations == ["a copy into memory that is in use"]


def test_overwriting_before_the_last_reader_is_a_violation_and_behind_it_is_not() -> None:
    fake = FakeBackend()
    memory = fake.allocate(256)
    fake.wait(fake.ship([piece(memory)], None).result(0))
    early = fake.mark()
    fake.wait(fake.ship([piece(memory)], early).result(0))
    reader = fake.mark()
    assert fake.violations == []
    fake.ship([piece(memory)], early)
    assert fake.violations == ["a copy that does not wait for the memory's last reader"]
    fake.settle(reader)


def test_freeing_memory_that_is_read_is_a_violation_and_after_its_event_is_not() -> None:
    fake = FakeBackend()
    for settled in (True, False):
        memory = fake.allocate(256)
        fake.wait(fake.ship([piece(memory)], None).result(0))
        reader = fake.mark()
        if settled:
            fake.settle(reader)
        del memory
    assert fake.violations == ["memory freed while work that reads it may still run"]


def test_settling_a_later_mark_passes_the_earlier_ones() -> None:
    fake = FakeBackend()
    memory = fake.allocate(256)
    fake.wait(fake.ship([piece(memory)], None).result(0))
    fake.mark()
    fake.settle(fake.mark())
    del memory
    assert fake.violations == []


def test_a_copy_into_freed_memory_is_a_violation() -> None:
    fake = FakeBackend()
    fake.ship([piece(torch.zeros(256, dtype=torch.uint8))], None)
    assert fake.violations == ["a copy into memory that was freed"]


def test_the_capacity_and_a_told_failure_refuse_with_the_bytes() -> None:
    fake = FakeBackend(capacity_bytes=1000)
    with pytest.raises(DeviceMemoryError, match="the fake device is full") as refused:
        fake.allocate(1001)
    assert refused.value.requested_bytes == 1001
    fake.fail_allocation = 1
    kept = fake.allocate(100)
    with pytest.raises(DeviceMemoryError, match="was told to fail here"):
        fake.allocate(100)
    assert fake.memory().free_bytes == 900
    assert fake.memory().used_bytes == kept.numel()


def test_the_locker_refuses_what_it_was_told_and_what_is_locked() -> None:
    locker = FakeBackend().locker
    kind = MemoryKind.SHARED_READ_ONLY
    assert locker.lock(4096, 4096, kind) is None
    assert locker.lock(4096, 4096, kind) == "the range is locked already"
    locker.refuse_after = 1
    assert locker.lock(8192, 4096, kind) == "the fake system has no page locks left"
    locker.unlock(4096, 4096)
    assert locker.peak_bytes == 4096


def test_numbers_are_rounded_on_the_compute_side_and_lie_there_for_its_work() -> None:
    fake = FakeBackend()
    memory = fake.allocate(512)
    values = torch.randn(256).bfloat16()
    copy = CopyPiece(memory, values.view(torch.uint8), False)
    fake.wait(fake.ship([copy], None).result(0))
    fake.recode([Recode(memory, torch.bfloat16, torch.float16)])
    assert torch.equal(memory.view(torch.float16), values.to(torch.float16))
    fake.settle(fake.mark())
    assert fake.violations == []


def test_what_a_run_takes_and_what_is_refused_are_a_tests_to_say() -> None:
    fake = FakeBackend()
    fake.start_activation_peak()
    assert fake.activation_peak_bytes() is None
    fake.activations_bytes = 12
    assert fake.activation_peak_bytes() == 12
    assert fake.is_out_of_memory(DeviceMemoryError("full", 1))
    assert not fake.is_out_of_memory(MemoryError())
    assert (fake.staging_bytes, fake.staging_unit_bytes, fake.footprint.of(7)) == (0, 1, 7)


def test_a_piece_of_another_shape_is_refused_and_never_broadcast() -> None:
    with pytest.raises(ValueError, match=r"a piece of shape \(1,\) cannot fill \(256,\)"):
        CopyPiece(torch.zeros(256), torch.zeros(1), False)
