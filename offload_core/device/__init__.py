"""Devices: the backend protocol, CPU, CUDA and an exported fake."""

from __future__ import annotations

import torch

from .backend import (
    CopyPiece,
    DeviceBackend,
    DeviceEvent,
    DeviceMemory,
)
from .cpu import CpuBackend
from .fake import POISON, FakeBackend, FakeEvent, FakePageLocker


def backend_for(device: torch.device) -> DeviceBackend:
    """The backend that drives ``device``. Other accelerators use the synchronous path."""
    if device.type == "cuda":
        from .cuda import CudaBackend

        return CudaBackend(device)
    if device.type == "cpu":
        return CpuBackend()
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
    "backend_for",
]
