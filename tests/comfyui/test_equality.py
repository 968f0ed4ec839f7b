"""Sampling through our loader is bit for bit what it is through the core's, under every plan."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "equality.py"
# More threads than cores wait for each other; the sums are the same.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("arguments", "comparisons"),
    [
        pytest.param(("wan",), 93, id="wan"),
        pytest.param(("sd3",), 93, id="sd3"),
        pytest.param(("sd15", "plain"), 26, id="sd15"),
        pytest.param(("wan_fp8", "plain"), 26, id="wan_fp8"),
    ],
)
def test_samples_equal_the_stock_loaders(
    run_in_comfyui: Callable[..., subprocess.CompletedProcess[str]],
    arguments: tuple[str, ...],
    comparisons: int,
) -> None:
    done = run_in_comfyui(SCRIPT, *arguments, environment=ENVIRONMENT, timeout_seconds=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "FAIL "))]
    assert [line for line in lines if line.startswith("FAIL")] == []
    # A part that compared nothing must not pass for one that found nothing.
    assert len(lines) >= comparisons
