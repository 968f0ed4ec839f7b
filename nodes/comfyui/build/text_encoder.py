"""A text encoder of ComfyUI's, built by ComfyUI itself on mapped weights: nothing is copied."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.sd
import comfy.utils
import folder_paths
import torch
from torch import nn

from ....offload_core.values import CheckpointFormatError
from .assigning import absent_parts, put_in_place
from .diffusion import BuiltModel, Checkpoint, convert_old_quants
from .recorder import LoadRecorder

_LOG = logging.getLogger("courier")

_NOT_THE_LOAD_DEVICE = torch.device("cpu", 0)
"""The CPU by another name: ComfyUI loads a model at once that it finds on the device of its run."""


_NOT_OF_THIS_KIND = (RuntimeError, LookupError, AttributeError, TypeError, ValueError)
"""What ComfyUI raises over files that are not what they are taken for."""


@dataclass(frozen=True)
class BuiltClip:
    """ComfyUI's CLIP with its weights in place; its patcher is still ComfyUI's own."""

    clip: Any
    built: BuiltModel


def clip_types() -> dict[str, Any]:
    """ComfyUI's types of text encoders, by the name that its loaders give them."""
    return {one.name.lower(): one for one in comfy.sd.CLIPType}


def build_text_encoder(
    checkpoints: Sequence[Checkpoint], clip_type: str, device: str, copy_limit_bytes: int
) -> BuiltClip:
    """The text encoder in one to four files, recognised and constructed by ComfyUI.

    Args:
        clip_type: as ComfyUI's loaders name it; one that it does not know is stable_diffusion.
        device: ``cpu`` to have it run there, or ``default``.
        copy_limit_bytes: how much may be copied to have the dtypes that ComfyUI would store.
    Raises: CheckpointFormatError naming the files, HostBudgetError.
    """
    names = " and ".join(one.name for one in checkpoints)
    state_dicts = [_prepared(one) for one in checkpoints]
    tensors = [list(_tensors(one)) for one in state_dicts]
    sources = (tensor for one in tensors for tensor in one)
    recorder = LoadRecorder(sources, _NOT_THE_LOAD_DEVICE)
    clip = _constructed(state_dicts, clip_type, device, recorder, names)
    _refuse_useless_files(checkpoints, tensors, clip.cond_stage_model, recorder)
    note = "; ".join(filter(None, [one.note for one in checkpoints]))
    mappings = tuple(mapping for one in checkpoints for mapping in one.mappings)
    whole = Checkpoint(names, {}, {}, mappings, note)
    return _finished(clip, recorder, whole, copy_limit_bytes)


def build_checkpoint_encoder(
    target: Any, state_dict: dict[str, Any], checkpoint: Checkpoint, copy_limit_bytes: int
) -> BuiltClip:
    """The text encoder of a checkpoint that has a diffusion model and a VAE too.

    Args:
        target: what ComfyUI's configuration of the diffusion model says it is.
        state_dict: the encoder's own weights.
    Raises: as ``build_text_encoder``.
    """
    recorder = LoadRecorder(_tensors(state_dict), _NOT_THE_LOAD_DEVICE)
    more = {}
    if "state_dict" in inspect.signature(comfy.sd.CLIP.__init__).parameters:
        more = {"state_dict": state_dict, "disable_dynamic": True}
    try:
        with recorder:
            clip = comfy.sd.CLIP(
                target,
                embedding_directory=folder_paths.get_folder_paths("embeddings"),
                tokenizer_data=state_dict,
                parameters=comfy.utils.calculate_parameters(state_dict),
                model_options={"initial_device": _NOT_THE_LOAD_DEVICE},
                **more,
            )
            if not more:
                clip.load_sd(state_dict, full_model=True)
    except _NOT_OF_THIS_KIND as error:
        raise CheckpointFormatError(
            f"the text encoder in {checkpoint.name} could not be loaded ({type(error).__name__}: "
            f"{error}); the file is incomplete, or of a model that this ComfyUI does not know"
        ) from error
    return _finished(clip, recorder, checkpoint, copy_limit_bytes)


def _finished(
    clip: Any, recorder: LoadRecorder, files: Checkpoint, copy_limit_bytes: int
) -> BuiltClip:
    model = clip.cond_stage_model
    assigned = put_in_place(model, recorder, files.name, copy_limit_bytes)
    # The first name is the encoder, the second ComfyUI's wrapping of it.
    absent = absent_parts(model, assigned, files.name, depth=2)
    model.requires_grad_(False)
    note = "; ".join(filter(None, (files.note, absent)))
    if note:
        _LOG.warning("%s", note)
    return BuiltClip(clip, BuiltModel(model, files.mappings, assigned.stored_dtypes, note))


def _prepared(checkpoint: Checkpoint) -> dict[str, Any]:
    """As ComfyUI's own loader hands it on: how it is quantised is part of it."""
    state_dict: dict[str, Any] = dict(checkpoint.state_dict)
    quantised = checkpoint.metadata.get("_quantization_metadata")
    if not hasattr(comfy.utils, "convert_old_quants"):
        if quantised is not None:
            state_dict["_quantization_metadata"] = quantised
        return state_dict
    return convert_old_quants(state_dict, dict(checkpoint.metadata))[0]


def _tensors(state_dict: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (value for value in state_dict.values() if isinstance(value, torch.Tensor))


def _constructed(
    state_dicts: list[dict[str, Any]],
    clip_type: str,
    device: str,
    recorder: LoadRecorder,
    names: str,
) -> Any:
    options: dict[str, Any] = {"initial_device": _NOT_THE_LOAD_DEVICE}
    if device == "cpu":
        options["load_device"] = options["offload_device"] = torch.device("cpu")
    load = comfy.sd.load_text_encoder_state_dicts
    more = {}
    if "disable_dynamic" in inspect.signature(load).parameters:
        more["disable_dynamic"] = True
    try:
        with recorder:
            return load(
                state_dicts,
                embedding_directory=folder_paths.get_folder_paths("embeddings"),
                clip_type=clip_types().get(clip_type, comfy.sd.CLIPType.STABLE_DIFFUSION),
                model_options=options,
                **more,
            )
    except _NOT_OF_THIS_KIND as error:
        raise CheckpointFormatError(
            f"{names} could not be loaded as a text encoder of type {clip_type} "
            f"({type(error).__name__}: {error}); choose the type that the model needs, or other "
            "files"
        ) from error


def _refuse_useless_files(
    checkpoints: Sequence[Checkpoint],
    tensors: Sequence[list[torch.Tensor]],
    model: nn.Module,
    recorder: LoadRecorder,
) -> None:
    """Of a file of another kind ComfyUI takes nothing, and runs without a word."""
    used = {address for weight in model.parameters() for address in _addresses(weight, recorder)}
    for checkpoint, held in zip(checkpoints, tensors, strict=True):
        if used.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in held):
            raise CheckpointFormatError(
                f"{checkpoint.name} holds {len(held)} tensors but no text encoder of this type "
                "that this ComfyUI knows; choose a text encoder (not a diffusion model, VAE or "
                "LoRA) and its type, or update ComfyUI"
            )


def _addresses(weight: torch.Tensor, recorder: LoadRecorder) -> Iterator[int]:
    """Where the bytes of a weight will be, those inside a quantised one too."""
    source = recorder.source_of(weight)
    if source is not None:
        yield source.untyped_storage().data_ptr()
        return
    held = weight.data  # each look at it makes another wrapper
    if type(held) is torch.Tensor:
        yield held.untyped_storage().data_ptr()
    elif hasattr(held, "__tensor_flatten__"):
        for name in held.__tensor_flatten__()[0]:
            yield getattr(held, name).untyped_storage().data_ptr()
