"""Peaks of what only shows itself when looked at: the driver's free memory, and RssAnon."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICE_SECONDS = 0.002
HOST_SECONDS = 0.05


class PeakWatch:
    """Reads a figure again and again from a thread of its own, between enter and exit.

    Threads: ``take`` from the one that entered.
    """

    def __init__(self, read: Callable[[], int], seconds: float, name: str) -> None:
        self._read = read
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=name)
        self._lock = threading.Lock()
        self._peak = 0  # guarded by the lock

    def __enter__(self) -> PeakWatch:
        self._peak = self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def take(self) -> int:
        """The highest figure since the last ``take`` (or the start); begins anew at the present."""
        now = self._read()
        with self._lock:
            peak, self._peak = max(self._peak, now), now
        return peak

    def _watch(self) -> None:
        while not self._ended.wait(self._seconds):
            now = self._read()
            with self._lock:
                self._peak = max(self._peak, now)


def rss_anon_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Anonymous memory of this process in RAM; None where the system does not tell."""
    try:
        text = status.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None


class Peaks:
    """Both watches and torch's own peaks. Without CUDA, or without /proc, a figure is None.

    The driver's figure is what was taken since this object was made, by whomever: nobody else may
    use the card meanwhile. The context of this process must be there before, so that it is not
    counted.
    """

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda if torch.cuda.is_available() else None
        self._device: PeakWatch | None = None
        self._host: PeakWatch | None = None
        self.free_bytes_before: int | None = None
        self.anon_bytes_before = rss_anon_bytes()
        if self._cuda is not None:
            cuda = self._cuda
            before = self.free_bytes_before = int(cuda.mem_get_info()[0])
            read = lambda: before - int(cuda.mem_get_info()[0])  # noqa: E731
            self._device = PeakWatch(read, DEVICE_SECONDS, "bench-device")
        if self.anon_bytes_before is not None:
            self._host = PeakWatch(lambda: rss_anon_bytes() or 0, HOST_SECONDS, "bench-host")

    def __enter__(self) -> Peaks:
        for watch in (self._device, self._host):
            if watch is not None:
                watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for watch in (self._device, self._host):
            if watch is not None:
                watch.__exit__()

    def take(self) -> dict[str, int | None]:
        """Fields of ``records.PeakRecord`` since the last call; the next peaks begin here."""
        peaks: dict[str, int | None] = {
            "device_bytes": self._device.take() if self._device is not None else None,
            "anon_bytes": self._host.take() if self._host is not None else None,
            "reserved_bytes": None,
            "allocated_bytes": None,
        }
        if self._cuda is not None:
            peaks["reserved_bytes"] = int(self._cuda.max_memory_reserved())
            peaks["allocated_bytes"] = int(self._cuda.max_memory_allocated())
            self._cuda.reset_peak_memory_stats()
        return peaks
