"""Text encoders of ours against ComfyUI's own, in one process: see scripts/encoders.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "encoders.py"
Lines = dict[str, list[str]]


@pytest.fixture(scope="module")
def lines(comparisons_of: Callable[..., Lines]) -> Lines:
    return comparisons_of(SCRIPT, timeout_seconds=400)


def passes(lines: Lines, part: str, comparisons: int) -> None:
    found = lines.get(part, [])
    assert [line for line in found if line.startswith("FAIL")] == []
    # A part that compared nothing must not pass for one that found nothing.
    assert len(found) >= comparisons


def test_conditioning_equals_the_stock_loaders(lines: Lines) -> None:
    passes(lines, "clip", 34)


def test_an_encoder_is_rounded_on_arrival_as_the_stock_loader_keeps_it(lines: Lines) -> None:
    passes(lines, "t5", 19)


def test_a_wider_file_is_copied_within_the_ram_budget(lines: Lines) -> None:
    passes(lines, "wider", 3)


def test_a_pickle_is_copied_and_said(lines: Lines) -> None:
    passes(lines, "pickled", 2)


def test_a_lora_on_an_encoder_equals_merging(lines: Lines) -> None:
    passes(lines, "lora", 17)


def test_a_hooked_lora_on_an_encoder_equals_merging(lines: Lines) -> None:
    passes(lines, "hooks", 13)


def test_nothing_is_copied_at_load_and_sleep_gives_it_all_back(lines: Lines) -> None:
    passes(lines, "memory", 4)


def test_an_encoder_sleeps_and_wakes(lines: Lines) -> None:
    passes(lines, "asleep", 5)


def test_clones_of_a_clip_share_its_engine(lines: Lines) -> None:
    passes(lines, "clones", 2)


def test_wrong_files_are_refused_by_name_and_leave_nothing(lines: Lines) -> None:
    passes(lines, "bad", 10)
