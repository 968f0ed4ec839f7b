"""The suite from end to end on this machine, with a real ComfyUI and a model of some megabytes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench.options import Settings, read_report
from bench.records import Report
from bench.suite import run_suite
from bench.units import Latent, ModelShape
from devtools.comfyui_install import choose_program
from devtools.paths import checkout

SHAPE = ModelShape(8, 128, 512)


def settings(folder: Path, only: tuple[str, ...], merge: tuple[Report, ...] = ()) -> Settings:
    program = choose_program(checkout())
    return Settings(
        model=folder / "model.safetensors",
        shape=SHAPE,
        comfyui=program.path,
        python=str(program.python),
        comfyui_args="",
        newer=None,
        newer_python="",
        only=only,
        latents=(Latent(1, 16, 16),),
        steps=4,
        runs=1,
        cfg=1.0,
        lora_rank=0,
        free_gib=0.0,
        device_gib=0.004,
        budgets_gib=(4.0,),
        host_available_gib=1.0,
        row_seconds=120.0,
        stop_after_seconds=None,
        merge=merge,
        out=folder / "out",
        name="test",
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    folder = tmp_path_factory.mktemp("suite")
    return folder, run_suite(settings(folder, ("resident", "courier-0", "budget-4")), "the command")


def test_rows_are_measured_and_equal(first: tuple[Path, Report]) -> None:
    rows = {row.name: row for row in first[1].rows}
    for name in ("resident", "courier-0"):
        assert rows[name].contender is not None, (rows[name].problem, rows[name].detail)
        assert rows[name].equal == {"1x16x16": True}
    streamed = rows["courier-0"].contender.runs[0].streamed_bytes
    assert streamed is not None
    assert 0 < streamed < (first[0] / "model.safetensors").stat().st_size


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_memory_of_the_process_is_followed(first: tuple[Path, Report]) -> None:
    resident = first[1].rows[0].contender
    assert resident is not None
    assert resident.anon_bytes_before is not None
    assert resident.load_peak.anon_bytes >= resident.anon_bytes_before


def test_results_are_a_page_and_json_without_folders_of_this_machine(
    first: tuple[Path, Report],
) -> None:
    page, data = sorted((first[0] / "out").iterdir(), key=lambda path: path.suffix, reverse=True)
    assert (page.suffix, data.suffix) == (".md", ".json")
    assert json.loads(data.read_text())["commands"] == ["the command"]
    for text in (page.read_text(), data.read_text()):
        assert str(checkout().root) not in text
        assert f"{os.sep}courier-bench-" not in text


def test_later_call_adds_its_rows_and_uses_the_resident_row(first: tuple[Path, Report]) -> None:
    folder, _ = first
    earlier = read_report(next((folder / "out").glob("*.json")))
    merged = run_suite(settings(folder, ("courier-ample",), (earlier,)), "again")
    rows = {row.name: row for row in merged.rows}
    assert list(rows) == ["resident", "courier-ample", "courier-0", "budget-4"]
    assert rows["courier-ample"].equal == {"1x16x16": True}
    assert tuple(merged.commands) == ("the command", "again")
