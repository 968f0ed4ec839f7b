"""A VAE of ComfyUI's, built by ComfyUI itself on mapped weights: nothing is copied."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import comfy.sd
import torch

from ....offload_core.host import FileMapping
from ....offload_core.values import CheckpointFormatError
from .assigning import absent_parts, put_in_place
from .diffusion import BuiltModel
from .recorder import LoadRecorder

_LOG = logging.getLogger("courier")


@dataclass(frozen=True)
class VaeFile:
    """What ComfyUI makes a VAE of, and the mappings it lies on. ``name`` is for messages."""

    name: str
    state_dict: Mapping[str, torch.Tensor]
    metadata: dict[str, Any]
    mappings: tuple[FileMapping, ...]
    note: str = ""


@dataclass(frozen=True)
class BuiltVae:
    """ComfyUI's VAE with its weights in place; its patcher is still ComfyUI's own."""

    vae: Any
    built: BuiltModel


def build_vae(file: VaeFile, copy_limit_bytes: int) -> BuiltVae:
    """The VAE in ``file``, recognised and constructed by ComfyUI.

    Args:
        copy_limit_bytes: how much may be copied to have the dtypes that ComfyUI would store.
    Raises: CheckpointFormatError naming the file, HostBudgetError.
    """
    state_dict = dict(file.state_dict)
    recorder = LoadRecorder(state_dict.values())
    try:
        with recorder:
            vae = comfy.sd.VAE(sd=state_dict, metadata=file.metadata or None)
    except (RuntimeError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointFormatError(
            f"{file.name} could not be loaded as a VAE ({type(error).__name__}: {error}); choose "
            "a VAE, or download it again"
        ) from error
    model = vae.first_stage_model
    if model is None:
        raise CheckpointFormatError(
            f"{file.name} holds {len(file.state_dict)} tensors but no VAE that this ComfyUI knows; "
            "choose a VAE (not a diffusion model, text encoder or LoRA), or update ComfyUI"
        )
    assigned = put_in_place(model, recorder, file.name, copy_limit_bytes)
    absent = absent_parts(model, assigned, file.name, depth=1)
    model.requires_grad_(False)
    note = "; ".join(filter(None, (file.note, absent)))
    if note:
        _LOG.warning("%s", note)
    return BuiltVae(vae, BuiltModel(model, file.mappings, assigned.stored_dtypes, note))
