"""Saved workflows: what the command makes of them against what ComfyUI's own page makes of them."""

from __future__ import annotations

import copy
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Browser, Page

from devtools.comfy_cli import ensure_templates
from devtools.page import open_page, prepare
from devtools.paths import Paths
from devtools.small_workflows import loaded_with
from devtools.small_workflows import node as node_of

from ..courier_command import headless_module
from .commanding import Bench
from .prompts import EXPORT, same_graph, what_runs

EXAMPLES = Path(__file__).parents[2] / "example_workflows"

# Of all kinds: subgraphs, subgraphs in subgraphs, bypassed ones, reroutes, primitives, muted nodes,
# dynamic inputs, notes.
COMPARED = (
    "3d_hunyuan3d_multiview_to_model.json",
    "3d_hunyuan3d_multiview_to_model_turbo.json",
    "api_recraft_vector_gen.json",
    "api_wan_text_to_video.json",
    "flux1_dev_uso_reference_image_gen.json",
    "image_flux2_klein_image_edit_4b_base.json",
    "image_omnigen2_image_edit.json",
    "image_qwen_image_instantx_inpainting_controlnet.json",
    "template_sugar_coated_gummy_style_qwen.json",
    "templates-textured_logotype-v2.1.json",
    "video_humo.json",
    "video_wan2_2_14B_s2v.json",
)
"""Names of ``comfyui-workflow-templates-json``."""
NO_WORKFLOWS = ("index", "fuse_options")
"""What else is in it: lists of the others."""


@pytest.fixture(scope="module")
def page(bench: Bench, browser: Browser) -> Iterator[Page]:
    """ComfyUI's page, ready."""
    prepare(bench.server)
    page = browser.new_page(viewport={"width": 1500, "height": 900})
    open_page(page, bench.server.address)
    yield page
    page.close()


@pytest.fixture(scope="module")
def object_info(bench: Bench) -> Any:
    return bench.server.client.request("/object_info")


@pytest.fixture(scope="module")
def templates(courier_checkout: Paths) -> Path:
    return ensure_templates(courier_checkout)


# Workflows that others wrote


@pytest.mark.parametrize("name", COMPARED)
def test_a_foreign_workflow_becomes_what_the_page_makes_of_it(
    page: Page, object_info: Any, templates: Path, name: str
) -> None:
    workflow = json.loads((templates / name).read_text(encoding="utf-8"))
    (found,) = headless_module("convert.convert").to_api_all([copy.deepcopy(workflow)], object_info)
    assert not isinstance(found, Exception), found
    want = what_runs(page.evaluate(EXPORT, workflow), object_info)
    assert want, "nothing of it runs, so nothing is compared"
    assert same_graph(what_runs(found.prompt, object_info), want)


def test_every_template_is_loaded_converted_and_checked(object_info: Any, templates: Path) -> None:
    """Hundreds of files that no one here wrote, of nodes that mostly are not there."""
    load, convert, check = (
        headless_module("workflow.load"),
        headless_module("convert.convert"),
        headless_module("workflow.check"),
    )
    catalog = headless_module("workflow.schema").Catalog(object_info)
    files = sorted(templates.glob("*.json"))
    workflows = {}
    for file in files:
        if file.name.startswith(NO_WORKFLOWS):
            with pytest.raises(load.WorkflowFileError, match="is JSON, b"):
                load.parse_workflow(file.read_bytes(), file.name)
            continue
        workflow = load.parse_workflow(file.read_bytes(), file.name)
        assert workflow.form is load.Form.UI, file.name
        workflows[file.name] = workflow
    assert len(workflows) > 500
    converted = convert.to_api_all([w.data for w in workflows.values()], object_info)
    fits, seen = 0, set()
    for name, found in zip(workflows, converted, strict=True):
        assert not isinstance(found, Exception), f"{name}: {found}"
        checked = check.check_workflow(found.prompt, catalog)
        seen |= {fault.kind.value for fault in checked.faults}
        texts = [str(fault) for fault in checked.faults]
        assert all("\n" not in text and len(text) < 1000 for text in texts), name
        missing = {f.class_type for f in checked.faults if f.kind.value == "missing_class"}
        assert missing.isdisjoint(object_info), name
        kinds = {fault.kind.value for fault in checked.faults} - {"missing_model", "missing_file"}
        fits += not kinds
    # Their models are not here; what else is wrong with so many would be wrong with our check.
    assert fits > 100
    assert "missing_class" in seen


# Our own, in every form


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.json")))
def test_examples_open_from_the_pages_templates(bench: Bench, page: Page, name: str) -> None:
    """The page lists what is in that folder, and opens nothing that is in API form."""
    listed = bench.server.client.request("/api/workflow_templates")
    assert Path(name).stem in next(names for pack, names in listed.items() if "courier" in pack)
    workflow = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    prompt = json.loads((EXAMPLES / "api" / name).read_text(encoding="utf-8"))
    found = page.evaluate(EXPORT, workflow)
    assert {i: (n["class_type"], n["inputs"]) for i, n in found.items()} == {
        i: (n["class_type"], n["inputs"]) for i, n in prompt.items()
    }


def test_the_page_and_the_command_make_the_same_pictures(
    bench: Bench, page: Page, tmp_path: Path
) -> None:
    """The example in API form, as the page saves it, and out of a picture: bit for bit."""
    example = EXAMPLES / "api" / "courier_wan_t2v_small.json"
    prompt = json.loads(example.read_text(encoding="utf-8"))
    saved = page.evaluate(
        "async prompt => { await window.app.loadApiJson(prompt, 'x');"
        " return window.app.graph.serialize(); }",
        prompt,
    )
    page.evaluate("() => window.app.queuePrompt(0, 1)")
    theirs = last_of_the_page(bench)
    want = bench.pixels(theirs)
    file = tmp_path / "saved.json"
    file.write_text(json.dumps(saved), encoding="utf-8-sig")
    picture = tmp_path / "picture.png"
    picture.write_bytes(bench.client.download(next(theirs.files())))
    for source in (example, file, picture):
        bench.forget()
        done = bench.run("run", str(source), "--json")
        assert done.status == 0, done.err
        run = bench.client.run(done.json["id"])
        assert bench.pixels(run) == want, source
        # What the page saved goes into the picture, so that the page opens it again.
        embedded = saved_form(bench, run)
        assert (embedded is None) == (source == example)
        if embedded is not None:
            assert [node["type"] for node in embedded["nodes"]] == [
                node["type"] for node in saved["nodes"]
            ]


def saved_form(bench: Bench, run: Any) -> Any:
    """The saved form in the first picture of a run; None: there is none."""
    with Image.open(io.BytesIO(bench.client.download(next(run.files())))) as picture:
        text = picture.info.get("workflow")
    return None if text is None else json.loads(text)


def last_of_the_page(bench: Bench) -> Any:
    """What the page has queued, as a run, once it has ended."""
    client = bench.server.client
    while client.request("/queue") != {"queue_running": [], "queue_pending": []}:
        time.sleep(0.1)
    entry = list(client.request("/history").values())[-1]
    value = {"id": "x", "state": "done", "outputs": entry["outputs"]}
    return bench.courier.Run.from_json(value)


def node(node_id: int, kind: str, **more: Any) -> dict[str, Any]:
    return {
        "id": node_id, "type": kind, "pos": [0, 0], "size": [200, 100], "flags": {}, "order": 0,
        "mode": 0, "inputs": [], "outputs": [], "properties": {}, **more,
    }  # fmt: skip


def slot(name: str, kind: str, link: int | None) -> dict[str, Any]:
    return {"name": name, "type": kind, "link": link}


def widget(name: str, kind: str, link: int | None) -> dict[str, Any]:
    return {**slot(name, kind, link), "widget": {"name": name}}


def out(kind: str, *links: int) -> dict[str, Any]:
    return {"name": kind, "type": kind, "links": list(links), "slot_index": 0}


SUBGRAPH = "5b0c2c1e-8a59-4f0c-9d8c-0f7a41f7d6a1"


def everything(small_models: Any) -> dict[str, Any]:
    """Reroutes, a primitive, a bypassed LoRA, a muted output, a note, a group, and a subgraph."""
    sampler = node(
        1, "KSampler",
        inputs=[
            slot("model", "MODEL", 1), slot("positive", "CONDITIONING", 2),
            slot("negative", "CONDITIONING", 3), slot("latent_image", "LATENT", 4),
        ],
        outputs=[out("LATENT", 5)],
        widgets_values=[7, "fixed", 2, 1.0, "euler", "simple", 1.0],
    )  # fmt: skip
    names = ("model", "positive", "negative", "latent_image")
    kinds = ("MODEL", "CONDITIONING", "CONDITIONING", "LATENT")
    subgraph = {
        "id": SUBGRAPH, "version": 1, "name": "Sampling", "revision": 0, "config": {},
        "state": {"lastGroupId": 0, "lastNodeId": 1, "lastLinkId": 5, "lastRerouteId": 0},
        "inputNode": {"id": -10, "bounding": [0, 0, 100, 100]},
        "outputNode": {"id": -20, "bounding": [500, 0, 100, 100]},
        "inputs": [
            {"id": f"0000000{i}-0000-4000-8000-000000000000", "name": name, "type": kind,
             "linkIds": [i + 1]}
            for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
        ],
        "outputs": [{"id": "00000009-0000-4000-8000-000000000000", "name": "LATENT",
                     "type": "LATENT", "linkIds": [5]}],
        "widgets": [], "nodes": [sampler], "groups": [],
        "links": [
            *({"id": i + 1, "origin_id": -10, "origin_slot": i, "target_id": 1, "target_slot": i,
               "type": kind} for i, kind in enumerate(kinds)),
            {"id": 5, "origin_id": 1, "origin_slot": 0, "target_id": -20, "target_slot": 0,
             "type": "LATENT"},
        ],
        "extra": {},
    }  # fmt: skip
    wan, vae, clip = (small_models[key].name for key in ("wan", "vae", "clip_l"))
    nodes = [
        node(1, "CourierLoadDiffusionModel", outputs=[out("MODEL", 1)],
             inputs=[slot("budget", "COURIER_BUDGET", None)], widgets_values=[wan, "default"]),
        node(2, "LoraLoaderModelOnly", mode=4, inputs=[slot("model", "MODEL", 1)],
             outputs=[out("MODEL", 2)], widgets_values=[small_models["wan_lora"].name, 1.0]),
        node(3, "Reroute", inputs=[slot("", "*", 2)], outputs=[out("MODEL", 3)]),
        node(4, "CLIPLoader", outputs=[out("CLIP", 4)], widgets_values=[clip, "sd3", "default"]),
        node(5, "CLIPTextEncode", inputs=[slot("clip", "CLIP", 4)],
             outputs=[out("CONDITIONING", 5, 6)], widgets_values=["a {courier|courier} 一只猫"]),
        node(6, "PrimitiveNode", outputs=[{**out("INT", 7), "widget": {"name": "width"}}],
             widgets_values=[48, "fixed"]),
        node(7, "EmptyHunyuanLatentVideo", inputs=[widget("width", "INT", 7)],
             outputs=[out("LATENT", 8)], widgets_values=[32, 32, 1, 1]),
        node(8, SUBGRAPH, outputs=[out("LATENT", 9)], inputs=[
            slot("model", "MODEL", 3), slot("positive", "CONDITIONING", 5),
            slot("negative", "CONDITIONING", 6), slot("latent_image", "LATENT", 8)]),
        node(9, "VAELoader", outputs=[out("VAE", 10)], widgets_values=[vae]),
        node(10, "VAEDecode", inputs=[slot("samples", "LATENT", 9), slot("vae", "VAE", 10)],
             outputs=[out("IMAGE", 11, 12)]),
        node(11, "SaveImage", title="Kept 猫", inputs=[slot("images", "IMAGE", 11)],
             widgets_values=["courier-saved"]),
        node(12, "PreviewImage", mode=2, inputs=[slot("images", "IMAGE", 12)]),
        node(13, "Note", widgets_values=["a note"]),
        node(14, "MarkdownNote", widgets_values=["# a note"]),
    ]  # fmt: skip
    links = [
        [1, 1, 0, 2, 0, "MODEL"], [2, 2, 0, 3, 0, "MODEL"], [3, 3, 0, 8, 0, "MODEL"],
        [4, 4, 0, 5, 0, "CLIP"], [5, 5, 0, 8, 1, "CONDITIONING"], [6, 5, 0, 8, 2, "CONDITIONING"],
        [7, 6, 0, 7, 0, "INT"], [8, 7, 0, 8, 3, "LATENT"], [9, 8, 0, 10, 0, "LATENT"],
        [10, 9, 0, 10, 1, "VAE"], [11, 10, 0, 11, 0, "IMAGE"], [12, 10, 0, 12, 0, "IMAGE"],
    ]  # fmt: skip
    return {
        "id": "0a1b2c3d-0000-4000-8000-000000000001", "revision": 0, "last_node_id": 14,
        "last_link_id": 12, "nodes": nodes, "links": links, "version": 0.4, "config": {},
        "groups": [{"id": 1, "title": "a group", "bounding": [0, 0, 900, 900], "flags": {}}],
        "definitions": {"subgraphs": [subgraph]}, "extra": {},
    }  # fmt: skip


def test_everything_that_the_page_can_save_is_converted_as_it_converts_it(
    bench: Bench, page: Page, object_info: Any, tmp_path: Path
) -> None:
    workflow = everything(bench.small_models)
    want = what_runs(page.evaluate(EXPORT, workflow), object_info)
    assert len(want) == 8
    folder = tmp_path / "模型 x"
    folder.mkdir()
    file = folder / "tiny 🐎 (1).json"
    text = json.dumps(workflow, ensure_ascii=False, indent=1).replace("\n", "\r\n")
    file.write_bytes(text.encode("utf-8-sig"))
    # CASES 46, 48: from another folder, and where the system's encoding knows nothing but ASCII.
    for more in ({}, {"LC_ALL": "C", "PYTHONUTF8": "0"}):
        made = bench.run("convert", f"{folder.name}/{file.name}".encode(), folder=tmp_path, **more)
        assert made.status == 0, made.err
        assert same_graph(what_runs(made.json, object_info), want)
    page.evaluate("() => window.app.queuePrompt(0, 1)")
    pictures = bench.pixels(last_of_the_page(bench))
    bench.forget()
    change = ("--set", "Kept 猫.filename_prefix=猫")
    more = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = bench.run("run", file.name.encode(), "--json", *change, folder=folder, **more)
    assert done.status == 0, done.err
    run = bench.client.run(done.json["id"])
    assert bench.pixels(run) == pictures
    assert next(run.files()).filename.startswith("猫")
    assert run.name == "tiny 🐎 (1)"
    assert saved_form(bench, run) is None  # it was changed, and the saved form was not


def test_an_untouched_workflow_runs_under_a_budget(bench: Bench, tmp_path: Path) -> None:
    prompt = bench.prompt("UNETLoader", seed=8)
    file = tmp_path / "stock.json"
    file.write_text(json.dumps(prompt))
    stock = bench.client.wait(bench.client.start(prompt).id)
    done = bench.run("run", str(file), "--courier", "--vram", "0.1", "--ram", "0", "--json")
    assert done.status == 0, done.err
    run = bench.client.run(done.json["id"])
    assert bench.pixels(run) == bench.pixels(stock)
    models = run.raw["models"]
    # Each of the three has the figure; the text encoder alone is larger than that.
    wanted = {"device_bytes": int(0.1 * 2**30), "host_bytes": 0}
    assert [model["budgets"] for model in models] == [wanted] * 3
    assert sum(model["counts"]["mapped"] > 0 for model in models) == 1


def test_the_dry_run_finds_the_layers_that_the_server_finds(bench: Bench) -> None:
    """By names alone, of three architectures."""
    for key in ("wan", "sd3", "sd15"):
        file = bench.small_models[key]
        prompt = {
            "1": loaded_with("CourierLoadDiffusionModel", file.name),
            "2": node_of("CourierStatus", anything=["1", 0]),
        }
        bench.client.wait(bench.client.start(prompt).id)
        status = [m for m in bench.client.status()["models"] if m["file"] == file.name][-1]
        theirs = {
            layer["name"].removeprefix("diffusion_model."): layer["bytes"]
            for layer in status["layers"]
            if not layer["name"].startswith("(")
        }
        done = bench.run("plan", str(file), "--vram", "2", "--json")
        assert done.status == 0, done.out
        assert {layer["name"]: layer["bytes"] for layer in done.json["layers"]} == theirs


def test_where_the_form_that_ran_is_too_old_the_saved_one_beside_it_is_taken(
    bench: Bench, tmp_path: Path
) -> None:
    """A picture of an older ComfyUI: a class that has another name now."""
    saved = everything(bench.small_models)
    ran = {"1": {"class_type": "ASaverOfLongAgo", "inputs": {"images": ["2", 0]}}}
    info = PngInfo()
    info.add_text("prompt", json.dumps(ran))
    info.add_text("workflow", json.dumps(saved))
    picture = tmp_path / "old.png"
    Image.new("RGB", (8, 8)).save(picture, pnginfo=info)
    done = bench.run("check", str(picture), "--json")
    assert done.status == 0, done.err
    assert "the saved form beside it fits better" in done.err
    assert done.json["nodes"] == 8
    info = PngInfo()
    info.add_text("prompt", json.dumps(ran))
    Image.new("RGB", (8, 8)).save(picture, pnginfo=info)
    done = bench.run("check", str(picture), "--json")
    assert done.status == 4
    assert done.json["error"]["faults"][0]["class_type"] == "ASaverOfLongAgo"
