"""A model of more than a gigabyte costs what the status says, by the kernel's own count."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devtools.small_models import write_lora, write_wan_big

SCRIPT = Path(__file__).parent / "scripts" / "memory.py"
# More threads than cores wait for each other; the sums are the same.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
Lines = dict[str, list[str]]


@pytest.fixture(scope="module")
def memory_lines(
    run_in_comfyui: Callable[..., subprocess.CompletedProcess[str]], small_models: Any
) -> Lines:
    """The script's comparisons by their first word. Writes the model, and removes it."""
    folder = small_models["wan"].parent
    with tempfile.TemporaryDirectory(prefix="big-", dir=folder) as temporary:
        file = write_wan_big(Path(temporary) / "big.safetensors")
        lora = write_lora(Path(temporary) / "lora.safetensors", file)
        gc.collect()
        done = run_in_comfyui(
            SCRIPT, str(file), str(lora), environment=ENVIRONMENT, timeout_seconds=400, check=False
        )
    found: Lines = {}
    for line in done.stdout.splitlines():
        verdict, _, rest = line.partition(" ")
        if verdict in ("ok", "FAIL"):
            found.setdefault(rest.split()[0].rstrip(":"), []).append(line)
    sys.stdout.write(done.stdout)  # the figures, for whoever looks
    if done.returncode not in (0, 1):
        pytest.fail(f"{SCRIPT.name} ended with {done.returncode}\n{done.stderr[-6000:]}")
    return found


def passes(lines: Lines, word: str, comparisons: int) -> None:
    found = lines.get(word, [])
    assert [line for line in found if line.startswith("FAIL")] == []
    # A part that compared nothing must not pass for one that found nothing.
    assert len(found) >= comparisons


def test_streaming_takes_a_twentieth_of_the_model_and_its_slots(memory_lines: Lines) -> None:
    passes(memory_lines, "size", 1)
    passes(memory_lines, "stream", 3)


def test_status_says_where_every_layer_is_under_every_plan(memory_lines: Lines) -> None:
    passes(memory_lines, "placement", 45)


def test_loras_cost_no_memory_and_touch_no_other_model(memory_lines: Lines) -> None:
    passes(memory_lines, "lora", 7)
