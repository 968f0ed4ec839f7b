"""From the saved-UI form to the API form: comfy-cli's converter, and where we help it.

What ComfyUI's own page makes of the same files is compared in ``tests/comfyui``.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from devtools.comfy_cli import ensure_comfy_cli
from devtools.paths import checkout

from ..conftest import OBJECT_INFO, Headless

INFO = {
    **OBJECT_INFO,
    "Encode": {
        "input": {"required": {"vision": ["VISION"], "image": ["IMAGE"]}},
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


@pytest.fixture(scope="module")
def comfy_cli() -> Path:
    return ensure_comfy_cli(checkout())


@pytest.fixture
def convert(headless: Headless, comfy_cli: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COURIER_COMFY_CLI_PYTHON", str(comfy_cli))
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


def raw(headless: Headless, workflow: Any, info: Any = INFO) -> Any:
    """What comfy-cli makes of it without our help."""
    (found,) = headless.module("convert.converter").convert_all([workflow], info)
    return found.prompt


def ours(convert: Any, workflow: Any, info: Any = INFO) -> Any:
    (found,) = convert.to_api_all([workflow], info)
    if isinstance(found, Exception):
        raise found
    return found.prompt


def test_nothing_passes_a_bypassed_node_that_has_nothing_of_the_type(
    convert: Any, headless: Headless
) -> None:
    workflow = bypassed_encoder()
    assert raw(headless, workflow)["3"]["inputs"] == {"left": ["1", 1]}
    before = copy.deepcopy(workflow)
    assert ours(convert, workflow)["3"]["inputs"] == {}
    assert workflow == before


def test_what_a_bypassed_node_has_of_the_type_passes(convert: Any) -> None:
    workflow = bypassed_encoder()
    workflow["nodes"][1]["inputs"][1] = slot("image", "ENCODED", 3)
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


def test_dead_ends_inside_of_a_subgraph_are_cut_too(convert: Any, headless: Headless) -> None:
    inner = bypassed_encoder()
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    inner["links"] = [dict(zip(names, link, strict=True)) for link in inner["links"]]
    subgraph = {"id": "0a1b2c3d-0000-4000-8000-000000000001", "inputs": [], "outputs": [], **inner}
    workflow = {
        "nodes": [node(9, subgraph["id"])], "links": [], "definitions": {"subgraphs": [subgraph]},
    }  # fmt: skip
    assert raw(headless, workflow)["9:3"]["inputs"] == {"left": ["9:1", 1]}
    assert ours(convert, workflow)["9:3"]["inputs"] == {}


def test_a_socket_that_nobody_connected_gets_no_default(convert: Any, headless: Headless) -> None:
    workflow = {"nodes": [node(1, "Prompted", inputs=[slot("negative", "STRING")])], "links": []}
    assert raw(headless, workflow)["1"]["inputs"] == {"negative": ""}
    before = copy.deepcopy(INFO)
    assert ours(convert, workflow)["1"]["inputs"] == {}
    assert before == INFO


def test_a_value_that_is_an_object_costs_no_other_value(convert: Any, headless: Headless) -> None:
    button = {"name": "upload", "type": "button", "options": {"serialize": False}}
    workflow = {
        "nodes": [
            node(1, "LoadImage", widgets_values=["dog.png", button]),
            node(2, "SaveImage", widgets_values=[{"an": ["object"]}]),
        ],
        "links": [],
    }
    assert raw(headless, workflow)["1"]["inputs"]["image"] == "cat.png"  # the first of the list
    prompt = ours(convert, workflow)
    assert prompt["1"]["inputs"] == {"image": "dog.png"}
    assert prompt["2"]["inputs"] == {"prefix": {"an": ["object"]}}


def test_a_loader_of_loras_with_a_row_for_each_is_comfy_clis_affair(
    convert: Any, headless: Headless
) -> None:
    rows = [{}, {"type": "PowerLoraLoaderHeaderWidget"}, {"on": True, "lora": "a", "strength": 1}]
    workflow = {"nodes": [node(1, "Loras", widgets_values=rows)], "links": []}
    assert ours(convert, workflow) == raw(headless, workflow)
    assert ours(convert, workflow)["1"]["inputs"]["lora_1"]["lora"] == "a"


def test_links_as_objects_are_read(convert: Any) -> None:
    workflow = bypassed_encoder()
    workflow["nodes"][1]["mode"] = 0
    wanted = ours(convert, workflow)
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    workflow["links"] = [dict(zip(names, link, strict=True)) for link in workflow["links"]]
    assert ours(convert, workflow) == wanted
    assert wanted["3"]["inputs"]["left"] == ["2", 0]


def test_reroutes_primitives_muted_nodes_and_notes(convert: Any, headless: Headless) -> None:
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
    assert raw(headless, workflow)["3"]["inputs"] == {"width": 64}  # what the page had before
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


# Where the converter comes from


def test_many_are_converted_in_one_process_and_a_bad_one_is_only_itself(convert: Any) -> None:
    good = bypassed_encoder()
    found = convert.to_api_all([good, {"nodes": []}, good], INFO)
    assert [isinstance(item, Exception) for item in found] == [False, True, False]


def test_without_comfy_cli_a_sentence_says_how_to_get_it(
    headless: Headless, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("COURIER_COMFY_CLI_PYTHON", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    convert = headless.module("convert.convert")
    with pytest.raises(headless.courier.ConverterMissingError, match="pip install comfy-cli") as c:
        convert.to_api_all([bypassed_encoder()], INFO)
    assert "File > Export (API), which needs nothing" in str(c.value)
    assert c.value.exit_status == 3
    monkeypatch.setenv("COURIER_COMFY_CLI_PYTHON", sys.executable)  # a Python without it
    with pytest.raises(headless.courier.ConverterMissingError):
        convert.to_api_all([bypassed_encoder()], INFO)
    monkeypatch.setenv("COURIER_COMFY_CLI_PYTHON", str(tmp_path / "nothing"))
    said = r"COURIER_COMFY_CLI_PYTHON is .*nothing, which is no Python that has comfy-cli"
    with pytest.raises(headless.courier.ConverterMissingError, match=said):
        convert.to_api_all([bypassed_encoder()], INFO)


def test_the_api_form_needs_no_converter(
    headless: Headless, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    load = headless.module("workflow.load")
    workflow = load.parse_workflow(b'{"1": {"class_type": "X", "inputs": {}}}', "a.json")
    converted = headless.module("convert.convert").to_api(workflow, {})
    assert converted.prompt == workflow.data


@pytest.mark.skipif(
    os.name == "nt", reason="links on the PATH are what pipx makes on other systems"
)
def test_a_comfy_on_the_path_is_enough_also_as_a_link(
    headless: Headless, comfy_cli: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("COURIER_COMFY_CLI_PYTHON", raising=False)
    (tmp_path / "comfy").symlink_to(comfy_cli.parent / "comfy")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ours(headless.module("convert.convert"), bypassed_encoder())["3"]["inputs"] == {}


def test_a_node_that_the_converter_cannot_make_is_no_half_workflow(
    convert: Any, headless: Headless
) -> None:
    """It leaves such a node out, and would go on without it."""
    broken = {**INFO, "Preview": {"input": {"required": {"x": ["INT", {"min": 0}]}}, "output": []}}
    workflow = {
        "nodes": [node(1, "Preview", inputs=7, widgets_values=[1]), node(2, "Load")], "links": [],
    }  # fmt: skip
    assert list(raw_or_error(headless, workflow, broken)) != ["1", "2"]
    with pytest.raises(headless.courier.WorkflowFileError, match="Failed to convert node id=1"):
        ours(convert, workflow, broken)


def raw_or_error(headless: Headless, workflow: Any, info: Any) -> Any:
    (found,) = headless.module("convert.converter").convert_all([workflow], info)
    return {} if isinstance(found, Exception) else found.prompt


def test_what_the_converter_leaves_out_is_told(convert: Any) -> None:
    workflow = {"nodes": [node(1, "Unknown", widgets_values=[1])], "links": []}
    (found,) = convert.to_api_all([workflow], INFO)
    assert any("Unknown" in warning for warning in found.warnings)


def test_of_a_node_without_widgets_it_is_not_told_that_it_is_unknown(convert: Any) -> None:
    known = {**INFO, "Bare": {"input": {"required": {}}, "output": []}}
    workflow = {"nodes": [node(1, "Bare", widgets_values=[1])], "links": []}
    (found,) = convert.to_api_all([workflow], known)
    assert not any("unknown" in warning for warning in found.warnings)
