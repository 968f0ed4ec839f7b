"""Overrides by id, title and class; seeds; budgets; Courier's loaders for the core's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ..conftest import OBJECT_INFO, Headless, node, prompt

Change = Callable[..., Any]


@pytest.fixture
def change(headless: Headless, catalog: Any) -> Change:
    module = headless.module("workflow.change")

    def run(*values: str, workflow: Any = None, **more: Any) -> Any:
        changes = module.Changes(values, **more)
        return module.change_workflow(workflow or prompt(), changes, catalog)

    return run


@pytest.mark.parametrize(("text", "node_id", "name", "value"), [
    ("5.seed=8", "5", "seed", 8),
    ("KSampler.seed=8", "5", "seed", 8),
    ("What to see.text=a=b.c", "3", "text", "a=b.c"),
    ("3.text=", "3", "text", ""),
    ("3.text=7", "3", "text", "7"),
    ("KSampler.cfg=2", "5", "cfg", 2.0),
    ("KSampler.sampler_name=dpmpp_2m", "5", "sampler_name", "dpmpp_2m"),
    ("1.unet_name=sub\\wan.safetensors", "1", "unet_name", "sub/wan.safetensors"),
    ("3.text=一只猫", "3", "text", "一只猫"),
])  # fmt: skip
def test_a_value_is_set_by_id_title_or_class(
    change: Change, text: str, node_id: str, name: str, value: Any
) -> None:
    changed = change(text)
    got = changed.prompt[node_id]["inputs"][name]
    assert got == value
    assert type(got) is type(value)
    others = {i: n for i, n in changed.prompt.items() if i != node_id}
    assert others == {i: n for i, n in prompt().items() if i != node_id}
    assert len(changed.notes) == 1


def test_what_was_given_stays_as_it_is(change: Change) -> None:
    workflow = prompt()
    change("5.seed=8", workflow=workflow, seed="3", courier=True)
    assert workflow == prompt()


def test_a_class_that_is_there_twice_is_set_twice_and_said(change: Change) -> None:
    workflow = {**prompt(), "8": prompt()["3"]}
    changed = change("CLIPTextEncode.text=dog", workflow=workflow)
    assert [changed.prompt[i]["inputs"]["text"] for i in ("3", "8")] == ["dog", "dog"]
    assert len(changed.notes) == 2


def test_an_id_goes_before_a_title_and_a_title_before_a_class(change: Change) -> None:
    workflow = prompt()
    workflow["8"] = {**node("CLIPTextEncode", text="x"), "_meta": {"title": "3"}}
    workflow["9"] = {**node("CLIPTextEncode", text="x"), "_meta": {"title": "KSampler"}}
    changed = change("3.text=y", "KSampler.text=z", workflow=workflow)
    texts = {i: changed.prompt[i]["inputs"]["text"] for i in ("3", "8", "9")}
    assert texts == {"3": "y", "8": "x", "9": "z"}


def test_dots_in_titles_and_in_inputs(change: Change) -> None:
    workflow = {"1": {**node("Grow", **{"images.a": 1}), "_meta": {"title": "v1.5 x"}}}
    changed = change("v1.5 x.images.a=2", workflow=workflow)
    assert changed.prompt["1"]["inputs"] == {"images.a": 2}


def test_a_link_is_replaced_and_said(change: Change) -> None:
    workflow = prompt()
    workflow["3"]["inputs"]["text"] = ["4", 0]
    changed = change("3.text=cat", workflow=workflow)
    assert changed.prompt["3"]["inputs"]["text"] == "cat"
    assert "text no longer comes from node 4" in changed.notes[0]


@pytest.mark.parametrize(("text", "value"), [("true", True), ("No", False), ("1", True)])
def test_switches_as_people_write_them(change: Change, text: str, value: bool) -> None:
    changed = change(f"1.on={text}", workflow={"1": node("Switch", on=None)})
    assert changed.prompt["1"]["inputs"]["on"] is value


@pytest.mark.parametrize(("text", "words"), [
    ("KSampler", "has to be NODE.INPUT=VALUE"),
    ("KSampler=7", "has to be NODE.INPUT=VALUE"),
    ("=", "has to be NODE.INPUT=VALUE"),
    (".=", "no node has the id, title or class ''"),
    ("KSamplr.seed=7", "there is KSampler"),
    ("zzz.seed=7", "there is 1 (UNETLoader), 2 (CLIPLoader)"),
    ("99.seed=7", "no node has the id, title or class '99'"),
    ("KSampler.sed=7", "has no input 'sed'; it has seed"),
    ("KSampler.seed=seven", "takes a whole number"),
    ("KSampler.seed=7.5", "takes a whole number"),
    ("KSampler.cfg=x", "takes a number"),
    ("KSampler.sampler_name=eulr", "does not offer that; there is euler"),
    ("1.unet_name=../x.safetensors", "does not offer that"),
])  # fmt: skip
def test_an_override_that_cannot_be_meant(
    change: Change, headless: Headless, text: str, words: str
) -> None:
    with pytest.raises(headless.courier.UsageError) as caught:
        change(text)
    assert words in str(caught.value)
    assert caught.value.exit_status == 2


def test_seeds_of_every_node_that_has_one(change: Change, headless: Headless) -> None:
    workflow = {**prompt(), "8": node("Other", noise_seed=1), "9": node("Linked", seed=["8", 0])}
    changed = change(seed="11", workflow=workflow)
    assert changed.prompt["5"]["inputs"]["seed"] == 11
    assert changed.prompt["8"]["inputs"]["noise_seed"] == 11
    assert changed.prompt["9"]["inputs"]["seed"] == ["8", 0]
    first, second = (change(seed="random").prompt["5"]["inputs"]["seed"] for _ in range(2))
    assert first != second
    with pytest.raises(headless.courier.UsageError, match="whole number or random"):
        change(seed="x")
    with pytest.raises(headless.courier.UsageError, match="finds no seed"):
        change(seed="1", workflow={"1": node("Preview")})


def test_couriers_loader_takes_the_place_of_the_cores(change: Change) -> None:
    changed = change(courier=True)
    assert changed.prompt["1"] == {
        "class_type": "CourierLoadDiffusionModel",
        "inputs": {"unet_name": "sub/wan.safetensors", "weight_dtype": "default"},
    }
    assert change(courier=True, workflow=changed.prompt).prompt == changed.prompt


def test_loaders_that_stay_are_named_with_the_reason(change: Change, headless: Headless) -> None:
    more = {
        "20": node("ControlNetLoader", control_net_name="c.safetensors"),
        "21": node("LoraLoader", model=["1", 0], lora_name="l.safetensors"),
        "22": node("VAELoader", vae_name="vae.safetensors"),
    }
    changed = change(courier=True, workflow={**prompt(), **more})
    assert changed.prompt["2"]["class_type"] == "CourierLoadCLIP"
    assert {i: changed.prompt[i] for i in more} == more
    stays = [note for note in changed.notes if "stays as it is" in note]
    assert len(stays) == 2
    assert "Courier has no loader like ControlNetLoader" in stays[0]
    assert "Courier on this ComfyUI has no CourierLoadVAE" in stays[1]


def test_a_workflow_of_other_loaders_alone_runs_as_it_is(
    change: Change, headless: Headless
) -> None:
    workflow = {"1": node("ControlNetLoader", control_net_name="c.safetensors")}
    budget = headless.module("workflow.change").BudgetChoice(8)
    changed = change(courier=True, budget=budget, workflow=workflow)
    assert changed.prompt == workflow
    assert "no loader like ControlNetLoader" in changed.notes[0]
    assert "the budget holds for nothing" in changed.notes[1]


def test_a_budget_for_all_courier_loaders(change: Change, headless: Headless) -> None:
    budget = headless.module("workflow.change").BudgetChoice
    changed = change(courier=True, budget=budget(11.5, None, together=True))
    assert changed.prompt["1"]["inputs"]["budget"] == ["courier_budget", 0]
    assert changed.prompt["courier_budget"]["inputs"] == {
        "preset": "custom", "vram_gib": 11.5, "host_gib": -1.0,
        "applies_to": "all models together",
    }  # fmt: skip
    again = change(budget=budget(None, 0.0), workflow=changed.prompt)
    assert again.prompt["1"]["inputs"]["budget"] == ["courier_budget_2", 0]
    assert again.prompt["courier_budget_2"]["inputs"]["host_gib"] == 0.0
    # What is not said stays as the workflow has it.
    assert again.prompt["courier_budget_2"]["inputs"]["vram_gib"] == 11.5
    assert "card 11.5 GiB, RAM 0 GiB" in again.notes[-1]
    auto = {"class_type": "CourierBudget", "inputs": {"preset": "auto", "vram_gib": 5.0}}
    given = {**changed.prompt, "courier_budget": auto}
    third = change(budget=budget(None, 2.0), workflow=given)
    assert third.prompt["courier_budget_2"]["inputs"]["vram_gib"] == 0.0


def test_a_budget_or_a_loader_for_nothing_is_refused(change: Change, headless: Headless) -> None:
    usage = headless.courier.UsageError
    with pytest.raises(usage, match="with --courier they take the place"):
        change(budget=headless.module("workflow.change").BudgetChoice(8))
    with pytest.raises(usage, match="finds nothing to replace"):
        change(courier=True, workflow={"1": node("Preview")})
    module = headless.module("workflow.change")
    without = {name: i for name, i in OBJECT_INFO.items() if not name.startswith("Courier")}
    catalog = headless.module("workflow.schema").Catalog(without)
    with pytest.raises(usage, match="install ComfyUI-Courier there"):
        module.change_workflow(prompt(), module.Changes(courier=True), catalog)
