from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.hold import (
    DEVICE_GRAIN_BYTES,
    HOST_GRAIN_BYTES,
    DeviceHold,
    HoldError,
    HostHold,
    system_meminfo,
)

ROOT = Path(__file__).parents[2]
MIB = 2**20
GIB = 2**30


class FakeCard:
    """As much of torch as a hold uses; a block gives its bytes back when it is dropped."""

    uint8 = "uint8"

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.others_bytes = 0
        self.held_bytes = 0
        self.cuda = SimpleNamespace(
            synchronize=lambda: None, mem_get_info=lambda: (self.free_bytes, total_bytes)
        )

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.others_bytes - self.held_bytes

    def empty(self, size: int, dtype: str, device: str) -> Any:
        assert (dtype, device) == ("uint8", "cuda")
        assert size % DEVICE_GRAIN_BYTES == 0
        card = self

        class Block:
            def __init__(self) -> None:
                card.held_bytes += size

            def __del__(self) -> None:
                card.held_bytes -= size

        return Block()


@pytest.mark.parametrize("wanted", [12 * GIB, GIB, 12 * GIB + 5, 3 * MIB])
def test_exactly_the_wanted_memory_is_left(wanted: int) -> None:
    card = FakeCard(139 * GIB + 7 * MIB)
    hold = DeviceHold(card)
    left = hold.leave(wanted)
    assert left == card.free_bytes
    assert wanted <= left < wanted + DEVICE_GRAIN_BYTES
    hold.release()


def test_hold_gives_back_when_more_is_to_be_left() -> None:
    card = FakeCard(64 * GIB)
    hold = DeviceHold(card)
    hold.leave(GIB)
    card.others_bytes = 3 * GIB
    assert 12 * GIB <= hold.leave(12 * GIB) < 12 * GIB + DEVICE_GRAIN_BYTES
    hold.release()
    assert card.held_bytes == 0


def test_too_full_a_card_is_an_error_with_the_figure() -> None:
    card = FakeCard(8 * GIB)
    with pytest.raises(HoldError, match=r"only 8\.00 GiB of the device is free"):
        DeviceHold(card).leave(12 * GIB)


def meminfo_of(hold: list[HostHold], total: list[int]) -> Callable[[], dict[str, int]]:
    """A machine on which nothing but the hold uses memory."""

    def read() -> dict[str, int]:
        held = sum(map(len, hold[0]._blocks)) if hold else 0
        return {"MemTotal": total[0], "MemAvailable": total[0] - held}

    return read


def test_host_memory_is_held_until_the_rest_is_left() -> None:
    holds: list[HostHold] = []
    hold = HostHold(meminfo_of(holds, [300 * MIB]))
    holds.append(hold)
    assert 100 * MIB <= hold.leave(100 * MIB) < 100 * MIB + HOST_GRAIN_BYTES
    hold.release()
    with pytest.raises(HoldError, match=r"only 0\.29 GiB of host memory"):
        hold.leave(GIB)


def test_host_memory_that_grows_later_is_held_too() -> None:
    holds: list[HostHold] = []
    total = [300 * MIB]
    read = meminfo_of(holds, total)
    hold = HostHold(read)
    holds.append(hold)
    left = hold.leave(200 * MIB)
    total[0] += 80 * MIB
    hold.follow_growth()
    assert read()["MemAvailable"] == left
    hold.release()


def test_meminfo_is_in_bytes(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       2 kB\nMemAvailable:   1 kB\n")
    assert system_meminfo(file) == {"MemTotal": 2048, "MemAvailable": 1024}
    with pytest.raises(HoldError, match="only held on Linux"):
        system_meminfo(tmp_path / "none")


def test_process_answers_each_line_and_ends_with_its_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.hold"],
        cwd=ROOT,
        input="release\nsing\nleave-free many\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    released, unknown, odd = done.stdout.splitlines()
    assert released == "ok released"
    assert unknown == "error no such command: 'sing'"
    assert odd.startswith("error ")
