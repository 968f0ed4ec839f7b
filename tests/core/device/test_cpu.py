"""The CPU as a device, and the synchronous path of the accelerators without one of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offload_core.device import CopyPiece, CpuBackend, DeviceBackend, Recode, backend_for
from offload_core.device.synchronous import SynchronousBackend
from offload_core.host import FileMapping, MemoryKind, maps_lookup, open_mapping
from offload_core.values import DeviceMemoryError


@pytest.fixture
def checkpoint_mapping(tmp_path: Path) -> FileMapping:
    save_file({"a": torch.zeros(10_000)}, tmp_path / "a.safetensors")
    return open_mapping(tmp_path / "a.safetensors")


@pytest.mark.parametrize("backend", [CpuBackend(), SynchronousBackend(torch.device("cpu"))])
def test_a_copy_is_done_when_ship_returns(backend: DeviceBackend) -> None:
    backend.enter_thread()
    memory = backend.allocate(1000)
    assert memory.shape == (1000,)
    source = torch.arange(1000).to(torch.uint8)
    event = backend.ship([CopyPiece(memory, source, False)], backend.mark()).result(0)
    assert torch.equal(memory, source)
    backend.wait(event)
    backend.settle(event)
    backend.start_activation_peak()
    assert backend.activation_peak_bytes() is None
    assert backend.memory().total_bytes >= backend.memory().free_bytes > 0
    backend.reserve_staging(0)
    backend.trim()
    backend.close()


@pytest.mark.parametrize("backend", [CpuBackend(), SynchronousBackend(torch.device("cpu"))])
def test_what_a_machine_without_a_driver_answers(
    backend: DeviceBackend, checkpoint_mapping: FileMapping
) -> None:
    assert (backend.staging_bytes, backend.staging_unit_bytes) == (0, 1)
    assert [backend.footprint.of(size) for size in (0, 1, 1 << 40)] == [0, 1, 1 << 40]
    assert backend.probe_locks(checkpoint_mapping) == backend.lock_refusal
    # Their errors are plain ones: a pass that failed is not tried again on a guess.
    for error in (RuntimeError("out of memory"), MemoryError(), DeviceMemoryError("full", 1)):
        assert backend.is_out_of_memory(error) is False


@pytest.mark.parametrize("backend", [CpuBackend(), SynchronousBackend(torch.device("cpu"))])
@pytest.mark.parametrize(
    ("stored", "used"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)]
)
@pytest.mark.parametrize("count", [1, 7, 4097, 65536])
def test_numbers_are_rounded_as_to_rounds_them(
    backend: DeviceBackend, stored: torch.dtype, used: torch.dtype, count: int
) -> None:
    """Every bit pattern there is, infinities, denormals and all."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)[-count:]
    memory = backend.allocate(2 * count + 512)
    memory.fill_(7)
    there = memory[256 : 256 + 2 * count]
    source = patterns.view(torch.uint8)
    backend.wait(backend.ship([CopyPiece(there, source, False)], None).result(0))
    backend.recode([])
    assert torch.equal(there, source)
    backend.recode([Recode(there, stored, used)])
    want = patterns.view(stored).to(used)
    assert torch.equal(there.view(torch.int16), want.view(torch.int16))
    assert bool((memory[:256] == 7).all() and (memory[256 + 2 * count :] == 7).all())


def test_cpu_memory_is_anonymous_and_aligned() -> None:
    memory = CpuBackend().allocate(1 << 20)
    assert memory.data_ptr() % 256 == 0
    line = maps_lookup(memory.data_ptr())
    assert line is not None
    assert line.path in ("", "[heap]")


def test_memory_that_the_system_does_not_have_is_refused_in_words() -> None:
    with pytest.raises(DeviceMemoryError, match="of memory left; lower the device budget"):
        CpuBackend().allocate(1 << 60)
    with pytest.raises(DeviceMemoryError, match=r"cpu has no .* left; lower the device budget"):
        SynchronousBackend(torch.device("cpu")).allocate(1 << 60)


def test_each_kind_of_device_gets_its_backend() -> None:
    assert isinstance(backend_for(torch.device("cpu")), CpuBackend)
    other = backend_for(torch.device("mps"))
    assert isinstance(other, SynchronousBackend)
    assert other.lock_refusal == "mps devices take no page-locked memory"
    refusal = other.page_locker().lock(4096, 4096, MemoryKind.ANONYMOUS)
    assert refusal == "this kind of device takes no page-locked memory from us"
