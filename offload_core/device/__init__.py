"""Devices: the backend protocol, CPU, CUDA and an exported fake."""

from __future__ import annotations

import torch

from .backend import (
    CopyPiece,
    DeviceBackend,
    DeviceEvent,
    DeviceMemory,
    Recode,
)
from .cpu import CpuBackend
from .fake import POISON, FakeBackend, FakeEvent, FakePageLocker


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


__all__ = [
    "POISON",
    "CopyPiece",
    "CpuBackend",
    "DeviceBackend",
    "DeviceEvent",
    "DeviceMemory",
    "FakeBackend",
    "FakeEvent",
    "FakePageLocker",
    "Recode",
    "backend_for",
]
