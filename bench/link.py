"""What the card is and how fast page-locked memory reaches it: one line of JSON.

``python3 -m bench.link``. In a process of its own, so that no CUDA context stays behind.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.units import GIB, MIB

REPEATS = 9
HOST_PIECE_BYTES = 8 * MIB
HOST_THREADS = (7, 14)
"""The most lanes that Courier has, and twice that. Pieces are as large as the lanes' chunks."""


def measure() -> dict[str, Any]:
    """Facts about torch and the card. Without CUDA, ``cuda`` is False and there is no link."""
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.cuda.is_available()}
    if not torch.cuda.is_available():
        return facts
    properties = torch.cuda.get_device_properties(0)
    rates = _rates(torch)
    return facts | {
        "device": properties.name,
        "device_bytes": properties.total_memory,
        "link_bytes_per_second": statistics.median(rates),
        "link_repeats": rates,
    }


def _rates(torch: Any) -> list[float]:
    """Bytes per second of one GiB, page-locked host memory to the card, repeat by repeat."""
    source = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    source.fill_(1)
    target = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    rates = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(GIB / (begin.elapsed_time(end) / 1000))
    return rates[1:]  # the first wakes the link


def host_copy_rates(
    address: int, size_bytes: int, threads: Sequence[int] = HOST_THREADS
) -> dict[int, float]:
    """Bytes per second from mapped memory to ordinary memory, by the number of threads that copy.

    What is not page-locked reaches the card by way of such copies. Best of two; all of the source
    is touched once before.

    Args:
        address: on a page's border. So are the targets: between unlike places memmove is slower.
    """
    pieces = range(0, size_bytes - HOST_PIECE_BYTES + 1, HOST_PIECE_BYTES)
    pages = mmap.mmap(-1, 2 * max(threads) * HOST_PIECE_BYTES)
    first = ctypes.addressof(ctypes.c_char.from_buffer(pages))

    def copy(thread: int, count: int) -> None:
        targets = itertools.cycle(first + (2 * thread + i) * HOST_PIECE_BYTES for i in range(2))
        for start, target in zip(pieces[thread::count], targets, strict=False):
            ctypes.memmove(target, address + start, HOST_PIECE_BYTES)

    def seconds(count: int) -> float:
        with ThreadPoolExecutor(count) as pool:
            started = time.perf_counter()
            list(pool.map(copy, range(count), [count] * count))
            return time.perf_counter() - started

    if not pieces:
        return {}
    seconds(max(threads))
    copied = len(pieces) * HOST_PIECE_BYTES
    return {count: copied / min(seconds(count), seconds(count)) for count in threads}


if __name__ == "__main__":
    print(json.dumps(measure()), flush=True)
    sys.exit(0)
