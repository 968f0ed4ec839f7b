"""The status through a real ComfyUI: its route, and Courier Status in workflows."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from devtools.comfyui_client import HttpError
from devtools.comfyui_host import ComfyUIHost
from devtools.comfyui_install import ensure_base, link_pack
from devtools.paths import PACK_NAME, Paths

PATH = "/courier/v1/status"
STATUS_SECONDS = 0.1

LATENT = {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}
IMAGE = {
    "class_type": "EmptyImage",
    "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0},
}


def status_of(*source: Any) -> dict[str, Any]:
    """A Courier Status behind ``source`` (node id and output), or behind nothing."""
    return {"class_type": "CourierStatus", "inputs": {"anything": list(source)} if source else {}}


def loader(file: Path) -> dict[str, Any]:
    inputs = {"unet_name": file.name, "weight_dtype": "default"}
    return {"class_type": "CourierLoadDiffusionModel", "inputs": inputs}


def shown(server: ComfyUIHost, prompt: dict[str, Any], node_id: str = "9") -> str:
    """Run ``prompt``; what the node shows."""
    (text,) = server.client.run(prompt).outputs[node_id]["text"]
    return str(text)


def test_status_answers_under_both_prefixes(server: ComfyUIHost) -> None:
    plain, prefixed = server.client.request(PATH), server.client.request("/api" + PATH)
    assert plain["boot_id"] == prefixed["boot_id"]
    assert plain["device"]["total_bytes"] > 0
    assert plain["host"]["total_bytes"] > 0


def test_status_is_quick(server: ComfyUIHost) -> None:
    server.client.request(PATH)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        server.client.request(PATH)
        seconds.append(time.perf_counter() - started)
    # The quickest: the machine may be busy with other tests.
    assert min(seconds) < STATUS_SECONDS


def test_post_is_refused_in_json(server: ComfyUIHost) -> None:
    with pytest.raises(HttpError, match="the status is read with GET") as caught:
        server.client.request(PATH, {})
    assert caught.value.status == 405


def test_every_input_and_output_has_a_tooltip(server: ComfyUIHost) -> None:
    info = server.client.request("/object_info/CourierStatus")["CourierStatus"]
    inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    assert inputs.keys() == {"anything"}
    assert all(options["tooltip"] for _, options in inputs.values())
    assert all(info["output_tooltips"])
    assert (info["display_name"], info["category"]) == ("Courier Status", "courier")
    assert info["output_name"] == ["anything", "text", "json"]


def test_node_works_without_a_link(server: ComfyUIHost) -> None:
    assert shown(server, {"9": status_of()}).startswith("Courier 0.")


def test_node_runs_every_time_and_what_is_before_it_does_not(server: ComfyUIHost) -> None:
    prompt = {"1": LATENT, "9": status_of("1", 0)}
    shown(server, prompt)
    again = server.client.run(prompt)
    assert again.outputs["9"]["text"], "the node did not run again"
    (cached,) = [data["nodes"] for name, data in again.messages if name == "execution_cached"]
    assert cached == ["1"]


def test_workflow_in_a_picture_stays_json(server: ComfyUIHost) -> None:
    """ComfyUI writes the prompt into pictures, with the fingerprint: NaN would be no JSON."""
    save = {"class_type": "SaveImage", "inputs": {"images": ["9", 0], "filename_prefix": "status"}}
    result = server.client.run({"1": IMAGE, "9": status_of("1", 0), "2": save})
    content = server.client.image(result.images()[0])
    with Image.open(io.BytesIO(content)) as picture:
        prompt = picture.text["prompt"]

    def refuse(constant: str) -> None:
        pytest.fail(f"the picture's workflow has {constant}")

    assert "9" in json.loads(prompt, parse_constant=refuse)


def test_what_came_in_fits_the_plain_input_of_an_older_node(server: ComfyUIHost) -> None:
    save = {"class_type": "SaveImage", "inputs": {"images": ["9", 0], "filename_prefix": "status"}}
    result = server.client.run({"1": IMAGE, "9": status_of("1", 0), "2": save})
    assert len(result.images()) == 1


def test_text_and_json_go_on_to_other_nodes(server: ComfyUIHost) -> None:
    preview = {"class_type": "PreviewAny", "inputs": {"source": ["9", 2]}}
    result = server.client.run({"9": status_of(), "2": preview})
    body = json.loads(result.outputs["2"]["text"][0])
    assert body["boot_id"] == server.client.request(PATH)["boot_id"]


def test_connected_model_is_shown_first(server: ComfyUIHost, small_models: Any) -> None:
    prompt = {
        "1": loader(small_models["wan"]),
        "2": loader(small_models["sd3"]),
        "8": status_of("1", 0),
        "9": status_of("2", 0),
    }
    result = server.client.run(prompt)
    texts = {key: result.outputs[key]["text"][0] for key in ("8", "9")}
    first = {key: text.split("\n\n")[1].splitlines()[0] for key, text in texts.items()}
    assert first == {
        "8": f"{small_models['wan'].stem}: unloaded",
        "9": f"{small_models['sd3'].stem}: unloaded",
    }


def test_clone_of_a_model_is_known(server: ComfyUIHost, small_models: Any) -> None:
    shift = {"class_type": "ModelSamplingSD3", "inputs": {"model": ["1", 0], "shift": 8.0}}
    other = loader(small_models["sd3"])
    prompt = {"7": other, "1": loader(small_models["wan"]), "2": shift, "9": status_of("2", 0)}
    text = shown(server, {**prompt, "8": status_of("7", 0)})
    assert text.split("\n\n")[1].startswith(small_models["wan"].stem)


def test_name_beyond_ascii_is_shown_right_everywhere(
    server: ComfyUIHost, small_models: Any
) -> None:
    file = small_models["wan"].with_name("模型 x ä b tiny model 🐎 (1).safetensors")
    shutil.copyfile(small_models["wan"], file)
    text = shown(server, {"1": loader(file), "9": status_of("1", 0)})
    assert text.split("\n\n")[1].startswith(f"{file.stem}: ")
    (model,) = [m for m in server.client.request(PATH)["models"] if m["file"] == file.name]
    assert model["id"].isascii()
    assert f"id       {model['id']}" in text


def test_status_names_no_folder_of_the_machine(server: ComfyUIHost, small_models: Any) -> None:
    server.client.run({"1": loader(small_models["wan"]), "9": status_of("1", 0)})
    body = server.client.request(PATH, raw=True).decode()
    assert str(small_models.base) not in body


def test_status_needs_no_server_and_no_hidden_inputs(run_in_comfyui: Callable[..., Any]) -> None:
    run_in_comfyui(
        """
import asyncio, bootstrap
pack = bootstrap.load_pack()
extension = asyncio.run(pack.comfy_entrypoint())
nodes = asyncio.run(extension.get_node_list())
node = next(node for node in nodes if node.GET_SCHEMA().node_id == "CourierStatus")
value = object()
output = node.execute(anything=value)
assert output.result[0] is value
assert output.result[1].startswith("Courier "), output.result
assert node.execute().result[0] is None
assert node.fingerprint_inputs() != node.fingerprint_inputs()
"""
    )


def test_pack_present_twice_does_not_stop_the_server(
    server_factory: Callable[..., ComfyUIHost], courier_checkout: Paths, tmp_path: Path
) -> None:
    base = ensure_base(courier_checkout, tmp_path / "base")
    link_pack(courier_checkout.root, base / "custom_nodes" / f"{PACK_NAME}-main")
    server = server_factory(base=base)
    try:
        assert server.client.request(PATH)["models"] == []
        assert shown(server, {"9": status_of()}).startswith("Courier 0.")
        log = server.log_text()
    finally:
        server.stop()
    assert log.count("is the pack installed twice?") == 1
    assert f"{PACK_NAME}-main" in log
