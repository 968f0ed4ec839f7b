"""A checkpoint of ours against ComfyUI's own, in one process: see scripts/checkpoints.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "checkpoints.py"
Lines = dict[str, list[str]]


@pytest.fixture(scope="module")
def lines(comparisons_of: Callable[..., Lines]) -> Lines:
    return comparisons_of(SCRIPT, timeout_seconds=400)


def passes(lines: Lines, part: str, comparisons: int) -> None:
    found = lines.get(part, [])
    assert [line for line in found if line.startswith("FAIL")] == []
    # A part that compared nothing must not pass for one that found nothing.
    assert len(found) >= comparisons


def test_model_clip_and_vae_of_one_mapping_equal_the_stock_loaders(lines: Lines) -> None:
    passes(lines, "whole", 29)


def test_wrong_files_are_refused_by_name_and_leave_nothing(lines: Lines) -> None:
    passes(lines, "bad", 6)
