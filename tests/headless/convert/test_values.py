"""Which value is which widget's: by place, through controls, choices, subgraphs and groups.

What ComfyUI's own page makes of the same kinds is compared in ``tests/comfyui``.
"""

from __future__ import annotations

from typing import Any

import pytest

from ..conftest import Headless

INT = ["INT", {"default": 1}]
TEXT = ["STRING", {"multiline": True, "dynamicPrompts": True}]
SUBGRAPH = "5b0c2c1e-8a59-4f0c-9d8c-0f7a41f7d6a1"
CHOICE = ["COMFY_DYNAMICCOMBO_V3", {"options": [
    {"key": "fixed size", "inputs": {"required": {"width": INT, "seed": INT}}},
    {"key": "by factor", "inputs": {"required": {"factor": ["FLOAT", {"default": 2.0}]}}},
]}]  # fmt: skip
INFO: dict[str, Any] = {
    "Sample": {
        "input": {"required": {"seed": INT, "steps": INT, "cfg": ["FLOAT", {}]}}, "output": ["X"],
    },
    "Forced": {
        "input": {"required": {"a": INT, "b": ["INT", {"forceInput": True}], "c": INT}},
        "output": [],
    },
    "Resize": {"input": {"required": {"how": CHOICE, "last": INT}}, "output": []},
    "Write": {"input": {"required": {"text": TEXT, "line": ["STRING", {}]}}, "output": []},
    "Load": {"input": {"required": {"image": [["a.png"], {"image_upload": True}]},
                       "optional": {"more": INT}}, "output": []},
}  # fmt: skip


@pytest.fixture
def convert(headless: Headless) -> Any:
    return headless.module("convert.convert")


def inputs(convert: Any, kind: str, values: Any, **more: Any) -> Any:
    graph = {"nodes": [{"id": 1, "type": kind, "widgets_values": values, **more}], "links": []}
    (found,) = convert.to_api_all([graph], INFO)
    return found.prompt["1"]["inputs"]


@pytest.mark.parametrize("word", ["fixed", "randomize", True, False, None, 7, "words"])
def test_the_slot_after_a_seed_is_its_controls(convert: Any, word: Any) -> None:
    assert inputs(convert, "Sample", [5, word, 9, 2.5]) == {"seed": 5, "steps": 9, "cfg": 2.5}


def test_values_of_inputs_that_became_sockets_are_passed_over(convert: Any) -> None:
    assert inputs(convert, "Forced", [5, 6, 7]) == {"a": 5, "c": 7}
    assert inputs(convert, "Forced", [5, 7]) == {"a": 5, "c": 7}


def test_a_choice_brings_its_own_widgets_and_they_have_the_next_values(convert: Any) -> None:
    fixed = inputs(convert, "Resize", ["fixed size", 640, 3, 9])
    assert fixed == {"how": "fixed size", "how.width": 640, "how.seed": 3, "last": 9}
    factor = inputs(convert, "Resize", ["by factor", 1.5, 9])
    assert factor == {"how": "by factor", "how.factor": 1.5, "last": 9}


def test_what_is_not_among_the_values_has_its_default(convert: Any) -> None:
    assert inputs(convert, "Sample", [5]) == {"seed": 5, "steps": 1, "cfg": 0}
    assert inputs(convert, "Sample", None) == {"seed": 1, "steps": 1, "cfg": 0}
    assert inputs(convert, "Sample", {"cfg": 3, "other": 1}) == {"seed": 1, "steps": 1, "cfg": 3}


def test_a_button_for_files_comes_last(convert: Any) -> None:
    assert inputs(convert, "Load", ["b.png", 4, "image"]) == {"image": "b.png", "more": 4}


def test_texts_of_several_lines(convert: Any) -> None:
    written = inputs(convert, "Write", ["a {b|b} // not this\nc /* nor this */ \\{d\\}", "{x|x}"])
    assert written == {"text": "a b \nc  {d}", "line": "{x|x}"}
    assert inputs(convert, "Write", [7.0, 7]) == {"text": "7", "line": 7}
    assert inputs(convert, "Write", [None, None]) == {"text": "", "line": None}


def test_a_list_that_is_a_value_is_no_link(convert: Any) -> None:
    assert inputs(convert, "Sample", [["1", 0]])["seed"] == {"__value__": ["1", 0]}


def subgraph(values: Any, **properties: Any) -> dict[str, Any]:
    names = ("seed", "steps", "cfg")
    inner = {
        "id": 7, "type": "Sample", "widgets_values": [1, "fixed", 2, 3],
        "inputs": [
            {"name": n, "type": "INT", "link": i, "widget": {"name": n}}
            for i, n in enumerate(names)
        ],
    }  # fmt: skip
    definition = {
        "id": SUBGRAPH, "nodes": [inner], "outputs": [],
        "inputs": [{"name": n, "type": "INT", "linkIds": [i]} for i, n in enumerate(names)],
        "links": [
            {"id": i, "origin_id": -10, "origin_slot": i, "target_id": 7, "target_slot": i}
            for i in range(3)
        ],
    }  # fmt: skip
    host = {"id": 4, "type": SUBGRAPH, "widgets_values": values, "properties": properties}
    return {"nodes": [host], "links": [], "definitions": {"subgraphs": [definition]}}


@pytest.mark.parametrize(("values", "proxies", "expected"), [
    ([10, 20, 30], None, (10, 20, 30)),
    ([30, 20, 10], [["-1", "cfg"], ["-1", "steps"], ["-1", "seed"]], (10, 20, 30)),
    ([10, "fixed", 20, 30], None, (10, 20, 30)),
    ([None, None, 10], [["-1", "cfg"], ["-1", "steps"], ["-1", "seed"]], (10, 2, 10)),
    (None, [["-1", "cfg"]], (1, 2, 3)),
])  # fmt: skip
def test_values_of_a_subgraph_are_in_the_order_of_its_list(
    convert: Any, values: Any, proxies: Any, expected: tuple[Any, ...]
) -> None:
    more = {} if proxies is None else {"proxyWidgets": proxies}
    (found,) = convert.to_api_all([subgraph(values, **more)], INFO)
    given = found.prompt["4:7"]["inputs"]
    assert (given["seed"], given["steps"], given["cfg"]) == expected


def test_a_shown_widget_has_the_hosts_value_on_newer_pages(convert: Any) -> None:
    graph = subgraph([8], proxyWidgets=[["7", "steps"]])
    definition = graph["definitions"]["subgraphs"][0]
    definition["inputs"], definition["links"] = [], []
    for version, steps in (("1.32.9", 2), ("1.49.6", 8), (None, 8)):
        (found,) = convert.to_api_all([graph], INFO, version)
        assert found.prompt["4:7"]["inputs"]["steps"] == steps


def test_a_class_that_is_not_here_costs_no_other_value_of_a_subgraph(convert: Any) -> None:
    graph = subgraph([10, 20, 30])
    definition = graph["definitions"]["subgraphs"][0]
    gone = {
        "id": 8, "type": "Gone",
        "inputs": [{"name": "x", "type": "INT", "link": 0, "widget": {"name": "x"}}],
    }  # fmt: skip
    definition["nodes"].append(gone)
    definition["links"][0] |= {"target_id": 8, "target_slot": 0}
    definition["nodes"][0]["inputs"][0]["link"] = None
    (found,) = convert.to_api_all([graph], INFO)
    assert found.prompt["4:7"]["inputs"] == {"seed": 1, "steps": 20, "cfg": 30}


def test_a_group_node_is_taken_apart_and_its_own_name_is_no_class(convert: Any) -> None:
    inner = {"type": "Sample", "widgets_values": [1, "fixed", 2, 3], "inputs": []}
    group = {"id": 3, "type": "workflow>Mine", "widgets_values": [7, "increment", 8, 9]}
    graph = {"nodes": [group], "links": [], "extra": {"groupNodes": {"Mine": {"nodes": [inner]}}}}
    (found,) = convert.to_api_all([graph], INFO)
    assert list(found.prompt) == ["3:0"]
    assert found.prompt["3:0"]["inputs"] == {"seed": 7, "steps": 8, "cfg": 9}


def test_a_group_in_itself_ends_in_a_sentence(convert: Any) -> None:
    inner = {"type": "workflow>Mine"}
    graph = {
        "nodes": [{"id": 3, "type": "workflow>Mine"}], "links": [],
        "extra": {"groupNodes": {"Mine": {"nodes": [inner, inner]}}},
    }  # fmt: skip
    (found,) = convert.to_api_all([graph], INFO)
    assert "within each other without an end" in str(found)
