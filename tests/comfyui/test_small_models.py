"""The real core takes our small models for what they are, and gives numbers worth comparing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "sample_small_models.py"
# A latent that is constant, or a LoRA that hardly shows, would let a wrong result pass for a
# right one.
LEAST_SPREAD = 0.1
LEAST_LORA_DIFFERENCE = 0.05


@pytest.fixture(scope="module")
def sampled(run_in_comfyui: Callable[..., subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    return dict(json.loads(run_in_comfyui(SCRIPT).stdout.splitlines()[-1]))


@pytest.mark.parametrize("key", ["wan", "wan_fp8", "sd3", "sd15"])
def test_model_samples_to_a_finite_latent_that_is_not_constant(
    sampled: dict[str, Any], key: str
) -> None:
    facts = sampled["models"][key]
    assert facts["finite"]
    assert facts["spread"] > LEAST_SPREAD
    assert facts["same_again"]


@pytest.mark.parametrize(
    "pair", ["wan wan_lora", "wan wan_lora_b", "wan_fp8 wan_lora", "sd3 sd3_lora"]
)
def test_lora_shows_in_the_result(sampled: dict[str, Any], pair: str) -> None:
    facts = sampled["loras"][pair]
    assert facts["finite"]
    assert facts["difference"] > LEAST_LORA_DIFFERENCE


def test_core_warns_of_nothing(sampled: dict[str, Any]) -> None:
    assert sampled["warnings"] == []
