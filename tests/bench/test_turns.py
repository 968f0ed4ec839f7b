"""Courier and ComfyUI's own loading in turns."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.turns import Turns, report_lines
from devtools.comfyui_install import choose_program
from devtools.paths import checkout
from devtools.small_models import write_wan


def test_a_ratio_is_of_one_round_and_the_sentence_has_the_median() -> None:
    turns = Turns(core=(1.0, 2.0, 4.0), courier=(1.5, 2.0, 4.4), is_equal=False)
    assert turns.ratios == pytest.approx([1.5, 1.0, 1.1])
    lines = report_lines(turns)
    assert lines[2] == "| 1 | 1.0000 | 1.5000 | 1.500 |"
    assert "is 1.100 times" in lines[-1]
    assert lines[-1].endswith("equal: NO.")


def test_both_run_in_one_process_and_their_latents_are_equal(tmp_path: Path) -> None:
    program, file = choose_program(checkout()), tmp_path / "wan.safetensors"
    write_wan(file, depth=2, width=128, ffn=256)
    done = subprocess.run(
        [str(program.python), "-m", "bench.turns", str(file), "--comfyui", str(program.path),
         "--latent", "1x16x16", "--steps", "2", "--rounds", "2"],
        cwd=checkout().root, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert [line.count("|") for line in lines[2:4]] == [5, 5]
    assert lines[-1].endswith("every latent equal: yes.")
