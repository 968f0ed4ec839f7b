from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from devtools.console import DevError, Progress
from devtools.demo import WORKFLOW, read_workflow, report
from devtools.paths import checkout

STATUS: dict[str, Any] = {
    "version": 1,
    "models": [
        {
            "name": "wan",
            "state": "awake",
            "unknown": [1],
            "budgets": {"device_bytes": 4 * 2**20, "host_bytes": None},
            "measured": {"device_peak_bytes": 3 * 2**20, "host_locked_bytes": 2**20},
            "counts": {"resident": 1, "mapped": 1, "pinned": 0},
            "bytes": {"resident": 2**20, "mapped": 2**21},
            "layers": [
                {"name": "blocks.0", "bytes": 2**20, "placement": "resident", "reason": "fits"},
                {"name": "blocks.1", "bytes": 2**21, "placement": "mapped", "in_place": True}
                | {"resident_bytes": 2**16},
            ],
        }
    ],
}


def test_report_shows_every_layer_and_the_peaks() -> None:
    lines = report(STATUS)
    text = "\n".join(lines)
    assert "wan: awake, 1 resident (1.0 MiB), 1 mapped (2.0 MiB)" in lines
    assert "blocks.0  1,048,576         0  resident   -         fits" in text
    assert "blocks.1  2,097,152    65,536  mapped     yes" in text
    assert "device, peak       4.0 MiB   3.0 MiB" in text
    assert "host, page-locked     none   1.0 MiB" in text


def test_report_bears_a_status_that_says_little() -> None:
    assert report({"models": [{}]})[1] == "?: ?, no layers"


def test_shipped_workflow_is_in_api_form_and_has_our_nodes() -> None:
    prompt = read_workflow(checkout().root / WORKFLOW)
    kinds = {node["class_type"] for node in prompt.values()}
    assert kinds >= {"CourierBudget", "CourierLoadDiffusionModel", "CourierStatus"}


@pytest.mark.parametrize("content", [{"nodes": [], "links": []}, {}, [1]])
def test_workflow_in_another_form_is_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DevError, match="no workflow in API form"):
        read_workflow(path)


def test_workflow_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text("{")
    with pytest.raises(DevError, match="cannot read the workflow"):
        read_workflow(tmp_path / "w.json")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_pipe_is_plain_lines() -> None:
    out = io.StringIO()
    with Progress("Work", 2, out) as progress:
        progress.advance("a")
        progress.advance("b")
    first, last = out.getvalue().splitlines()
    assert first == "Work ..."
    assert last.startswith("Work: done in ")
    assert "\r" not in out.getvalue()


def test_progress_on_a_terminal_is_a_bar() -> None:
    out = Terminal()
    with Progress("Work", 2, out) as progress:
        progress.advance("a")
    assert "[##############..............] 1/2" in out.getvalue()


def test_failed_step_says_so() -> None:
    out = io.StringIO()
    with pytest.raises(ZeroDivisionError), Progress("Work", stream=out):
        _ = 1 / 0
    assert "Work: failed in " in out.getvalue()
