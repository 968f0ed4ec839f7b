"""From the saved-UI form to the API form.

What ComfyUI's own page makes of the same files is compared in ``tests/comfyui``.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from ..conftest import OBJECT_INFO, Headless

INFO = {
    **OBJECT_INFO,
    "Encode": {
        "input": {"required": {"vision": ["VISION"], "image": ["IMAGE"]}},
        "output": ["ENCODED"],
    },
    "Again": {
        "input": {"required": {"vision": ["VISION"], "encoded": ["ENCODED"]}},
        "output": ["ENCODED"],
    },
    "Condition": {
        "input": {"required": {}, "optional": {"left": ["ENCODED"], "any": ["*"]}},
        "output": ["CONDITIONING"],
        "output_node": True,
    },
    "Load": {"input": {"required": {}}, "output": ["MODEL", "VISION"]},
    "Prompted": {
        "input": {
            "required": {},
            "optional": {"negative": ["STRING", {"forceInput": True, "default": ""}]},
        },
        "output": [],
        "output_node": True,
    },
}


@pytest.fixture
def convert(headless: Headless) -> Any:
    return headless.module("convert.convert")


def node(node_id: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"id": node_id, "type": kind, "mode": 0, "inputs": [], "outputs": [], **more}


def slot(name: str, kind: str, link: Any = None) -> dict[str, Any]:
    return {"name": name, "type": kind, "link": link}


def out(kind: str, *links: int) -> dict[str, Any]:
    return {"name": kind, "type": kind, "links": list(links)}


def bypassed_encoder() -> dict[str, Any]:
    """Load -> (bypassed) Encode -> Condition.left: nothing of the type that is wanted passes."""
    return {
        "nodes": [
            node(1, "Load", outputs=[out("MODEL"), out("VISION", 1)]),
            node(
                2, "Encode", mode=4, outputs=[out("ENCODED", 2)],
                inputs=[slot("vision", "VISION", 1), slot("image", "IMAGE")],
            ),
            node(3, "Condition", inputs=[slot("left", "ENCODED", 2), slot("any", "*")]),
        ],
        "links": [[1, 1, 1, 2, 0, "VISION"], [2, 2, 0, 3, 0, "ENCODED"]],
    }  # fmt: skip


def ours(convert: Any, workflow: Any, info: Any = INFO) -> Any:
    (found,) = convert.to_api_all([workflow], info)
    if isinstance(found, Exception):
        raise found
    return found.prompt


def test_nothing_passes_a_bypassed_node_that_has_nothing_of_the_type(
    convert: Any,
) -> None:
    workflow = bypassed_encoder()
    before = copy.deepcopy(workflow)
    assert ours(convert, workflow)["3"]["inputs"] == {}
    assert workflow == before


def test_what_a_bypassed_node_has_of_the_type_passes(convert: Any) -> None:
    workflow = bypassed_encoder()
    workflow["nodes"][1]["type"] = "Again"
    workflow["nodes"][1]["inputs"][1] = slot("encoded", "ENCODED", 3)
    workflow["nodes"].append(node(4, "Encode", outputs=[out("ENCODED", 3)]))
    workflow["links"].append([3, 4, 0, 2, 1, "ENCODED"])
    assert ours(convert, workflow)["3"]["inputs"]["left"] == ["4", 0]


def test_a_row_of_bypassed_nodes_is_cut_from_its_end(convert: Any) -> None:
    workflow = bypassed_encoder()
    second = node(
        5, "Encode", mode=4, outputs=[out("ENCODED", 4)],
        inputs=[slot("image", "ENCODED", 2), slot("vision", "VISION", 5)],
    )  # fmt: skip
    workflow["nodes"][2]["inputs"][0] = slot("left", "ENCODED", 4)
    workflow["nodes"].append(second)
    workflow["links"] = [
        [1, 1, 1, 2, 0, "VISION"], [2, 2, 0, 5, 0, "ENCODED"], [4, 5, 0, 3, 0, "ENCODED"],
        [5, 1, 1, 5, 1, "VISION"],
    ]  # fmt: skip
    assert ours(convert, workflow)["3"]["inputs"] == {}


def test_an_input_that_takes_anything_gets_the_one_at_the_same_place(convert: Any) -> None:
    workflow = bypassed_encoder()
    workflow["nodes"][2]["inputs"] = [slot("left", "ENCODED"), slot("any", "*", 2)]
    workflow["links"][1] = [2, 2, 0, 3, 1, "*"]
    assert ours(convert, workflow)["3"]["inputs"] == {"any": ["1", 1]}


def test_dead_ends_inside_of_a_subgraph_are_cut_too(convert: Any) -> None:
    inner = bypassed_encoder()
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    inner["links"] = [dict(zip(names, link, strict=True)) for link in inner["links"]]
    subgraph = {"id": "0a1b2c3d-0000-4000-8000-000000000001", "inputs": [], "outputs": [], **inner}
    workflow = {
        "nodes": [node(9, subgraph["id"])], "links": [], "definitions": {"subgraphs": [subgraph]},
    }  # fmt: skip
    assert ours(convert, workflow)["9:3"]["inputs"] == {}


def test_a_socket_that_nobody_connected_gets_no_default(convert: Any) -> None:
    workflow = {"nodes": [node(1, "Prompted", inputs=[slot("negative", "STRING")])], "links": []}
    before = copy.deepcopy(INFO)
    assert ours(convert, workflow)["1"]["inputs"] == {}
    assert before == INFO


def test_a_value_that_is_an_object_costs_no_other_value(convert: Any) -> None:
    button = {"name": "upload", "type": "button", "options": {"serialize": False}}
    workflow = {
        "nodes": [
            node(1, "LoadImage", widgets_values=["dog.png", button]),
            node(2, "SaveImage", widgets_values=[{"an": ["object"]}]),
        ],
        "links": [],
    }
    prompt = ours(convert, workflow)
    assert prompt["1"]["inputs"] == {"image": "dog.png"}
    assert prompt["2"]["inputs"] == {"prefix": {"an": ["object"]}}


def test_a_loader_of_loras_with_a_row_for_each_keeps_its_rows(convert: Any) -> None:
    row = {"on": True, "lora": "a", "strength": 1}
    values = [{}, {"type": "HeaderWidget"}, row, {**row, "lora": "b"}, ""]
    loader = node(1, "Loras", outputs=[out("MODEL", 1)], widgets_values=values)
    info = {**INFO, "Loras": {"input": {"required": {}}, "output": ["MODEL"]}}
    inputs = ours(convert, {"nodes": [loader], "links": []}, info)["1"]["inputs"]
    assert inputs == {"lora_1": row, "lora_2": {**row, "lora": "b"}}


def test_links_as_objects_are_read(convert: Any) -> None:
    workflow = bypassed_encoder()
    workflow["nodes"][1]["mode"] = 0
    wanted = ours(convert, workflow)
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    workflow["links"] = [dict(zip(names, link, strict=True)) for link in workflow["links"]]
    assert ours(convert, workflow) == wanted
    assert wanted["3"]["inputs"]["left"] == ["2", 0]


def test_reroutes_primitives_muted_nodes_and_notes(convert: Any) -> None:
    workflow = {
        "nodes": [
            node(1, "Note", widgets_values=["hello"]),
            node(2, "PrimitiveNode", outputs=[out("INT", 1)], widgets_values=[512, "fixed"]),
            node(
                3, "EmptyLatentImage", inputs=[{**slot("width", "INT", 1), "widget": {}}],
                outputs=[out("LATENT", 2)], widgets_values=[64],
            ),
            node(4, "Reroute", inputs=[slot("", "*", 2)], outputs=[out("LATENT", 3)]),
            node(5, "VAEDecode", inputs=[slot("samples", "LATENT", 3)], outputs=[out("IMAGE", 4)]),
            node(6, "SaveImage", mode=2, inputs=[slot("images", "IMAGE", 4)]),
            node(7, "Preview", inputs=[slot("anything", "IMAGE", 4)]),
        ],
        "links": [
            [1, 2, 0, 3, 0, "INT"], [2, 3, 0, 4, 0, "LATENT"], [3, 4, 0, 5, 0, "LATENT"],
            [4, 5, 0, 7, 0, "IMAGE"],
        ],
        "groups": [{"title": "a group", "bounding": [0, 0, 1, 1]}],
    }  # fmt: skip
    prompt = ours(convert, workflow)
    assert sorted(prompt) == ["3", "5", "7"]
    assert prompt["3"]["inputs"] == {"width": 512}
    assert prompt["5"]["inputs"] == {"samples": ["3", 0]}


@pytest.mark.parametrize(("workflow", "words"), [
    ({"nodes": []}, "has no nodes"),
    ({"nodes": [node(3, "workflow>Upscale")], "links": []}, "node 3 (workflow>Upscale)"),
    ({"nodes": [node(3, "workflow/Upscale")], "links": []}, "File > Export (API)"),
])  # fmt: skip
def test_what_would_be_left_out_in_silence_is_refused(
    convert: Any, headless: Headless, workflow: Any, words: str
) -> None:
    with pytest.raises(headless.courier.WorkflowFileError) as caught:
        ours(convert, workflow)
    assert words in str(caught.value)


MALFORMED: list[Any] = [
    {"nodes": [None, 7, [], {}], "links": None},
    {"nodes": [{"id": None, "type": None}], "links": [None, [], [1], "x", {}, [[], 1, 2, 3, 4, 5]]},
    {
        "nodes": [node(1, "KSampler", inputs=None, outputs=7, widgets_values={"seed": 1})],
        "links": [],
    },
    {
        "nodes": [node(1, "KSampler", inputs=[None, 3, {"link": []}], mode=4)],
        "links": [[1, 1, 0, 1, 0]],
    },
    {
        "nodes": [node(1, "Reroute", mode=4, inputs=[slot("", "*", 1)])],
        "links": [[1, 1, 0, 1, 0, "*"]],
    },
    {"nodes": [node(1, "KSampler")], "links": [], "definitions": {"subgraphs": [None, {"id": 3}]}},
    {"nodes": [node(1, "KSampler")], "links": [], "definitions": []},
]


@pytest.mark.parametrize("index", range(len(MALFORMED)))
def test_a_malformed_file_ends_in_a_prompt_or_in_one_sentence(
    convert: Any, headless: Headless, index: int
) -> None:
    (found,) = convert.to_api_all([MALFORMED[index]], INFO)
    if isinstance(found, Exception):
        assert isinstance(found, headless.courier.WorkflowFileError)
        assert "\n" not in str(found)
    else:
        json.dumps(found.prompt)


def test_a_subgraph_in_itself_ends(convert: Any) -> None:
    kind = "0a1b2c3d-0000-4000-8000-000000000001"
    subgraph = {"id": kind, "inputs": [], "outputs": [], "nodes": [node(1, kind)], "links": []}
    workflow = {
        "nodes": [node(1, kind)], "links": [], "definitions": {"subgraphs": [subgraph]},
    }  # fmt: skip
    (found,) = convert.to_api_all([workflow], INFO)
    assert not isinstance(found, Exception)
    assert len(json.dumps(found.prompt)) < 10_000


# Many, and none


def test_many_are_converted_and_a_bad_one_is_only_itself(convert: Any) -> None:
    good = bypassed_encoder()
    found = convert.to_api_all([good, {"nodes": []}, good], INFO)
    assert [isinstance(item, Exception) for item in found] == [False, True, False]


def test_the_api_form_stays_as_it_is(headless: Headless) -> None:
    load = headless.module("workflow.load")
    workflow = load.parse_workflow(b'{"1": {"class_type": "X", "inputs": {}}}', "a.json")
    converted = headless.module("convert.convert").to_api(workflow, {})
    assert converted.prompt == workflow.data


def test_what_is_left_out_is_told(convert: Any) -> None:
    workflow = {"nodes": [node(1, "Label (some pack)", title="HERE")], "links": []}
    (found,) = convert.to_api_all([workflow], INFO)
    assert found.prompt == {}
    assert "node 1 (Label (some pack) 'HERE')" in found.notes[0]
    assert "for ComfyUI's page only" in found.notes[0]


def test_what_changed_between_pages_goes_by_the_page_of_the_server(convert: Any) -> None:
    """A link that is in the list only; links out of muted nodes that pass one on."""
    workflow = bypassed_encoder()
    workflow["nodes"][1]["mode"] = 0
    workflow["nodes"][2]["inputs"][0] = slot("left", "ENCODED")
    for version, inputs in (("1.32.9", {}), ("1.49.6", {}), ("1.58.1", {"left": ["2", 0]})):
        (found,) = convert.to_api_all([workflow], INFO, version)
        assert found.prompt["3"]["inputs"] == inputs, version
    muted = {
        "nodes": [
            node(2, "Encode", outputs=[out("ENCODED", 1)]),
            node(4, "Reroute", mode=2, inputs=[slot("", "*", 1)], outputs=[out("ENCODED", 2)]),
            node(3, "Condition", inputs=[slot("left", "ENCODED", 2)]),
        ],
        "links": [[1, 2, 0, 4, 0, "ENCODED"], [2, 4, 0, 3, 0, "ENCODED"]],
    }
    for version, inputs in (("1.32.9", {"left": ["2", 0]}), ("1.49.6", {}), (None, {})):
        (found,) = convert.to_api_all([muted], INFO, version)
        assert found.prompt["3"]["inputs"] == inputs, version
