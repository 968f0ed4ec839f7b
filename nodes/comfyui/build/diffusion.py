"""A diffusion model of the core's, built on mapped weights: the file is assigned, never copied.

The core's own steps are called one by one (detection, configuration, construction, loading), with
the tensors of our mapping in place of tensors read into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.utils
import torch

from ....offload_core.host import (
    CheckpointHeader,
    FileMapping,
    file_text,
    open_mapping,
    read_header,
    read_tensor,
    resolve_shards,
)
from ....offload_core.values import (
    CheckpointError,
    CheckpointFormatError,
    HostBudgetError,
    MappingError,
    size_text,
)
from .dtypes import DtypeChoice, choose_dtypes, widens_exactly
from .quantised import held_dtypes, is_code, refuse_unknown, take_back

_LOG = logging.getLogger("courier")
_MAPPABLE_SUFFIXES = (".safetensors", ".sft", ".json")
_BEGUN_AT_ONE = ("scale_weight", "scale_input")
"""Scales of the core's fp8 operations: a file names those of its fp8 weights only."""


@dataclass(frozen=True)
class Checkpoint:
    """A state dict and the mappings it lies on. ``note`` says why it is not mapped, or is empty."""

    name: str
    state_dict: dict[str, torch.Tensor]
    metadata: dict[str, str]
    mappings: tuple[FileMapping, ...]
    note: str


@dataclass(frozen=True)
class BuiltModel:
    """The core's inner model with its weights in place, and the dtype it would hold each in.

    For a quantised weight that is the dtype it is computed in, never that of its codes.
    """

    model: Any
    mappings: tuple[FileMapping, ...]
    stored_dtypes: dict[str, torch.dtype]
    note: str


def open_checkpoint(path: Path, read_limit_bytes: int) -> Checkpoint:
    """Open a checkpoint, mapped where it is a safetensors file (or shards of one).

    Args:
        read_limit_bytes: what may be read into memory if the system will not map the file.
    Raises: CheckpointError naming the file, before anything was attached to anything.
    """
    if path.suffix.lower() not in _MAPPABLE_SUFFIXES:
        return _read_other_format(path)
    headers = [read_header(shard) for shard in resolve_shards(path)]
    metadata = {key: text for header in headers for key, text in header.metadata.items()}
    try:
        mappings = tuple(open_mapping(header) for header in headers)
    except MappingError as error:
        return _read_unmapped(path, headers, metadata, read_limit_bytes, error)
    state_dict: dict[str, torch.Tensor] = {}
    loose = 0
    for mapping in mappings:
        for name, entry in mapping.header.entries.items():
            if mapping.mappable(entry) is None:
                state_dict[name] = mapping.tensor(entry)
            else:
                state_dict[name] = mapping.read(entry)
                loose += 1
    note = (
        f"{loose} tensors of {path.name} are unaligned and were read into memory" if loose else ""
    )
    return Checkpoint(path.name, state_dict, metadata, mappings, note)


def _read_unmapped(
    path: Path,
    headers: Sequence[CheckpointHeader],
    metadata: dict[str, str],
    read_limit_bytes: int,
    error: MappingError,
) -> Checkpoint:
    size_bytes = sum(header.identity.size_bytes for header in headers)
    if size_bytes > read_limit_bytes:
        raise MappingError(
            f"{error}; reading its {size_text(size_bytes)} into memory instead would exceed the "
            f"host budget of {size_text(read_limit_bytes)}"
        ) from error
    state_dict = {
        name: read_tensor(header, entry)
        for header in headers
        for name, entry in header.entries.items()
    }
    # The status shows no absolute path, and the system's own reason is in the cause.
    note = f"{path.name} could not be mapped and was read into memory ({error.__cause__})"
    return Checkpoint(path.name, state_dict, metadata, (), note)


def build_diffusion_model(
    checkpoint: Checkpoint,
    requested: torch.dtype | None,
    copy_limit_bytes: int,
    fp8_optimizations: bool = False,
) -> BuiltModel:
    """The model in ``checkpoint``, recognised and configured as the core does it.

    Args:
        copy_limit_bytes: how much may be copied to have the dtype asked for.
    Raises: CheckpointFormatError if the core does not know the model, or a weight does not fit it;
        HostBudgetError, before anything is copied, if the limit does not hold.
    """
    # A copy: the core takes keys out of the dict it is given.
    state_dict = dict(checkpoint.state_dict)
    metadata: Any = dict(checkpoint.metadata)
    refuse_unknown(state_dict, metadata, checkpoint.name)
    state_dict, metadata = convert_old_quants(state_dict, metadata)
    prefix = comfy.model_detection.unet_prefix_from_state_dict(state_dict)
    inner = comfy.utils.state_dict_prefix_replace(state_dict, {prefix: ""}, filter_keys=True)
    if inner:
        state_dict, metadata = convert_old_quants(inner, metadata)
    config, state_dict = _recognise(state_dict, metadata, checkpoint.name)
    if fp8_optimizations:
        config.optimizations["fp8"] = True
    found = Recognised(config, state_dict, "", state_dict)
    return build_recognised(found, checkpoint, requested, copy_limit_bytes)


@dataclass(frozen=True)
class Recognised:
    """What ComfyUI takes a file for: its configuration, and the weights of the diffusion model
    alone (``inner``), which are those of ``state_dict`` that begin with ``prefix``."""

    config: Any
    state_dict: dict[str, torch.Tensor]
    prefix: str
    inner: dict[str, torch.Tensor]


def build_recognised(
    found: Recognised,
    checkpoint: Checkpoint,
    requested: torch.dtype | None,
    copy_limit_bytes: int,
) -> BuiltModel:
    """As ``build_diffusion_model``, of a file that was recognised."""
    choice = choose_dtypes(found.inner, found.config, requested)
    found.config.set_inference_dtype(choice.storage, choice.cast)
    model = found.config.get_model(found.state_dict, found.prefix)
    stored = _assign(model, found.inner, choice, checkpoint.name, copy_limit_bytes)
    model.requires_grad_(False)
    if checkpoint.note:
        _LOG.warning("%s", checkpoint.note)
    return BuiltModel(model, checkpoint.mappings, stored, checkpoint.note)


def _read_other_format(path: Path) -> Checkpoint:
    note = (
        f"{path.name} is not a safetensors file: its weights were read into memory and count "
        "against the host budget; convert it to safetensors to leave them in the file"
    )
    try:
        state_dict, metadata = comfy.utils.load_torch_file(
            str(path), safe_load=True, return_metadata=True
        )
    except Exception as error:
        raise CheckpointError(
            f"{file_text(path)} could not be read ({type(error).__name__}: {error}); "
            "download it again or convert it to safetensors"
        ) from error
    return Checkpoint(path.name, dict(state_dict), dict(metadata or {}), (), note)


def convert_old_quants(
    state_dict: dict[str, torch.Tensor], metadata: Any, prefix: str = ""
) -> tuple[dict[str, torch.Tensor], Any]:
    """Older ways to mark quantised weights, as the newest one, where this ComfyUI has it."""
    convert = getattr(comfy.utils, "convert_old_quants", None)
    if convert is None:
        return state_dict, metadata
    converted, metadata = convert(state_dict, prefix, metadata=metadata)
    return converted, metadata


def _recognise(
    state_dict: dict[str, torch.Tensor], metadata: Any, name: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    detection = comfy.model_detection
    config = detection.model_config_from_unet(state_dict, "", metadata=metadata)
    if config is not None:
        return config, state_dict
    converted = detection.convert_diffusers_mmdit(state_dict, "")
    if converted is not None:
        config = detection.model_config_from_unet(converted, "")
    else:
        config = detection.model_config_from_diffusers_unet(state_dict)
        if config is not None:
            keys = comfy.utils.unet_to_diffusers(config.unet_config)
            converted = {keys[k]: state_dict[k] for k in keys if k in state_dict}
    if config is None or converted is None:
        raise CheckpointFormatError(
            f"{name} holds {len(state_dict)} tensors but no diffusion model that this ComfyUI "
            "knows; choose a diffusion model file (not a text encoder, VAE or LoRA), or update "
            "ComfyUI"
        )
    return config, converted


def _assign(
    model: Any,
    state_dict: dict[str, torch.Tensor],
    choice: DtypeChoice,
    name: str,
    copy_limit_bytes: int,
) -> dict[str, torch.dtype]:
    """Load ``state_dict`` by assignment; the dtype the core would store each weight in, by key."""
    processed = model.model_config.process_unet_state_dict(dict(state_dict))
    declared = {key: _declared_dtype(model.diffusion_model, key) for key in processed}
    stored: dict[str, torch.dtype] = {}
    usable: dict[str, torch.dtype] = {}
    for key, tensor in processed.items():
        dtype = declared[key]
        reference = choice.reference if dtype in (choice.storage, None) else dtype
        if reference is None or not tensor.is_floating_point():
            reference = tensor.dtype
        if is_code(key, processed):
            usable[key] = tensor.dtype
        elif _is_buffer(model.diffusion_model, key):
            # Nothing casts a buffer at use: it has to be what the core would hold.
            usable[key] = reference
        else:
            usable[key] = _usable_dtype(tensor, dtype, reference, choice)
        stored[f"diffusion_model.{key}"] = reference
    _refuse_large_copies(processed, usable, name, copy_limit_bytes)
    ready = {key: tensor.to(usable[key]) for key, tensor in processed.items()}
    try:
        missing, unexpected = model.diffusion_model.load_state_dict(
            ready, strict=False, assign=True
        )
    except RuntimeError as error:
        raise CheckpointFormatError(
            f"{name} does not fit the model it was recognised as ({type(model).__name__}): {error}"
        ) from error
    _refuse_missing(model, missing, name)
    if unexpected:
        _LOG.info("%s: %d tensors are not part of the model", name, len(unexpected))
    take_back(model.diffusion_model, ready)
    given = {f"diffusion_model.{key}": dtype for key, dtype in usable.items()}
    return {**stored, **held_dtypes(model, given)}


def _refuse_large_copies(
    tensors: dict[str, torch.Tensor],
    usable: dict[str, torch.dtype],
    name: str,
    copy_limit_bytes: int,
) -> None:
    copied = sum(
        tensor.nelement() * usable[key].itemsize
        for key, tensor in tensors.items()
        if tensor.dtype != usable[key]
    )
    if copied > copy_limit_bytes:
        raise HostBudgetError(
            f"{name} would need {size_text(copied)} of host memory for weights converted to "
            f"another dtype, and {size_text(copy_limit_bytes)} is allowed; raise the host "
            "budget (at 0, what has to be copied is, and nothing is locked), or choose a "
            "weight_dtype that leaves more of them in the file",
            copied,
        )


def _usable_dtype(
    tensor: torch.Tensor,
    declared: torch.dtype | None,
    reference: torch.dtype,
    choice: DtypeChoice,
) -> torch.dtype:
    """The tensor's own dtype if casting at use gives the core's number, else the core's own."""
    if declared is None or tensor.dtype == declared or not tensor.is_floating_point():
        return tensor.dtype
    if choice.cast is not None and (
        widens_exactly(tensor.dtype, reference) or reference == choice.cast
    ):
        return tensor.dtype
    return reference


def _declared_dtype(root: torch.nn.Module, key: str) -> torch.dtype | None:
    """The dtype the model's code gave this parameter or buffer; None for what is neither."""
    path, _, attribute = key.rpartition(".")
    try:
        module = root.get_submodule(path)
    except AttributeError:
        return None
    held = module._parameters.get(attribute)
    if held is None:
        held = module._buffers.get(attribute)
    if held is not None:
        return held.dtype
    # With dynamic VRAM, operations create their parameters only on loading and keep the dtype here.
    late = getattr(module, f"{attribute}_comfy_model_dtype", None)
    return late if isinstance(late, torch.dtype) else None


def _is_buffer(root: torch.nn.Module, key: str) -> bool:
    path, _, attribute = key.rpartition(".")
    try:
        return attribute in root.get_submodule(path)._buffers
    except AttributeError:
        return False


def _refuse_missing(model: Any, absent: Sequence[str], name: str) -> None:
    missing = [key for key in absent if key.rpartition(".")[2] not in _BEGUN_AT_ONE]
    if not missing:
        return
    # The core runs such a model on uninitialised memory after a warning.
    shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    raise CheckpointFormatError(
        f"{name} lacks {len(missing)} weights of {type(model).__name__} ({shown}); the file is "
        "incomplete or of another model; download it again or choose another"
    )
