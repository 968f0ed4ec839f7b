"""A LoRA for another model: the log says so once a weight, and each load in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "foreign_lora.py"


@pytest.fixture(scope="module")
def lines(comparisons_of: Callable[..., dict[str, list[str]]]) -> dict[str, list[str]]:
    return comparisons_of(SCRIPT)


@pytest.mark.parametrize("kind", ["fits", "foreign", "both", "diffs"])
def test_the_log_has_as_many_errors_as_with_comfyuis_own_loader(
    lines: dict[str, list[str]], kind: str
) -> None:
    found = lines.get(kind, [])
    assert [line for line in found if line.startswith("FAIL")] == []
    assert len(found) == 5
