"""Nodes that the server does not have: the page's alone, or missing."""

from __future__ import annotations

from typing import Any

import pytest

from ..conftest import Headless

INFO = {
    "Load": {"input": {"required": {}}, "output": ["IMAGE"]},
    "Show": {"input": {"required": {"images": ["IMAGE"]}}, "output": [], "output_node": True},
}


@pytest.fixture
def convert(headless: Headless) -> Any:
    return headless.module("convert.convert")


def workflow(*between: dict[str, Any], use: int = 2) -> dict[str, Any]:
    """Load (1) -> the first of ``between`` (2), and Show (9) that takes what ``use`` gives."""
    nodes = [
        {"id": 1, "type": "Load", "outputs": [{"name": "IMAGE", "type": "IMAGE", "links": [1]}]},
        *between,
        {"id": 9, "type": "Show", "inputs": [{"name": "images", "type": "IMAGE", "link": 2}]},
    ]
    return {"nodes": nodes, "links": [[1, 1, 0, 2, 0, "IMAGE"], [2, use, 0, 9, 0, "IMAGE"]]}


def node(node_id: int, kind: str, taken: str | None = "*", **more: Any) -> dict[str, Any]:
    """One that gives a picture; ``taken``: the name and the type of what it takes."""
    inputs = [] if taken is None else [{"name": taken, "type": taken, "link": 1}]
    outputs = [{"name": "IMAGE", "type": "IMAGE", "links": [2]}]
    return {"id": node_id, "type": kind, "inputs": inputs, "outputs": outputs, **more}


def shown(convert: Any, graph: Any) -> tuple[Any, Any]:
    (found,) = convert.to_api_all([graph], INFO)
    return found.prompt["9"]["inputs"].get("images"), found


@pytest.mark.parametrize("between", [
    node(2, "Waypoint"), node(2, "Any Reroute", "IMAGE"), node(2, "X", "IMAGE", properties={}),
    {**node(2, "Y"), "inputs": [{"name": "", "type": "IMAGE", "link": 1}]},
])  # fmt: skip
def test_what_passes_its_link_on_is_followed(convert: Any, between: Any) -> None:
    source, found = shown(convert, workflow(between))
    assert source == ["1", 0]
    assert sorted(found.prompt) == ["1", "9"]


@pytest.mark.parametrize("between", [
    node(2, "Sharpen", widgets_values=[3]),
    node(2, "Sharpen", properties={"Node name for S&R": "Sharpen"}),
    {**node(2, "Sharpen"), "inputs": [{"name": "image", "type": "IMAGE", "link": 1}]},
])  # fmt: skip
def test_what_does_something_is_missing_and_not_followed(convert: Any, between: Any) -> None:
    """Left out, the picture would be another one, and nobody would know."""
    source, found = shown(convert, workflow(between))
    assert source == ["2", 0]
    assert found.prompt["2"]["class_type"] == "Sharpen"


def test_a_pair_with_one_name_carries_the_link(convert: Any) -> None:
    setter = node(2, "PutSet", widgets_values=["a"])
    getter = node(3, "PutGet", None, widgets_values=["a"])
    assert shown(convert, workflow(setter, getter, use=3))[0] == ["1", 0]
    assert shown(convert, workflow(setter, getter, use=2))[0] == ["1", 0]


def test_a_setter_whose_own_output_is_used_passes_its_link_on(convert: Any) -> None:
    setter = node(2, "SetNode", "IMAGE", widgets_values=["a"], properties={"previousName": "a"})
    assert shown(convert, workflow(setter))[0] == ["1", 0]


def test_a_setter_that_nobody_takes_from_is_left_out(convert: Any) -> None:
    lonely = {
        "id": 4, "type": "SetNode", "widgets_values": ["b"],
        "inputs": [{"name": "IMAGE", "type": "IMAGE", "link": 3}],
        "outputs": [{"name": "*", "type": "*", "links": None}],
    }  # fmt: skip
    graph = workflow(node(2, "Reroute"), lonely)
    graph["links"].append([3, 1, 0, 4, 0, "IMAGE"])
    _, found = shown(convert, graph)
    assert sorted(found.prompt) == ["1", "9"]


def test_a_getter_without_a_setter_brings_nothing(convert: Any) -> None:
    """No pack that is installed would mend that."""
    source, found = shown(convert, workflow(node(2, "GetNode", None, widgets_values=["gone"])))
    assert source is None
    assert sorted(found.prompt) == ["1", "9"]


def test_two_that_show_the_same_text_are_no_pair(convert: Any) -> None:
    named = {"properties": {"Node name for S&R": "x"}, "widgets_values": ["cat"]}
    shows, writes = node(2, "ShowText", **named), node(3, "Text", None, **named)
    assert shown(convert, workflow(shows, writes, use=3))[0] == ["3", 0]


def test_what_nothing_needs_is_left_out_with_a_note(convert: Any) -> None:
    label = {"id": 4, "type": "Label", "title": "HERE", "inputs": [], "outputs": []}
    switch = {
        "id": 5,
        "type": "Mute groups",
        "outputs": [{"name": "OPT", "type": "*", "links": None}],
    }
    repeater = {"id": 6, "type": "Repeater", "inputs": [{"name": "", "type": "*", "link": 3}]}
    graph = workflow(node(2, "Reroute"), label, switch, repeater)
    graph["links"].append([3, 1, 0, 6, 0, "*"])
    _, found = shown(convert, graph)
    assert sorted(found.prompt) == ["1", "9"]
    (note,) = found.notes
    assert all(word in note for word in ("4 (Label 'HERE')", "5 (Mute groups)", "6 (Repeater)"))


def test_a_missing_node_that_saves_is_what_the_workflow_is_for(convert: Any) -> None:
    saver = {
        "id": 4,
        "type": "Save a film",
        "inputs": [{"name": "images", "type": "IMAGE", "link": 3}],
    }
    graph = workflow(node(2, "Reroute"), saver)
    graph["links"].append([3, 1, 0, 4, 0, "IMAGE"])
    _, found = shown(convert, graph)
    assert found.prompt["4"]["inputs"] == {"images": ["1", 0]}
    assert found.notes == ()


def test_nodes_whose_links_are_made_when_queuing_are_named(convert: Any) -> None:
    sender = {
        "id": 4, "type": "Anything Everywhere",
        "inputs": [{"name": "anything", "type": "*", "link": 1}],
        "properties": {"Node name for S&R": "Anything Everywhere", "ue_properties": {}},
    }  # fmt: skip
    _, found = shown(convert, workflow(node(2, "Reroute"), sender))
    assert found.broadcasters == ("4 (Anything Everywhere)",)
    assert "4" not in found.prompt
