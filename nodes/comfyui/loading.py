"""Loading a diffusion model under a budget: open, build, attach, register."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management
import folder_paths
import torch

from ...offload_core.device import backend_for
from ...offload_core.host import FileIdentity, resolve_shards
from ...offload_core.run import attach
from ...offload_core.values import Budget, CourierError, EngineConfig, read_switches
from ..models.attachment import ATTRIBUTE, Attachment, asked_host_bytes, automatic_host_bytes
from ..models.registry import AskedBudget, AskedBy, get_service
from .build.diffusion import BuiltModel, build_diffusion_model, open_checkpoint
from .compat import require
from .orders import before_use, remember
from .patcher import CourierPatcher
from .runs import add_run_wrappers
from .symbols import Part

WEIGHT_DTYPES = ("default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2")
"""As the core's own loader offers them."""


def diffusion_model_names() -> list[str]:
    """The files that the core's own loader would offer."""
    return folder_paths.get_filename_list("diffusion_models")


def offered_name(name: str) -> str | None:
    """The offered file that ``name`` means; None if there is none.

    A workflow saved on Windows says ``sub\\model.safetensors`` and one saved elsewhere
    ``sub/model.safetensors``. Only ever an entry of the list, so no name leads out of the folders.
    """
    names = diffusion_model_names()
    if name in names:
        return name
    wanted = name.replace("\\", "/")
    return next((known for known in names if known.replace("\\", "/") == wanted), None)


def file_fingerprint(name: str) -> str:
    """What changes when a file of the model does: ComfyUI then runs the loader node again."""
    path = _path_of(name)
    try:
        files = resolve_shards(path)
    except CourierError:
        files = (path,)  # the loader itself will say what is wrong with it
    return " ".join(_identity_text(file) for file in files)


def load_diffusion_model(
    name: str, weight_dtype: str, budget: Budget, asked_by: AskedBy = AskedBy.NODE
) -> CourierPatcher:
    """The diffusion model ``name`` with its weights left in the file; nothing is on the device yet.

    Args:
        asked_by: who chose the budget, for the status.
    Raises: CheckpointError, naming the file, with nothing left behind; NotWithThisComfyError.
    """
    require(Part.LOAD)
    path = _path_of(name)
    requested = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e4m3fn_fast": torch.float8_e4m3fn,
                 "fp8_e5m2": torch.float8_e5m2}.get(weight_dtype)  # fmt: skip
    limit_bytes = host_limit_bytes(budget)
    built = build_diffusion_model(
        open_checkpoint(path, limit_bytes),
        requested,
        limit_bytes,
        fp8_optimizations=weight_dtype.endswith("_fast"),
    )
    patcher = wrap(built, path, budget)
    patcher.attachment.asked_by = asked_by
    patcher.attachment.source = (offered_name(name) or name, weight_dtype)
    return patcher


def wrap(built: BuiltModel, path: Path, budget: Budget) -> CourierPatcher:
    """A patcher over ``built``, with an engine of its own."""
    device = comfy.model_management.get_torch_device()
    switches = read_switches(os.environ)
    backend = backend_for(device, switches.pretend_device_bytes)
    engine = attach(
        built.model,
        backend,
        built.mappings,
        EngineConfig(switches=switches),
        name=path.stem,
        notes=(built.note,) if built.note else (),
        budget=budget,
        device_dtypes=built.stored_dtypes,
    )
    attachment = Attachment(
        engine=engine,
        budget=budget,
        stored_dtypes=built.stored_dtypes,
        homes=dict(built.model.named_parameters(remove_duplicate=False)),
        switches=switches,
        measures_activations=backend.activation_peak_bytes() is not None,
        share=get_service().share_of(str(device), budget) if budget.shared else None,
    )
    model: Any = built.model
    setattr(model, ATTRIBUTE, attachment)
    patcher = CourierPatcher(
        model, load_device=device, offload_device=comfy.model_management.unet_offload_device()
    )
    add_run_wrappers(patcher)
    attachment.model_id = get_service().register(
        engine, path.stem, path.name, backend, asked_of(attachment)
    )
    attachment.before_use = before_use
    remember(patcher, attachment)
    return patcher


def asked_of(attachment: Attachment) -> Callable[[], AskedBudget | None]:
    """The budget asked for, for as long as the model lives."""
    reference = weakref.ref(attachment)

    def asked() -> AskedBudget | None:
        found = reference()
        if found is None:
            return None
        return AskedBudget(found.budget, found.asked_by, found.is_asked_anew, found.remarks)

    return asked


def host_limit_bytes(budget: Budget) -> int:
    """The host budget as a figure; of one of 0, which locks nothing, what is free may be read, and
    of one beyond all that the machine has, the same."""
    switches = read_switches(os.environ)
    return asked_host_bytes(budget, switches) or automatic_host_bytes(switches)


def _path_of(name: str) -> Path:
    return Path(folder_paths.get_full_path_or_raise("diffusion_models", offered_name(name) or name))


def _identity_text(file: Path) -> str:
    try:
        identity = FileIdentity.of(file)
    except OSError:
        return "unreadable"
    return f"{identity.device}:{identity.inode}:{identity.size_bytes}:{identity.mtime_ns}"
