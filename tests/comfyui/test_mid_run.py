"""What ComfyUI asks of a model in the middle of its run: see scripts/mid_run.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "mid_run.py"


@pytest.mark.parametrize(
    ("part", "least"),
    [
        ("controlnet", 9),
        ("loads", 36),
        ("evictions", 72),
        ("lending", 12),
        ("other_patches", 12),
        ("every_method", 200),
        ("two_threads", 4),
    ],
)
def test_nothing_that_comfyui_asks_in_a_run_ends_or_changes_it(
    lines: dict[str, list[str]], part: str, least: int
) -> None:
    found = lines.get(part, [])
    assert [line for line in found if line.startswith("FAIL")] == []
    # A part that compared nothing must not pass for one that found nothing.
    assert len(found) >= least


@pytest.fixture(scope="module")
def lines(comparisons_of: Callable[..., dict[str, list[str]]]) -> dict[str, list[str]]:
    return comparisons_of(SCRIPT, timeout_seconds=600)
