"""Devices: the backend protocol, CPU, CUDA and an exported fake."""

from __future__ import annotations

import torch

from .backend import (
    CopyPiece,
    CudaTraits,
    DeviceBackend,
    DeviceEvent,
    DeviceMemory,
    Recode,
)
from .cpu import CpuBackend
from .fake import POISON, FakeBackend, FakeEvent, FakePageLocker
from .low_rank import LowRank, Term


def backend_for(device: torch.device, limit_bytes: int | None = None) -> DeviceBackend:
    """The backend that drives ``device``. Other accelerators use the synchronous path.

    ``limit_bytes`` caps what may be allocated, where the backend can; a test setting.
    """
    if device.type == "cuda":
        from .cuda import CudaBackend

        return CudaBackend(device, limit_bytes)
    if device.type == "cpu":
        return CpuBackend(limit_bytes)
    from .synchronous import SynchronousBackend

    return SynchronousBackend(device)


def cuda_is_available() -> bool:
    """Whether torch finds a CUDA (or ROCm) device here."""
    from .cuda import is_available

    return is_available()


def cuda_traits() -> CudaTraits:
    """What a plan for a CUDA device needs to know of it; no device is asked."""
    from .cuda import CudaBackend, most_lanes

    unit_bytes = CudaBackend.staging_unit_bytes
    return CudaTraits(most_lanes() * unit_bytes, unit_bytes, CudaBackend.footprint)


def cuda_link_bytes_per_second() -> float:
    """Measured: page-locked copies of 256 MiB to the first CUDA device, after one that warms up."""
    from .cuda import link_bytes_per_second

    return link_bytes_per_second()


__all__ = [
    "POISON",
    "CopyPiece",
    "CpuBackend",
    "CudaTraits",
    "DeviceBackend",
    "DeviceEvent",
    "DeviceMemory",
    "FakeBackend",
    "FakeEvent",
    "FakePageLocker",
    "LowRank",
    "Recode",
    "Term",
    "backend_for",
    "cuda_is_available",
    "cuda_link_bytes_per_second",
    "cuda_traits",
]
