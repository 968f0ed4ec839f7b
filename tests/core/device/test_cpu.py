"""The CPU as a device, and the synchronous path of the accelerators without one of their own."""

from __future__ import annotations

import pytest
import torch

from offload_core.device import CopyPiece, CpuBackend, DeviceBackend, backend_for
from offload_core.device.synchronous import SynchronousBackend
from offload_core.host import maps_lookup
from offload_core.values import DeviceMemoryError


@pytest.mark.parametrize("backend", [CpuBackend(), SynchronousBackend(torch.device("cpu"))])
def test_a_copy_is_done_when_ship_returns(backend: DeviceBackend) -> None:
    backend.enter_thread()
    memory = backend.allocate(1000)
    assert memory.shape == (1000,)
    source = torch.arange(1000).to(torch.uint8)
    event = backend.ship([CopyPiece(memory, source, False)], backend.mark())
    assert torch.equal(memory, source)
    backend.wait(event)
    backend.settle(event)
    backend.start_activation_peak()
    assert backend.activation_peak_bytes() is None
    assert backend.memory().total_bytes >= backend.memory().free_bytes > 0
    backend.reserve_staging(0)
    backend.close()


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
    refusal = other.page_locker().lock(4096, 4096)
    assert refusal == "this kind of device takes no page-locked memory from us"
