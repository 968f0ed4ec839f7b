"""ComfyUI starts with the pack as it does without: quickly, silently, with nothing replaced."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devtools.comfyui_host import ComfyUIHost
from devtools.paths import PACK_NAME, Paths

SCRIPT = Path(__file__).parent / "scripts" / "import_pack.py"
NODES = {"CourierBudget", "CourierLoadDiffusionModel", "CourierStatus"}
IMPORT_SECONDS = 0.2
NOT_PART_OF_THE_PACK = (".*", "__pycache__", "tests", "devtools", "bench", "node_modules")

Run = Callable[..., subprocess.CompletedProcess[str]]


def import_report(run: Run, folder: Path, *args: str, **options: Any) -> dict[str, Any]:
    report_file = folder / "report.json"
    run(SCRIPT, str(report_file), *args, **options)
    return dict(json.loads(report_file.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def plain_report(run_in_comfyui: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return import_report(run_in_comfyui, tmp_path_factory.mktemp("import"))


def test_server_lists_the_pack_s_nodes(server: ComfyUIHost) -> None:
    listed = server.client.request("/object_info")
    assert listed.keys() >= NODES
    assert {listed[name]["category"].split("/")[0] for name in NODES} == {"courier"}


def test_server_reports_no_failed_import(server: ComfyUIHost) -> None:
    lines = [line for line in server.log_text().splitlines() if line.rstrip().endswith(PACK_NAME)]
    assert lines, "the log names no import time of the pack"
    assert not [line for line in lines if "IMPORT FAILED" in line], server.log_tail()


def test_import_is_quick(plain_report: dict[str, Any]) -> None:
    # The quickest of several: the first may have to compile, and the machine may be busy.
    assert min(plain_report["seconds"]) < IMPORT_SECONDS


def test_import_starts_no_thread(plain_report: dict[str, Any]) -> None:
    assert plain_report["threads"] == []


def test_import_prints_and_logs_nothing(plain_report: dict[str, Any]) -> None:
    assert plain_report["written"] == ""
    assert plain_report["logged"] == []


def test_import_replaces_nothing_of_comfyui(plain_report: dict[str, Any]) -> None:
    assert plain_report["changed_by_import"] == []


def test_entry_point_replaces_nothing_of_comfyui(plain_report: dict[str, Any]) -> None:
    assert plain_report["changed_by_entrypoint"] == []


def test_pack_has_its_own_core_and_takes_no_top_level_name(plain_report: dict[str, Any]) -> None:
    assert not plain_report["core_by_plain_name"]


def test_import_works_with_a_console_that_knows_no_unicode(
    run_in_comfyui: Run, tmp_path: Path
) -> None:
    report = import_report(
        run_in_comfyui, tmp_path, environment={"PYTHONIOENCODING": "cp1252:strict"}
    )
    assert set(report["nodes"]) >= NODES
    assert report["written"] == ""


def test_import_works_with_closed_stdout(run_in_comfyui: Run, tmp_path: Path) -> None:
    report = import_report(run_in_comfyui, tmp_path, "--closed-stdout")
    assert set(report["nodes"]) >= NODES


def test_import_works_from_a_folder_with_spaces_and_a_dash(
    run_in_comfyui: Run, courier_checkout: Paths, tmp_path: Path
) -> None:
    folder = tmp_path / "my custom nodes" / "comfyui courier-0.1 (copy)"
    ignore = shutil.ignore_patterns(*NOT_PART_OF_THE_PACK)
    shutil.copytree(courier_checkout.root, folder, ignore=ignore)
    report = import_report(run_in_comfyui, tmp_path, str(folder))
    assert set(report["nodes"]) >= NODES
