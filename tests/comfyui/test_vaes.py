"""VAEs of ours against ComfyUI's own, in one process: see scripts/vaes.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "vaes.py"
Lines = dict[str, list[str]]


@pytest.fixture(scope="module")
def lines(comparisons_of: Callable[..., Lines]) -> Lines:
    return comparisons_of(SCRIPT, timeout_seconds=400)


@pytest.mark.parametrize(
    ("part", "comparisons"),
    [("wan", 44), ("taesd", 23), ("kl", 23), ("rounded", 46)],
    ids=["wan", "taesd", "kl", "rounded"],
)
def test_pictures_equal_the_stock_loaders(lines: Lines, part: str, comparisons: int) -> None:
    passes(lines, part, comparisons)


def passes(lines: Lines, part: str, comparisons: int) -> None:
    found = lines.get(part, [])
    assert [line for line in found if line.startswith("FAIL")] == []
    # A part that compared nothing must not pass for one that found nothing.
    assert len(found) >= comparisons


def test_nothing_is_copied_at_load_and_sleep_gives_it_all_back(lines: Lines) -> None:
    passes(lines, "memory", 6)


def test_a_file_with_one_half_of_a_vae_is_used_and_said(lines: Lines) -> None:
    passes(lines, "half", 2)


def test_wrong_files_are_refused_by_name_and_leave_nothing(lines: Lines) -> None:
    passes(lines, "bad", 6)
