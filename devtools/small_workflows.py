"""Small workflows in API form over the small models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

GIB = 2**30
LOADER, BUDGET, LORA, SAMPLER, SAVE = "1", "2", "3", "7", "9"
"""Ids of nodes that callers look for, or replace."""

Prompt = dict[str, Any]


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """One node."""
    return {"class_type": class_type, "inputs": inputs}


def loaded_with(class_type: str, file: str, **more: Any) -> dict[str, Any]:
    """A loader of diffusion models, ours or the core's."""
    return node(class_type, unet_name=file, weight_dtype="default", **more)


def budget_node(device_bytes: int, host_bytes: int) -> dict[str, Any]:
    """A budget in bytes."""
    # 0 is automatic to the node, so the smallest figure a person can give stands for none.
    return node(
        "CourierBudget",
        preset="custom",
        vram_gib=max(device_bytes, 1) / GIB,
        host_gib=host_bytes / GIB,
    )


def workflow(
    small_models: Mapping[str, Path] | Any,
    loader: dict[str, Any],
    lora: bool = False,
    seed: int = 7,
    steps: int = 2,
) -> Prompt:
    """Text to pictures; a LoRA behind the loader if asked."""
    prompt = {
        LOADER: loader,
        "4": node(
            "CLIPLoader", clip_name=small_models["clip_l"].name, type="sd3", device="default"
        ),
        "5": node("CLIPTextEncode", clip=["4", 0], text="a courier on the road"),
        "6": node("EmptyHunyuanLatentVideo", width=32, height=32, length=1, batch_size=1),
        SAMPLER: node(
            "KSampler", model=[LORA if lora else LOADER, 0], seed=seed, steps=steps, cfg=1.0,
            sampler_name="euler", scheduler="simple", positive=["5", 0], negative=["5", 0],
            latent_image=["6", 0], denoise=1.0,
        ),
        "8": node("VAELoader", vae_name=small_models["vae"].name),
        "10": node("VAEDecode", samples=[SAMPLER, 0], vae=["8", 0]),
        SAVE: node("SaveImage", images=["10", 0], filename_prefix="courier-test"),
    }  # fmt: skip
    if lora:
        prompt[LORA] = node(
            "LoraLoaderModelOnly", model=[LOADER, 0], lora_name=small_models["wan_lora"].name,
            strength_model=0.8,
        )  # fmt: skip
    return prompt
