"""A second process that leaves others exactly so much device memory, or host memory, as asked.

``python3 -m bench.hold`` obeys one command a line and answers each with one line, ``ok ...`` or
``error ...``:

    leave-free BYTES    hold device memory until the driver counts BYTES free
    leave-host BYTES    hold touched anonymous memory until the system counts BYTES available
    release             give everything back

The end of its input ends it, so it never outlives a parent that died.
"""

from __future__ import annotations

import mmap
import os
import selectors
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.units import GIB, MIB, gib

DEVICE_GRAIN_BYTES = 2 * MIB  # what the driver hands out; no figure is met more closely
HOST_GRAIN_BYTES = 64 * MIB
GROWTH_CHECK_SECONDS = 0.1
_TRIES = 64
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: touch all pages in one call; mmap has no name for it


class HoldError(Exception):
    """The memory asked for is not there; the text has the figures."""


class DeviceHold:
    """Plain allocations on the current CUDA device. Threads: one."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._blocks: list[Any] = []

    def leave(self, free_bytes: int) -> int:
        """Hold until ``free_bytes`` are free. Returns: what the driver counts free then.

        Raises: HoldError if less than that is free with nothing held here.
        """
        for _ in range(_TRIES):
            surplus = self._free() - free_bytes
            if surplus < 0 and not self._blocks:
                raise HoldError(f"only {gib(free_bytes + surplus)} GiB of the device is free")
            if surplus < 0:
                self._blocks.pop()
            elif surplus < DEVICE_GRAIN_BYTES:
                break
            else:
                self._take(surplus)
        return self._free()

    def release(self) -> None:
        self._blocks.clear()

    def _take(self, size_bytes: int) -> None:
        """Halves, so that the last of them come close and giving back one gives back little."""
        size = max(DEVICE_GRAIN_BYTES, size_bytes // 2 // DEVICE_GRAIN_BYTES * DEVICE_GRAIN_BYTES)
        self._blocks.append(self._torch.empty(size, dtype=self._torch.uint8, device="cuda"))

    def _free(self) -> int:
        self._torch.cuda.synchronize()
        return self._torch.cuda.mem_get_info()[0]


class HostHold:
    """Touched anonymous memory. Threads: one.

    On a machine whose memory grows while it is used, what grows after ``leave`` is held too: see
    ``follow_growth``.
    """

    def __init__(self, meminfo: Callable[[], dict[str, int]]) -> None:
        self._meminfo = meminfo
        self._blocks: list[mmap.mmap] = []
        self._total_bytes: int | None = None

    def leave(self, available_bytes: int) -> int:
        """Hold until ``available_bytes`` are left. Returns: what the system counts available then.

        Raises: HoldError if less than that is available with nothing held here.
        """
        self.release()
        before = self._meminfo()["MemAvailable"]
        if before < available_bytes:
            raise HoldError(f"only {gib(before)} GiB of host memory is available")
        while (surplus := self._meminfo()["MemAvailable"] - available_bytes) >= HOST_GRAIN_BYTES:
            self._take(min(surplus, GIB))
        now = self._meminfo()
        self._total_bytes = now["MemTotal"]
        return now["MemAvailable"]

    def follow_growth(self) -> None:
        """Hold what the machine's total grew by since ``leave``."""
        if self._total_bytes is None:
            return
        grown = self._meminfo()["MemTotal"] - self._total_bytes
        if grown >= HOST_GRAIN_BYTES:
            self._take(grown)
            self._total_bytes += grown

    def release(self) -> None:
        self._total_bytes = None
        while self._blocks:
            self._blocks.pop().close()

    def _take(self, size_bytes: int) -> None:
        block = mmap.mmap(-1, size_bytes)
        self._blocks.append(block)
        try:
            block.madvise(_POPULATE_WRITE)
        except OSError:  # a kernel before 5.14
            for offset in range(0, size_bytes, mmap.PAGESIZE):
                block[offset] = 1


def system_meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Bytes by name. Raises: HoldError where the system has no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        raise HoldError("host memory is only held on Linux") from None
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


class Holder:
    """The commands. Threads: one."""

    def __init__(self) -> None:
        self._device: DeviceHold | None = None
        self._host = HostHold(system_meminfo)

    def obey(self, line: str) -> str:
        """One command. Returns: its answer."""
        match line.split():
            case ["leave-free", count]:
                return f"ok free {self._device_hold().leave(int(count))}"
            case ["leave-host", count]:
                return f"ok available {self._host.leave(int(count))}"
            case ["release"]:
                if self._device is not None:
                    self._device.release()
                self._host.release()
                return "ok released"
        raise HoldError(f"no such command: {line.strip()!r}")

    def follow_growth(self) -> None:
        self._host.follow_growth()

    def _device_hold(self) -> DeviceHold:
        if self._device is None:
            # Each allocation goes to the driver as it is: torch's own pools would round it up, and
            # another allocator, chosen for the contenders, would not obey.
            os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                os.environ.pop(name, None)
            import torch

            if not torch.cuda.is_available():
                raise HoldError("there is no CUDA device whose memory could be held")
            self._device = DeviceHold(torch)
        return self._device


def main() -> int:
    holder = Holder()
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while True:
            if not selector.select(GROWTH_CHECK_SECONDS):
                holder.follow_growth()
                continue
            received = os.read(sys.stdin.fileno(), 4096)
            if not received:
                return 0
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                print(_answer(holder, line.decode()), flush=True)


def _answer(holder: Holder, line: str) -> str:
    try:
        return holder.obey(line)
    except (HoldError, ValueError, RuntimeError, OSError) as error:
        return f"error {' '.join(str(error).split())}"


if __name__ == "__main__":
    sys.exit(main())
