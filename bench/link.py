"""What the card is and how fast page-locked memory reaches it: one line of JSON.

``python3 -m bench.link``. In a process of its own, so that no CUDA context stays behind.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from bench.units import GIB

REPEATS = 9


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


if __name__ == "__main__":
    print(json.dumps(measure()), flush=True)
    sys.exit(0)
