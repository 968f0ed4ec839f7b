"""Everything that is wrong with a workflow is said at once, in words, with the nearest choice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from ..conftest import OBJECT_INFO, Headless, node, prompt

Check = Callable[..., Any]


@pytest.fixture
def check(headless: Headless, catalog: Any) -> Check:
    module = headless.module("workflow.check")
    return lambda workflow: module.check_workflow(workflow, catalog)


def changed(**inputs: Any) -> dict[str, Any]:
    """The good workflow with inputs of the sampler changed; ``...`` takes one away."""
    workflow = copy.deepcopy(prompt())
    for name, value in inputs.items():
        if value is ...:
            del workflow["5"]["inputs"][name]
        else:
            workflow["5"]["inputs"][name] = value
    return workflow


def only(checked: Any) -> Any:
    (fault,) = checked.faults
    return fault


def test_a_good_workflow_has_no_fault_and_stays_as_it_is(check: Check) -> None:
    workflow = prompt()
    checked = check(workflow)
    assert (checked.faults, checked.notes, checked.prompt) == ((), (), prompt())
    assert workflow == prompt()
    assert checked.require() is checked


def test_all_faults_are_told_at_once_with_ids_and_titles(check: Check, headless: Headless) -> None:
    workflow = changed(seed=..., sampler_name="eulr", model=["99", 0])
    workflow["1"] = {**node("UnetLoadr"), "_meta": {"title": "The big one"}}
    workflow["8"] = {"inputs": {}}
    checked = check(workflow)
    kinds = sorted(fault.kind.value for fault in checked.faults)
    assert kinds == ["bad_link", "bad_value", "malformed_node", "missing_class", "missing_input"]
    with pytest.raises(headless.courier.CheckError) as caught:
        checked.require()
    text = str(caught.value)
    assert "5 faults" in text
    assert "node 1 (UnetLoadr 'The big one'): this ComfyUI has no such node" in text
    assert "the nearest names: UNETLoader" in text
    assert len(text.splitlines()) == 6
    assert caught.value.faults == checked.faults


@pytest.mark.parametrize(("workflow", "kind", "words"), [
    ({"1": {}}, "malformed_node", "has no class_type"),
    ({"1": 7}, "malformed_node", "is no node"),
    ({"1": {"class_type": 3, "inputs": {}}}, "malformed_node", "has no class_type"),
    ({"1": {"class_type": "Preview"}}, "malformed_node", "has no inputs"),
    ({"1": {"class_type": "Preview", "inputs": []}}, "malformed_node", "has no inputs"),
])  # fmt: skip
def test_a_node_that_is_none_is_named(check: Check, workflow: Any, kind: str, words: str) -> None:
    faults = [fault for fault in check(workflow).faults if fault.kind.value == kind]
    assert words in faults[0].message
    assert faults[0].node_id == "1"


@pytest.mark.parametrize(("class_type", "words"), [
    ("CourierNodeOfTomorrow", "install ComfyUI-Courier there, or a newer one"),
    ("Reroute", "is for ComfyUI's page only"),
    ("Ünknown Näme", "install the pack that brings it"),
])  # fmt: skip
def test_a_missing_class_says_what_to_install(check: Check, class_type: str, words: str) -> None:
    fault = only(check({**prompt(), "9": node(class_type)}))
    assert fault.kind.value == "missing_class"
    assert words in fault.message


@pytest.mark.parametrize(("value", "words"), [
    (["99", 0], 'comes from node "99", which is not in the workflow'),
    ([1, 0], 'ids are strings: write "1"'),
    (["1", 3], "output 3 of node 1 (UNETLoader); it has: 0 MODEL"),
    (["1", -1], "output -1"),
    (["1", "0"], 'output "0"'),
    (["1", True], "output true"),
    (["7", 0], "it has: none"),
    (["1"], "a link is a node's id and the number of its output"),
    ([], "a link is"),
    (["1", 0, 0], "a link is"),
    ([None, 0], "comes from node null"),
    ([["1"], 0], "which is not in the workflow"),
    (["4", 0], "has to be MODEL, and output 0 of node 4 (EmptyLatentImage) is LATENT"),
])  # fmt: skip
def test_a_link_that_leads_nowhere(check: Check, value: Any, words: str) -> None:
    fault = next(f for f in check(changed(model=value)).faults if f.kind.value != "cycle")
    assert (fault.kind.value, fault.node_id, fault.input) == ("bad_link", "5", "model")
    assert words in fault.message


def test_anything_fits_anything(check: Check) -> None:
    workflow = {
        **prompt(), "8": node("Preview", anything=["1", 0]), "9": node("Switch", on=True),
        "10": node("Preview", anything=["9", 0]),
    }  # fmt: skip
    workflow["7"]["inputs"]["images"] = ["9", 0]
    assert check(workflow).faults == ()


def test_a_ring_is_told_once_with_its_way(check: Check) -> None:
    workflow = changed()
    workflow["4"] = node("VAEDecode", samples=["4", 0])
    workflow["3"]["inputs"]["clip"] = ["3", 0]
    rings = [fault for fault in check(workflow).faults if fault.kind.value == "cycle"]
    assert sorted(fault.message.split(": ")[1] for fault in rings) == [
        "3 -> 3; cut one of these links", "4 -> 4; cut one of these links",
    ]  # fmt: skip
    workflow = changed(latent_image=["6", 0])
    rings = [fault for fault in check(workflow).faults if fault.kind.value == "cycle"]
    assert len(rings) == 1
    assert "5 -> 6 -> 5" in rings[0].message or "6 -> 5 -> 6" in rings[0].message


def test_a_long_chain_is_no_ring_and_no_end_of_the_stack(check: Check) -> None:
    count = 5000
    workflow = {"0": node("EmptyLatentImage", width=64)}
    for i in range(1, count):
        workflow[str(i)] = node("VAEDecode", samples=[str(i - 1), 0])
    workflow["end"] = node("Preview", anything=[str(count - 1), 0])
    kinds = {fault.kind.value for fault in check(workflow).faults}
    assert kinds == {"bad_link"}  # IMAGE into LATENT, all the way


def test_a_value_where_only_a_link_can_be(check: Check) -> None:
    fault = only(check(changed(model=3)))
    assert (fault.kind.value, fault.input) == ("bad_link", "model")
    assert fault.message == "model has to be a link to a MODEL, and is 3"


def test_no_output_and_no_nodes(check: Check) -> None:
    workflow = prompt()
    del workflow["7"]
    assert "no node is an output" in only(check(workflow)).message
    assert only(check({})).kind.value == "no_output"
    workflow["5"]["inputs"]["cfg"] = 1000.0
    del workflow["3"]
    kinds = sorted(fault.kind.value for fault in check(workflow).faults)
    assert kinds == ["bad_link", "bad_value", "no_output"], "everything at once"


def test_what_leads_to_no_output_is_not_looked_at(check: Check) -> None:
    workflow = {**prompt(), "8": node("KSampler", seed="nonsense")}
    assert check(workflow).faults == ()


def test_a_missing_input_that_was_renamed(check: Check) -> None:
    fault = only(check(changed(sampler_name=..., samplername="euler")))
    assert (fault.kind.value, fault.input) == ("missing_input", "sampler_name")
    assert "there is 'samplername', which this node does not have: was it renamed?" in fault.message
    assert "cfg is missing (FLOAT)" in only(check(changed(cfg=...))).message


def test_an_unknown_input_is_a_note(check: Check) -> None:
    checked = check(changed(colour="red"))
    assert checked.faults == ()
    assert "has no input 'colour'; it is ignored" in checked.notes[0]


@pytest.mark.parametrize(("inputs", "words"), [
    ({"seed": -1}, "the smallest is 0"),
    ({"seed": 2**64}, "the largest is 18446744073709551615"),
    ({"seed": "seven"}, "has to be a whole number, not 'seven'"),
    ({"seed": None}, "has to be a whole number"),
    ({"seed": {}}, "has to be a whole number"),
    ({"cfg": "much"}, "has to be a number"),
    ({"cfg": 101}, "the largest is 100"),
    ({"sampler_name": "eulr"}, "the nearest: 'euler'"),
    ({"sampler_name": 7}, "it offers 'euler', 'dpmpp_2m'"),
    ({"sampler_name": None}, "it offers"),
    ({"sampler_name": "x" * 10_000}, "..."),
])  # fmt: skip
def test_a_value_that_is_not_taken(check: Check, inputs: Any, words: str) -> None:
    fault = only(check(changed(**inputs)))
    assert fault.kind.value == "bad_value"
    assert words in fault.message
    assert len(fault.message) < 300


def test_values_that_the_server_converts_are_taken(check: Check) -> None:
    assert check(changed(seed="7", cfg=3)).faults == ()


# Names of models and files (CASES 46, 47)


def model(name: Any) -> dict[str, Any]:
    workflow = prompt()
    workflow["1"]["inputs"]["unet_name"] = name
    return workflow


def test_a_model_that_is_not_there_names_the_nearest(check: Check) -> None:
    fault = only(check(model("other/WAN.safetensors")))
    assert (fault.kind.value, fault.nearest[0]) == ("missing_model", "sub/wan.safetensors")
    assert "a model that this ComfyUI does not have; the nearest: 'sub/wan.safetensors'" in str(
        fault
    )


def test_the_other_systems_separator_is_matched_to_the_list(
    check: Check, headless: Headless
) -> None:
    checked = check(model("sub\\wan.safetensors"))
    assert checked.faults == ()
    assert checked.prompt["1"]["inputs"]["unet_name"] == "sub/wan.safetensors"
    assert "unet_name is 'sub/wan.safetensors' on this server" in checked.notes[0]
    windows = copy.deepcopy(OBJECT_INFO)
    windows["UNETLoader"]["input"]["required"]["unet_name"][0][0] = "sub\\wan.safetensors"
    catalog = headless.module("workflow.schema").Catalog(windows)
    checked = headless.module("workflow.check").check_workflow(prompt(), catalog)
    assert checked.prompt["1"]["inputs"]["unet_name"] == "sub\\wan.safetensors"


@pytest.mark.parametrize("name", [
    "..\\..\\sub\\wan.safetensors", "/sub/wan.safetensors", "sub//wan.safetensors",
    "./sub/wan.safetensors", "sub/../sub/wan.safetensors", "C:\\sub\\wan.safetensors",
    "sub/wan.safetensors\0", "sub/wan.safetensors ", "SUB/wan.safetensors", "/etc/passwd", "",
])  # fmt: skip
def test_nothing_but_an_entry_of_the_list_is_ever_matched(
    check: Check, headless: Headless, name: str
) -> None:
    fault = only(check(model(name)))
    assert fault.kind.value == "missing_model"
    match = headless.module("workflow.values").match_choice
    assert match(name, ["sub/wan.safetensors", "sd3.safetensors"]) is None


def test_a_separator_that_could_mean_two_entries_is_not_guessed(headless: Headless) -> None:
    match = headless.module("workflow.values").match_choice
    assert match("a\\b/c", ["a/b/c", "a\\b\\c"]) is None
    assert match("a/b/c", ["a/b/c", "a\\b\\c"]) == "a/b/c"
    assert match(1, [1, 2]) == 1
    assert match("1", [1, 2]) is None


def picture(name: Any) -> dict[str, Any]:
    return {"1": node("LoadImage", image=name), "2": node("Preview", anything=["1", 0])}


@pytest.mark.parametrize("name", ["cat.png", "dog.png [output]", "sub/dog.png", "sub/x.png [temp]"])
def test_pictures_that_the_list_need_not_have(check: Check, name: str) -> None:
    assert check(picture(name)).faults == ()


@pytest.mark.parametrize(
    "name", ["dog.png", "../x/dog.png", "/etc/x.png", "C:/x.png", "a/../b.png"]
)
def test_a_picture_that_is_not_there(check: Check, name: str) -> None:
    fault = only(check(picture(name)))
    assert fault.kind.value == "missing_file"
    assert "input folder" in fault.message


def test_inputs_that_others_decide_are_left_to_the_server(check: Check) -> None:
    workflow = {**prompt(), "8": node("Grow", **{"images.image0": ["6", 0], "more": 3})}
    assert check(workflow).faults == ()


def test_a_catalog_that_is_odd_does_not_end_the_check(headless: Headless) -> None:
    odd: dict[str, Any] = {
        "A": None, "B": {}, "C": {"input": []}, "D": {"input": {"required": {"x": 7, "y": []}}},
        "E": {"input": {"required": {"x": [["a"], "no options"]}}, "output": None},
    }  # fmt: skip
    catalog = headless.module("workflow.schema").Catalog(odd)
    workflow = {name: node(name, x="a") for name in odd}
    kinds = {
        f.kind.value
        for f in headless.module("workflow.check").check_workflow(workflow, catalog).faults
    }
    assert kinds == {"missing_class"}


def test_of_an_unknown_input_only_a_node_and_a_number_is_a_link(check: Check) -> None:
    """ComfyUI ignores anything else there, and so do we."""
    for value in (["", "a", "b", ""], ["1", "a"], ["5", "x"], [1, 2], [], ["1", 0, 1], [["1", 0]]):
        checked = check(changed(saved=value))
        assert checked.faults == (), value
        assert "no input 'saved'; it is ignored" in checked.notes[0]
    assert only(check(changed(saved=["99", 0]))).kind.value == "bad_link"
    assert only(check(changed(model=["", "a", "b", ""]))).kind.value == "bad_link"


def test_the_same_of_many_nodes_is_one_line(check: Check, headless: Headless) -> None:
    workflow = prompt()
    for i in range(20, 32):
        workflow[str(i)] = node("Nowhere")
    workflow["20"]["_meta"] = {"title": "First"}
    with pytest.raises(headless.courier.CheckError) as caught:
        check(workflow).require()
    first, line = str(caught.value).splitlines()
    assert "12 faults" in first
    assert line.strip().startswith("nodes 20 'First', 21, 22, 23, 24, 25, 26, 27 and 4 more (Nowh")
    assert len(caught.value.faults) == 12  # a program is told each of them


def test_where_links_are_made_when_queuing_the_missing_input_says_so(
    headless: Headless, catalog: Any
) -> None:
    module = headless.module("workflow.check")
    checked = module.check_workflow(changed(model=...), catalog, ["20 (Anything Everywhere)"])
    message = only(checked).message
    assert message.startswith("model is missing; the workflow has node 20 (Anything Everywhere)")
    assert "Convert all UEs to real links" in message
    value = only(module.check_workflow(changed(seed=...), catalog, ["20 (X)"])).message
    assert "Everywhere" not in value


def test_a_subgraph_that_is_not_in_the_file_is_no_pack_to_install(check: Check) -> None:
    workflow = {**prompt(), "20": node("5b0c2c1e-8a59-4f0c-9d8c-0f7a41f7d6a1")}
    message = only(check(workflow)).message
    assert message.startswith("stands for a subgraph")
    assert "install" not in message


def test_only_what_can_have_a_value_is_to_be_given_one(check: Check) -> None:
    assert only(check(changed(model=...))).message == "model is missing (MODEL): connect it"
    assert only(check(changed(seed=...))).message.endswith("connect it, or give it a value")
