"""The self-check: what arrived on the device against what rests on the host.

For support: a driver, a riser or a BIOS setting that corrupts transfers shows as noise in a
picture, and as a named weight here.
"""

from __future__ import annotations

import ctypes

import torch

from ..values import TransferError
from .weights import Weight, WeightGroup

_SAMPLE_BYTES = 4096
_SAMPLES = 4


def check_arrival(group: WeightGroup, memory: torch.Tensor) -> None:
    """Compare a sample of each weight of ``group`` with the bytes it came from.

    Args:
        memory: uint8, 1-d, on the device; everything has arrived and been rounded.
    Raises: TransferError naming the first weight that differs.
    """
    for weight, offset in zip(group.weights, group.layout.offsets, strict=True):
        for start, size in _samples(weight.extent.size_bytes):
            there = memory[offset + start : offset + start + size].cpu()
            if not torch.equal(there, _expected(weight, start, size)):
                raise TransferError(
                    f"layer {group.name}: weight {weight.name} arrived on the device with other "
                    f"bytes than it has on the host ({size} bytes from {start} on); set "
                    "COURIER_IN_PLACE=0 to do without page locks, COURIER_THREAD=0 to do without "
                    "copies beside the computation, and see which of them helps"
                )


def _samples(size_bytes: int) -> list[tuple[int, int]]:
    """(start, size) of the first bytes, the last, and some between; whole 16-byte units."""
    if size_bytes <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, size_bytes)] if size_bytes else []
    last = (size_bytes - _SAMPLE_BYTES) // 16 * 16
    starts = [last * i // (_SAMPLES - 1) // 16 * 16 for i in range(_SAMPLES)]
    return [(start, min(_SAMPLE_BYTES + 16, size_bytes - start)) for start in starts]


def _expected(weight: Weight, start: int, size: int) -> torch.Tensor:
    source = (ctypes.c_ubyte * size).from_address(weight.extent.address + start)
    flat = torch.frombuffer(source, dtype=torch.uint8).clone()
    if weight.device_dtype == weight.home.dtype:
        return flat
    return flat.view(weight.home.dtype).to(weight.device_dtype).view(torch.uint8)
