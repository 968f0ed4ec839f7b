"""A checkpoint of ComfyUI's: diffusion model, text encoder and VAE out of one mapped file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import comfy.model_detection
import comfy.utils
import torch

from .diffusion import (
    BuiltModel,
    Checkpoint,
    Recognised,
    build_diffusion_model,
    build_recognised,
    convert_old_quants,
)
from .text_encoder import BuiltClip, build_checkpoint_encoder
from .vae import BuiltVae, VaeFile, build_vae

_SCALED = ".scaled_fp8"


@dataclass(frozen=True)
class BuiltCheckpoint:
    """The three of it. None is what the file does not have."""

    model: BuiltModel
    clip: BuiltClip | None
    vae: BuiltVae | None


def build_checkpoint(checkpoint: Checkpoint, copy_limit_bytes: int) -> BuiltCheckpoint:
    """All that is in ``checkpoint``, recognised by ComfyUI, each weight with one owner.

    A file with a diffusion model alone has only that, as with ComfyUI's own loader.

    Raises: CheckpointFormatError naming the file, HostBudgetError.
    """
    detection = comfy.model_detection
    state_dict, metadata = dict(checkpoint.state_dict), dict(checkpoint.metadata)
    prefix = detection.unet_prefix_from_state_dict(state_dict)
    state_dict, quants = convert_old_quants(state_dict, metadata, prefix)
    config = detection.model_config_from_unet(state_dict, prefix, metadata=quants)
    if config is None:
        model = build_diffusion_model(checkpoint, None, copy_limit_bytes)
        return BuiltCheckpoint(model, None, None)
    inner = _only(state_dict, {prefix: ""})
    found = Recognised(config, dict(state_dict), prefix, inner)
    model = build_recognised(found, checkpoint, None, copy_limit_bytes)
    clip = _clip(config, state_dict, checkpoint, copy_limit_bytes)
    vae = _vae(config, state_dict, metadata, checkpoint, copy_limit_bytes)
    return BuiltCheckpoint(model, clip, vae)


def _only(state_dict: dict[str, torch.Tensor], prefixes: dict[str, str]) -> dict[str, torch.Tensor]:
    """Those with such a prefix, renamed; the dict itself stays whole."""
    return dict(comfy.utils.state_dict_prefix_replace(dict(state_dict), prefixes, filter_keys=True))


def _clip(
    config: Any, state_dict: dict[str, torch.Tensor], checkpoint: Checkpoint, copy_limit_bytes: int
) -> BuiltClip | None:
    found = dict(state_dict)
    for name in [key for key in found if key.endswith(_SCALED)]:
        found, _ = convert_old_quants(found, {}, name.removesuffix("scaled_fp8"))
    target = config.clip_target(state_dict=found)
    weights = config.process_clip_state_dict(found) if target is not None else {}
    if not weights:
        return None
    return build_checkpoint_encoder(target, weights, checkpoint, copy_limit_bytes)


def _vae(
    config: Any,
    state_dict: dict[str, torch.Tensor],
    metadata: dict[str, Any],
    checkpoint: Checkpoint,
    copy_limit_bytes: int,
) -> BuiltVae | None:
    weights = config.process_vae_state_dict(
        _only(state_dict, dict.fromkeys(config.vae_key_prefix, ""))
    )
    if not weights:
        return None
    file = VaeFile(checkpoint.name, weights, metadata, checkpoint.mappings, checkpoint.note)
    return build_vae(file, copy_limit_bytes)
