"""Loading a model under a budget: open, build, attach, register. One function for each loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.sd
import torch

from ...offload_core.values import Budget
from ..models.registry import DIFFUSION_MODEL, TEXT_ENCODER, VAE, AskedBy, Origin
from .build.checkpoint import build_checkpoint
from .build.diffusion import BuiltModel, build_diffusion_model, open_checkpoint
from .build.text_encoder import BuiltClip, build_text_encoder
from .build.vae import BuiltVae, build_vae
from .compat import require
from .decoding import add_vae_runs
from .encoding import add_encoder_runs, take_over
from .files import offered_name, path_of
from .patcher import CourierPatcher
from .runs import add_run_wrappers
from .symbols import Part
from .vaes import PIXELS, offered_vae, open_vae, vae_paths
from .wrapping import Devices, Order, diffusion_devices, host_limit_bytes, wrap

WEIGHT_DTYPES = ("default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2")
"""As the core's own loader offers them."""
DEVICES = ("default", "cpu")
"""The same, of its loaders of text encoders."""
ENCODER_FOLDER, CHECKPOINT_FOLDER = "text_encoders", "checkpoints"
ENCODER_LOADERS = {
    1: "CourierLoadCLIP",
    2: "CourierLoadDualCLIP",
    3: "CourierLoadTripleCLIP",
    4: "CourierLoadQuadrupleCLIP",
}
"""Our loaders by the number of their files."""


def load_diffusion_model(
    name: str, weight_dtype: str, budget: Budget, asked_by: AskedBy = AskedBy.NODE
) -> CourierPatcher:
    """The diffusion model ``name`` with its weights left in the file; nothing is on the device yet.

    Args:
        asked_by: who chose the budget, for the status.
    Raises: CheckpointError, naming the file, with nothing left behind; NotWithThisComfyError.
    """
    require(Part.LOAD)
    path = path_of(name)
    requested = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e4m3fn_fast": torch.float8_e4m3fn,
                 "fp8_e5m2": torch.float8_e5m2}.get(weight_dtype)  # fmt: skip
    limit_bytes = host_limit_bytes(budget)
    built = build_diffusion_model(
        open_checkpoint(path, limit_bytes),
        requested,
        limit_bytes,
        fp8_optimizations=weight_dtype.endswith("_fast"),
    )
    inputs = (("unet_name", offered_name(name) or name), ("weight_dtype", weight_dtype))
    origin = Origin(DIFFUSION_MODEL, "CourierLoadDiffusionModel", inputs)
    patcher = wrap(built, Order((path,), budget, origin, asked_by), diffusion_devices())
    add_run_wrappers(patcher)
    return patcher


def load_text_encoder(
    names: Sequence[str],
    clip_type: str,
    device: str,
    budget: Budget,
    asked_by: AskedBy = AskedBy.NODE,
) -> Any:
    """A CLIP of ComfyUI's out of one to four files, with its weights left in them.

    Args:
        clip_type: as ComfyUI's own loaders name it.
        device: of ``DEVICES``.
        asked_by: who chose the budget, for the status.
    Raises: CheckpointError, naming the file, with nothing left behind.
    """
    paths = tuple(path_of(name, ENCODER_FOLDER) for name in names)
    limit_bytes = host_limit_bytes(budget)
    found = build_text_encoder(
        [open_checkpoint(path, limit_bytes) for path in paths], clip_type, device, limit_bytes
    )
    origin = _encoder_origin(names, clip_type, device)
    return _with_encoder(found, Order(paths, budget, origin, asked_by))


def _with_encoder(found: BuiltClip, order: Order) -> Any:
    patcher = _in_place_of(found.clip.patcher, found.built, order)
    add_encoder_runs(patcher.model)
    found.clip.patcher = patcher
    return found.clip


def _in_place_of(theirs: Any, built: BuiltModel, order: Order) -> CourierPatcher:
    """A patcher of ours with all that ComfyUI set on its own."""
    patcher = wrap(built, order, Devices(theirs.load_device, theirs.offload_device))
    take_over(patcher, theirs)
    return patcher


def _encoder_origin(names: Sequence[str], clip_type: str, device: str) -> Origin:
    known = [offered_name(name, ENCODER_FOLDER) or name for name in names]
    if len(known) == 1:
        inputs = [("clip_name", known[0])]
    else:
        inputs = [(f"clip_name{number}", name) for number, name in enumerate(known, 1)]
    if len(known) < 3:
        inputs += [("type", clip_type), ("device", device)]
    return Origin(TEXT_ENCODER, ENCODER_LOADERS[len(known)], tuple(inputs))


def load_vae(name: str, budget: Budget, asked_by: AskedBy = AskedBy.NODE) -> Any:
    """A VAE of ComfyUI's with its weights left in the file.

    Args:
        asked_by: who chose the budget, for the status.
    Raises: CheckpointError, naming the file, with nothing left behind.
    """
    known = offered_vae(name) or name
    if known == PIXELS:
        return comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})
    limit_bytes = host_limit_bytes(budget)
    found = build_vae(open_vae(known, limit_bytes), limit_bytes)
    origin = Origin(VAE, "CourierLoadVAE", (("vae_name", known),))
    return _with_vae(found, Order(vae_paths(known), budget, origin, asked_by))


def _with_vae(found: BuiltVae, order: Order) -> Any:
    found.vae.patcher = _in_place_of(found.vae.patcher, found.built, order)
    add_vae_runs(found.vae)
    return found.vae


def load_checkpoint(
    name: str, budget: Budget, asked_by: AskedBy = AskedBy.NODE
) -> tuple[CourierPatcher, Any, Any]:
    """MODEL, CLIP and VAE of ComfyUI's out of one file, with their weights left in it.

    Args:
        budget: for each of the three, or for all of them where it is a shared one.
        asked_by: who chose the budget, for the status.
    Returns: CLIP is None where the file has none, and then a VAE that ComfyUI refuses to use.
    Raises: CheckpointError, naming the file, with nothing left behind.
    """
    path = path_of(name, CHECKPOINT_FOLDER)
    limit_bytes = host_limit_bytes(budget)
    # All three before the first is registered: an error leaves nothing.
    found = build_checkpoint(open_checkpoint(path, limit_bytes), limit_bytes)
    inputs = (("ckpt_name", offered_name(name, CHECKPOINT_FOLDER) or name),)

    def order(kind: str) -> Order:
        return Order((path,), budget, Origin(kind, "CourierLoadCheckpoint", inputs), asked_by)

    patcher = wrap(found.model, order(DIFFUSION_MODEL), diffusion_devices())
    add_run_wrappers(patcher)
    clip = None if found.clip is None else _with_encoder(found.clip, order(TEXT_ENCODER))
    vae = comfy.sd.VAE(sd={}) if found.vae is None else _with_vae(found.vae, order(VAE))
    return patcher, clip, vae
