"""The table of sleep and wake."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.sleeping import Cycle, Moment, left_lines, parse, report_lines
from devtools.comfyui_install import choose_program
from devtools.paths import checkout
from devtools.small_models import write_wan

GIB = 2**30


def cycle(level: int = 1, used: tuple[int | None, int | None] = (10 * GIB, GIB)) -> Cycle:
    return Cycle(
        level=level,
        sleep_seconds=0.05,
        wake_seconds=0.4,
        held_bytes=9 * GIB,
        resident_bytes=8 * GIB,
        awake=Moment(used[0], 2**20 * 100),
        asleep=Moment(used[1], 2**20 * 90),
        is_equal=level == 1,
        is_refused=level == 2,
    )


def test_the_share_is_of_what_the_model_held_by_the_drivers_count() -> None:
    assert cycle().freed_share == 1.0
    assert cycle(used=(10 * GIB, 10 * GIB)).freed_share == 0.0
    assert cycle(used=(None, None)).freed_share is None


def test_each_cycle_is_a_row_and_the_link_gives_the_floor() -> None:
    lines = report_lines([cycle(1), cycle(2, (None, None))], 8 * GIB / 0.5)
    assert lines[2] == "| 1 | 0.050 | 0.400 | 9.00 | 100.0% | -10 | NO | yes |"
    assert lines[3] == "| 2 | 0.050 | 0.400 | 9.00 | - | -10 | yes | NO |"
    assert lines[-1].endswith("GB/s): 0.500 s")
    assert len(report_lines([cycle()], None)) == 3


def test_what_the_hosts_threads_copy_stands_beside_it() -> None:
    *_, seven, fourteen = report_lines([cycle()], 8 * GIB / 0.5, {7: 8 * GIB, 14: 16 * GIB})
    assert seven == "resident bytes through memmove by 7 threads (8.6 GB/s): 1.000 s"
    assert fourteen.endswith("14 threads (17.2 GB/s): 0.500 s")


def test_what_level_2_keeps_is_against_the_process_without_the_model() -> None:
    (line,) = left_lines([cycle(1), cycle(2)], Moment(None, 2**20 * 84))
    assert line.endswith("without the model: 6 MiB")
    assert left_lines([cycle(1)], Moment(None, 2**20)) == []
    assert left_lines([cycle(2)], Moment(None, None)) == []


def test_what_is_left_out_is_automatic() -> None:
    options = parse(["model.safetensors", "--device-gib", "12"])
    assert (options.device_gib, options.host_gib, options.rounds) == (12.0, None, 3)


@pytest.mark.parametrize("loader", [(), ("--core",)])
def test_models_of_both_loaders_are_measured(tmp_path: Path, loader: tuple[str, ...]) -> None:
    program, file = choose_program(checkout()), tmp_path / "wan.safetensors"
    write_wan(file, depth=2, width=128, ffn=256)
    done = subprocess.run(
        [str(program.python), "-m", "bench.sleeping", str(file), "--comfyui", str(program.path),
         "--latent", "1x16x16", "--steps", "1", "--rounds", "1", *loader],
        cwd=checkout().root, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kind, *lines = done.stdout.splitlines()
    assert kind == ("ModelPatcher" if loader else "CourierPatcher")
    assert [line.endswith("| yes | yes |") for line in lines[2:4]] == [True, True]
    assert lines[-1] == "two runs with no sleep between them: equal"
