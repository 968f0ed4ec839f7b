from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

from bench.watch import Peaks, PeakWatch, rss_anon_bytes


def test_peak_between_two_looks_is_seen_and_then_forgotten() -> None:
    figure, seen = [1], threading.Event()

    def read() -> int:
        if figure[0] == 9 and threading.current_thread() is not threading.main_thread():
            seen.set()
        return figure[0]

    with PeakWatch(read, 0.001, "watch") as watch:
        figure[0] = 9
        assert seen.wait(10)
        assert seen.is_set()
        figure[0] = 2
        while watch.take() == 9:
            pass  # the thread may have read the 9 and not yet kept it
        assert watch.take() == 2


def test_anonymous_memory_is_read_in_bytes(tmp_path: Path) -> None:
    file = tmp_path / "status"
    file.write_text("VmRSS:\t  9 kB\nRssAnon:\t   3 kB\n")
    assert rss_anon_bytes(file) == 3072
    assert rss_anon_bytes(tmp_path / "none") is None


def test_card_counts_from_the_beginning() -> None:
    free = [100]
    cuda = SimpleNamespace(
        is_available=lambda: True,
        mem_get_info=lambda: (free[0], 200),
        max_memory_reserved=lambda: 30,
        max_memory_allocated=lambda: 20,
        reset_peak_memory_stats=lambda: None,
    )
    with Peaks(SimpleNamespace(cuda=cuda)) as peaks:
        free[0] = 60
        found = peaks.take()
    assert (found["device_bytes"], found["reserved_bytes"], found["allocated_bytes"]) == (
        40,
        30,
        20,
    )
    assert peaks.free_bytes_before == 100


def test_without_a_card_there_are_no_figures_of_one() -> None:
    with Peaks(SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))) as peaks:
        found = peaks.take()
    assert found["device_bytes"] is found["reserved_bytes"] is None
