"""Seeded random-weight models that a real ComfyUI loads and samples: megabytes, not gigabytes.

Needs torch and safetensors, nothing of ComfyUI. The same arguments give the same bytes.
``python -m devtools.small_models MODELS_DIR`` writes them all.
"""

from __future__ import annotations

import json
import math
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from devtools.console import Progress, say
from devtools.model_shapes import Shape, Shapes, clip_l, sd3, sd15_unet, t5_base, wan
from devtools.vae_shapes import wan_vae

MANIFEST_NAME = "courier-small-models.json"
# Raise it when the same arguments give other bytes than before: old files are written anew.
FORMAT = 1
FP8_SUFFIX = ".weight"

Write = Callable[[Path], Path]


def _fill(name: str, shape: Shape, seed: int) -> torch.Tensor:
    """float32 values that keep a signal's size about the same through the layer."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    if name.endswith("embedding.weight") or name == "pos_embed":
        return values * 0.1 if name == "pos_embed" else values * 0.5
    if name.endswith(("modulation", ".bias")):
        return values * 0.05
    if name.endswith(".gamma") or len(shape) == 1:
        return 1 + values * 0.05
    return values / math.sqrt(math.prod(shape[1:]))


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write under a passing name first, so that nobody reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _write(path: Path, shapes: Shapes, dtype: torch.dtype, seed: int) -> Path:
    tensors = {name: _fill(name, shape, seed).to(dtype) for name, shape in shapes.items()}
    return _save(Path(path), tensors)


def write_wan(
    path: Path,
    depth: int = 8,
    width: int = 128,
    ffn: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Path:
    """A Wan 2.1 t2v transformer. With an fp8 ``dtype``, as in published fp8 files, the matrices
    of the blocks have it and the rest stays bfloat16."""
    if dtype.itemsize > 1:
        return _write(path, wan(depth, width, ffn), dtype, seed)
    tensors = {}
    for name, shape in wan(depth, width, ffn).items():
        narrow = name.startswith("blocks.") and name.endswith(FP8_SUFFIX) and len(shape) == 2
        tensors[name] = _fill(name, shape, seed).to(dtype if narrow else torch.bfloat16)
    return _save(Path(path), tensors)


def write_wan_big(path: Path, depth: int = 28, seed: int = 0) -> Path:
    """About 1.1 GB in bfloat16 at the default depth: for tests in which size is the point."""
    return write_wan(path, depth=depth, width=1024, ffn=5632, seed=seed)


def write_sd3(
    path: Path, depth: int = 4, dtype: torch.dtype = torch.float16, seed: int = 0
) -> Path:
    return _write(path, sd3(depth), dtype, seed)


def write_sd15_unet(path: Path, dtype: torch.dtype = torch.float16, seed: int = 0) -> Path:
    return _write(path, sd15_unet(), dtype, seed)


def write_wan_vae(
    path: Path, width: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    return _write(path, wan_vae(width), dtype, seed)


def write_clip_l(path: Path, dtype: torch.dtype = torch.float16, seed: int = 0) -> Path:
    return _write(path, clip_l(), dtype, seed)


def write_t5_base(path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """220 MB in bfloat16: for tests in which it is another kind of encoder than CLIP."""
    return _write(path, t5_base(), dtype, seed)


def write_clip_lora(path: Path, rank: int = 4, strength: float = 0.5, seed: int = 0) -> Path:
    """A LoRA on the attention and the MLP of every layer of CLIP-L."""
    tensors = {}
    for name, shape in clip_l().items():
        if ".encoder.layers." not in name or len(shape) != 2:
            continue
        stem = f"lora_te_{name.removesuffix('.weight').replace('.', '_')}"
        down = _fill(f"{stem}.lora_down.weight", (rank, shape[1]), seed)
        up = _fill(f"{stem}.lora_up.weight", (shape[0], rank), seed)
        tensors[f"{stem}.lora_down.weight"] = down.to(torch.bfloat16)
        tensors[f"{stem}.lora_up.weight"] = (up * strength).to(torch.bfloat16)
    return _save(Path(path), tensors)


def write_lora(
    path: Path, model_path: Path, rank: int = 4, strength: float = 0.5, seed: int = 0
) -> Path:
    """A LoRA on every matrix of every block of a model file.

    ``strength`` is the size of the change against the weight's own, so that nobody can mistake a
    LoRA that was applied for one that was not.
    """
    tensors = {}
    with safe_open(model_path, framework="pt") as model:
        for name in model.keys():  # noqa: SIM118 - safe_open is no mapping
            shape = model.get_slice(name).get_shape()
            if not _is_block_matrix(name, shape):
                continue
            stem = f"diffusion_model.{name.removesuffix('.weight')}"
            down = _fill(f"{stem}.lora_A.weight", (rank, shape[1]), seed)
            up = _fill(f"{stem}.lora_B.weight", (shape[0], rank), seed)
            tensors[f"{stem}.lora_A.weight"] = down.to(torch.bfloat16)
            tensors[f"{stem}.lora_B.weight"] = (up * strength).to(torch.bfloat16)
    if not tensors:
        raise ValueError(f"{model_path} has no block matrices for a LoRA")
    return _save(Path(path), tensors)


def _is_block_matrix(name: str, shape: list[int]) -> bool:
    in_block = name.startswith(("blocks.", "joint_blocks."))
    return in_block and name.endswith(".weight") and len(shape) == 2


def write_wan_lora(path: Path, model_path: Path, rank: int = 4, seed: int = 0) -> Path:
    return write_lora(path, model_path, rank=rank, seed=seed)


def write_sd3_lora(path: Path, model_path: Path, rank: int = 4, seed: int = 0) -> Path:
    return write_lora(path, model_path, rank=rank, seed=seed)


@dataclass(frozen=True)
class SmallModel:
    """One file of the set: what tests call it, where it goes, how it is made, what it is made of.

    Attributes:
        recipe: goes to the manifest; another recipe there means: write it anew.
    """

    key: str
    file: str
    recipe: str
    write: Write


def small_model_set(models: Path) -> list[SmallModel]:
    """The files that the demo and the tests use, in an order in which they can be written."""
    dit = "diffusion_models/courier_"
    wan_file = f"{dit}wan_small_bf16.safetensors"
    sd3_file = f"{dit}sd3_small_fp16.safetensors"
    fp8 = torch.float8_e4m3fn
    wan_path, sd3_path = models / wan_file, models / sd3_file
    return [
        SmallModel("wan", wan_file, "wan seed=1", lambda p: write_wan(p, seed=1)),
        SmallModel(
            "wan_fp8",
            f"{dit}wan_small_fp8_e4m3fn.safetensors",
            "wan fp8 seed=1",
            lambda p: write_wan(p, dtype=fp8, seed=1),
        ),
        SmallModel("sd3", sd3_file, "sd3 seed=2", lambda p: write_sd3(p, seed=2)),
        SmallModel(
            "sd15",
            f"{dit}sd15_small_fp16.safetensors",
            "sd15 seed=3",
            lambda p: write_sd15_unet(p, seed=3),
        ),
        SmallModel(
            "vae",
            "vae/courier_wan_vae_small.safetensors",
            "wan vae width=8 seed=4",
            lambda p: write_wan_vae(p, seed=4),
        ),
        SmallModel(
            "clip_l",
            "text_encoders/courier_clip_l_fp16.safetensors",
            "clip_l seed=5",
            lambda p: write_clip_l(p, seed=5),
        ),
        SmallModel(
            "wan_lora",
            "loras/courier_wan_lora_small.safetensors",
            "wan lora seed=6",
            lambda p: write_wan_lora(p, wan_path, seed=6),
        ),
        SmallModel(
            "wan_lora_b",
            "loras/courier_wan_lora_b_small.safetensors",
            "wan lora seed=7",
            lambda p: write_wan_lora(p, wan_path, seed=7),
        ),
        SmallModel(
            "sd3_lora",
            "loras/courier_sd3_lora_small.safetensors",
            "sd3 lora seed=8",
            lambda p: write_sd3_lora(p, sd3_path, seed=8),
        ),
    ]


def write_all(models_dir: Path, progress: Progress | None = None) -> dict[str, Path]:
    """Write what is not there yet, and return every file by its key."""
    models = Path(models_dir)
    manifest = _read_manifest(models)
    paths = {}
    for small in small_model_set(models):
        path = models / small.file
        if not _is_current(path, manifest.get(small.file), small.recipe):
            small.write(path)
            entry = {"recipe": small.recipe, "format": FORMAT, "bytes": path.stat().st_size}
            manifest[small.file] = entry
            _write_manifest(models, manifest)
        if progress is not None:
            progress.advance(path.name)
        paths[small.key] = path
    return paths


def _is_current(path: Path, entry: dict[str, object] | None, recipe: str) -> bool:
    if entry is None or not path.is_file():
        return False
    return entry == {"recipe": recipe, "format": FORMAT, "bytes": path.stat().st_size}


def _read_manifest(models: Path) -> dict[str, dict[str, object]]:
    try:
        return dict(json.loads((models / MANIFEST_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}  # no manifest, or half of one: every file is written anew


def _write_manifest(models: Path, manifest: dict[str, dict[str, object]]) -> None:
    partial = models / f"{MANIFEST_NAME}.{os.getpid()}.partial"
    partial.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, models / MANIFEST_NAME)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        say("usage: python -m devtools.small_models MODELS_DIR")
        return 2
    models = Path(arguments[0])
    with Progress("Writing small models", len(small_model_set(models))) as progress:
        write_all(models, progress)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
