"""A checkpoint through ComfyUI's own loader and through ours, compared bit for bit.

Usage: checkpoints.py
Prints "ok PART: what" or "FAIL PART: what", one line a comparison.
"""

from __future__ import annotations

import gc
import sys
import traceback
from pathlib import Path
from typing import Any

import bootstrap
import torch

bootstrap.load_comfyui()

import comfy.ldm.models.autoencoder  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import folder_paths  # noqa: E402
import safetensors.torch  # noqa: E402

pack = bootstrap.load_pack()
loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
registry = bootstrap.submodule(pack, "nodes.models.registry")
values = bootstrap.submodule(pack, "offload_core.values")

MIB = 2**20
FILE = bootstrap.base_path() / "models" / "checkpoints" / "sd15_whole.safetensors"
failures: list[str] = []
part = ""


def check(what: str, passed: bool) -> None:
    print(f"{'ok  ' if passed else 'FAIL'} {part}: {what}", flush=True)
    if not passed:
        failures.append(f"{part}: {what}")


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def vae_tensors() -> dict[str, torch.Tensor]:
    config = {
        "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3,
        "ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [],
        "dropout": 0.0,
    }  # fmt: skip
    model = comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=config, embed_dim=4)
    tensors = {}
    for number, (key, value) in enumerate(model.state_dict().items()):
        scale = value.numel() / value.shape[0] if value.ndim > 1 else 400
        shift = 1 if "norm" in key and key.endswith("weight") else 0
        tensors[key] = (seeded(*value.shape, seed=number) / scale**0.5 + shift).half()
    return tensors


def write() -> None:
    parts = {
        "model.diffusion_model.": read("sd15"),
        "cond_stage_model.transformer.": {
            key: value for key, value in read("clip_l").items() if key != "text_projection.weight"
        },
        "first_stage_model.": vae_tensors(),
    }
    tensors = {f"{p}{key}": value for p, held in parts.items() for key, value in held.items()}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, FILE)
    folder_paths.filename_list_cache.clear()


def read(key: str) -> dict[str, torch.Tensor]:
    return dict(comfy.utils.load_torch_file(str(bootstrap.model_file(key)), safe_load=True))


def results(model: Any, clip: Any, vae: Any) -> dict[str, torch.Tensor]:
    latent = bootstrap.sample(model)
    cond, pooled = clip.encode_from_tokens(clip.tokenize("a (red:1.3) cat"), return_pooled=True)
    picture = vae.decode(latent[:, :, :8, :8])
    return {"MODEL": latent, "CLIP": cond, "CLIP pooled": pooled, "VAE": picture}


def smallest(engine: Any) -> int:
    try:
        engine.plan(values.Budget(0, 0))
    except values.DeviceBudgetError as error:
        return int(error.smallest_bytes)
    raise AssertionError("nothing at all was enough")


def whole() -> None:
    theirs = comfy.sd.load_checkpoint_guess_config(
        str(FILE), embedding_directory=folder_paths.get_folder_paths("embeddings")
    )[:3]
    want = results(*theirs)
    del theirs
    check("the core's own is finite", all(bool(one.isfinite().all()) for one in want.values()))
    first = loading.load_checkpoint(FILE.name, values.Budget())
    engines = [first[0].courier_engine, first[1].patcher.courier_engine,
               first[2].patcher.courier_engine]  # fmt: skip
    most = max(engine.plan(values.Budget(None, 0)).device_bytes for engine in engines)
    least = max(map(smallest, engines))
    shared = {id(mapping) for engine in engines for mapping in engine._parts.mappings}
    check("one mapping", len(shared) == 1)
    kinds = [model.origin.kind for model in registry.get_service().status().models]
    check(f"known as {kinds}", kinds == ["diffusion model", "text encoder", "VAE"])
    del first, engines
    for name, budget in {
        "whole": values.Budget(most, 0),
        "half": values.Budget((most + least) // 2, 0),
        "locked": values.Budget(least, 2**30),
        "smallest": values.Budget(least, 0),
    }.items():
        models = loading.load_checkpoint(FILE.name, budget)
        for what, got in results(*models).items():
            check(f"{name}: {what}", torch.equal(got, want[what]))
        snapshots = [one.courier_engine.snapshot() for one in
                     (models[0], models[1].patcher, models[2].patcher)]  # fmt: skip
        shipped = sum(snapshot.traffic.shipped_bytes for snapshot in snapshots)
        check(f"{name}: {shipped} bytes streamed", (shipped > 0) == (name != "whole"))
        copied = sum(snapshot.memory.copied_bytes for snapshot in snapshots)
        check(f"{name}: {copied} bytes copied", copied < 0.05 * FILE.stat().st_size)
        if name == "locked":
            locked = sum(snapshot.memory.locked_bytes for snapshot in snapshots)
            check(f"{name}: {locked} bytes locked at once", locked > 0)
    del models
    gc.collect()
    check("nothing is left", not registry.get_service().engines())


def bad() -> None:
    data = FILE.read_bytes()[: 2**20]
    file = FILE.with_name("short.safetensors")
    file.write_bytes(data)
    refused("a truncated file", file, "truncated")
    safetensors.torch.save_file(read("clip_l"), file)
    refused("a text encoder", file, "no diffusion model")
    some = {f"model.diffusion_model.{key}": value for key, value in read("sd15").items()} | {
        "cond_stage_model.transformer.text_model.final_layer_norm.bias": torch.zeros(768)
    }
    safetensors.torch.save_file(some, file)
    refused("half a text encoder", file, "lacks")
    file.unlink()


def refused(what: str, file: Path, word: str) -> None:
    folder_paths.filename_list_cache.clear()
    text = ""
    try:
        loading.load_checkpoint(file.name, values.Budget())
    except values.CourierError as error:
        text = str(error)
    gc.collect()
    check(f"{what}: {text[:300]}", file.name in text and word in text)
    check(f"{what}: nothing is left", not registry.get_service().engines())


write()
try:
    for function in (whole, bad):
        part = function.__name__
        try:
            with torch.inference_mode():  # as ComfyUI runs every node
                function()
        except Exception:
            traceback.print_exc()
            check("ended with an error, see stderr", False)
finally:
    FILE.unlink()
sys.exit(1 if failures else 0)
