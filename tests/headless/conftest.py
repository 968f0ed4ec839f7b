"""The headless side as a program has it: through ``courier.py``, with no ComfyUI near."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from ..courier_command import COMMAND, headless_module, load_courier

ROOT = COMMAND.parent


@dataclass(frozen=True)
class Headless:
    """What ``import courier`` brings."""

    courier: ModuleType

    def module(self, name: str) -> ModuleType:
        """``module("workflow.check")``."""
        return headless_module(name)


@pytest.fixture(scope="session")
def headless() -> Headless:
    return Headless(load_courier())


def info(
    required: dict[str, Any] | None = None,
    output: list[Any] | None = None,
    optional: dict[str, Any] | None = None,
    output_node: bool = False,
) -> dict[str, Any]:
    """One class as ``/object_info`` tells it."""
    return {
        "input": {"required": required or {}, "optional": optional or {}},
        "output": output or [],
        "output_node": output_node,
    }


SEED = ["INT", {"default": 0, "min": 0, "max": 2**64 - 1}]
OBJECT_INFO: dict[str, Any] = {
    "UNETLoader": info(
        {"unet_name": [["sub/wan.safetensors", "sd3.safetensors"]], "weight_dtype": [["default"]]},
        ["MODEL"],
    ),
    "CourierLoadDiffusionModel": info(
        {
            "unet_name": ["COMBO", {"options": ["sub/wan.safetensors"]}],
            "weight_dtype": [["default"]],
        },
        ["MODEL"],
        {"budget": ["COURIER_BUDGET", {}]},
    ),
    "CourierBudget": info(
        {"preset": [["custom"]], "vram_gib": ["FLOAT", {}], "host_gib": ["FLOAT", {}]},
        ["COURIER_BUDGET"],
    ),
    "CLIPLoader": info({"clip_name": [["clip.safetensors"]]}, ["CLIP"]),
    "CourierLoadCLIP": info(
        {"clip_name": [["clip.safetensors"]]}, ["CLIP"], {"budget": ["COURIER_BUDGET", {}]}
    ),
    "ControlNetLoader": info({"control_net_name": [["c.safetensors"]]}, ["CONTROL_NET"]),
    "LoraLoader": info({"model": ["MODEL"], "lora_name": [["l.safetensors"]]}, ["MODEL"]),
    "VAELoader": info({"vae_name": [["vae.safetensors"]]}, ["VAE"]),
    "CLIPTextEncode": info(
        {"text": ["STRING", {"multiline": True}], "clip": ["CLIP"]}, ["CONDITIONING"]
    ),
    "EmptyLatentImage": info({"width": ["INT", {"min": 16, "max": 8192}]}, ["LATENT"]),
    "KSampler": info(
        {
            "model": ["MODEL"],
            "positive": ["CONDITIONING"],
            "latent_image": ["LATENT"],
            "seed": SEED,
            "cfg": ["FLOAT", {"min": 0.0, "max": 100.0}],
            "sampler_name": [["euler", "dpmpp_2m"]],
        },
        ["LATENT"],
    ),
    "VAEDecode": info({"samples": ["LATENT"]}, ["IMAGE"]),
    "SaveImage": info({"images": ["IMAGE"], "prefix": ["STRING", {}]}, [], output_node=True),
    "LoadImage": info({"image": [["cat.png"], {"image_upload": True}]}, ["IMAGE", "MASK"]),
    "Preview": info({"anything": ["*"]}, [], output_node=True),
    "Switch": info({"on": ["BOOLEAN", {}]}, ["*"]),
    "Grow": info({"images": ["COMFY_AUTOGROW_V3", {}]}, [], output_node=True),
}


def prompt() -> dict[str, Any]:
    """A workflow in API form that fits OBJECT_INFO."""
    return {
        "1": node("UNETLoader", unet_name="sub/wan.safetensors", weight_dtype="default"),
        "2": node("CLIPLoader", clip_name="clip.safetensors"),
        "3": titled("What to see", "CLIPTextEncode", text="a cat", clip=["2", 0]),
        "4": node("EmptyLatentImage", width=64),
        "5": node(
            "KSampler", model=["1", 0], positive=["3", 0], latent_image=["4", 0], seed=7, cfg=1.0,
            sampler_name="euler",
        ),
        "6": node("VAEDecode", samples=["5", 0]),
        "7": node("SaveImage", images=["6", 0], prefix="x"),
    }  # fmt: skip


def titled(title: str, class_type: str, **inputs: Any) -> dict[str, Any]:
    return {**node(class_type, **inputs), "_meta": {"title": title}}


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


@pytest.fixture(scope="session")
def catalog(headless: Headless) -> Any:
    return headless.module("workflow.schema").Catalog(OBJECT_INFO)
