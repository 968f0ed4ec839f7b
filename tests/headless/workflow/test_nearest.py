"""Names that were probably meant, among thousands."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ..conftest import Headless, info

LONG = [f"style/site/some_quite_long_lora_name_{i:05d}_v{i % 7}.safetensors" for i in range(5000)]


@pytest.fixture
def nearest(headless: Headless) -> Any:
    return headless.module("workflow.nearest").nearest_choices


def test_the_same_file_in_another_folder_comes_first(nearest: Any) -> None:
    names = ["a/modex.safetensors", "b\\Model.safetensors", "model1.safetensors"]
    assert nearest("models/model.safetensors", names)[0] == "b\\Model.safetensors"
    assert nearest("m.ckpt", ["of/quite/another/kind/of/folder/m.ckpt"]) != []


def test_names_that_look_alike_come_in_the_order_of_likeness(nearest: Any) -> None:
    names = ["flux_dev_fp8_e4m3.safetensors", "flux_dev_fp16.safetensors", "flux_dev.safetensors"]
    assert nearest("flux_dev_fp8.safetensors", names) == [
        "flux_dev_fp16.safetensors", "flux_dev.safetensors", "flux_dev_fp8_e4m3.safetensors",
    ]  # fmt: skip


def test_among_thousands_the_one_that_differs_by_a_letter_is_found(nearest: Any) -> None:
    for wanted in (LONG[0], LONG[2345], LONG[4999]):
        assert nearest(wanted.replace("_v", "_w"), LONG)[0] == wanted
    names = [*LONG, "detail/eyes_v2.safetensors"]
    assert nearest("eyes_v3.safetensors", names, 0.3)[0] == "detail/eyes_v2.safetensors"


def test_nothing_is_near_to_what_is_like_nothing(nearest: Any) -> None:
    assert nearest("qqqq", LONG) == []
    assert nearest("x", []) == []
    assert nearest(7, [1, 2, 3]) == []


def test_forty_unknown_names_among_five_thousand_are_told_in_a_second(headless: Headless) -> None:
    classes = {
        "Load": info({}, ["MODEL"]),
        "Lora": info({"model": ["MODEL"], "lora_name": [LONG]}, ["MODEL"]),
        "End": info({"model": ["MODEL"]}, output_node=True),
    }
    prompt: dict[str, Any] = {"0": {"class_type": "Load", "inputs": {}}}
    for i in range(40):
        name = f"style\\my_lora_{i}_v2.safetensors"
        prompt[str(i + 1)] = {
            "class_type": "Lora",
            "inputs": {"model": [str(i), 0], "lora_name": name},
        }
    prompt["end"] = {"class_type": "End", "inputs": {"model": ["40", 0]}}
    catalog = headless.module("workflow.schema").Catalog(classes)
    begun = time.perf_counter()
    faults = headless.module("workflow.check").check_workflow(prompt, catalog).faults
    assert time.perf_counter() - begun < 1
    assert len(faults) == 40
    assert all(fault.nearest for fault in faults)
