"""A model on mapped weights gets an engine and a patcher, and its place in the registry."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management
import torch
from torch import nn

from ...offload_core.device import backend_for
from ...offload_core.run import attach
from ...offload_core.values import Budget, EngineConfig, read_switches
from ..models.attachment import ATTRIBUTE, Attachment, asked_host_bytes, automatic_host_bytes
from ..models.registry import AskedBudget, AskedBy, Origin, get_service
from .build.diffusion import BuiltModel
from .orders import before_use, remember
from .patcher import CourierPatcher


@dataclass(frozen=True)
class Order:
    """What a loader was asked for: the files, the budget, and who chose that."""

    paths: tuple[Path, ...]
    budget: Budget
    origin: Origin
    asked_by: AskedBy = AskedBy.NODE

    @property
    def name(self) -> str:
        """The model's, for people: that of its first file, and how many more there are."""
        first = self.paths[0].stem
        return first if len(self.paths) == 1 else f"{first} + {len(self.paths) - 1}"


@dataclass(frozen=True)
class Devices:
    """Where a model runs, and what ComfyUI calls its place at rest."""

    load: torch.device
    offload: torch.device


def wrap(built: BuiltModel, order: Order, devices: Devices) -> CourierPatcher:
    """A patcher over ``built``, with an engine of its own."""
    switches = read_switches(os.environ)
    backend = backend_for(devices.load, switches.pretend_device_bytes)
    budget = order.budget
    root = _root_of(built.model)
    engine = attach(
        root,
        backend,
        built.mappings,
        EngineConfig(switches=switches),
        name=order.name,
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
        share=get_service().share_of(str(devices.load), budget) if budget.shared else None,
        origin=order.origin,
        asked_by=order.asked_by,
        root=root if root is not built.model else None,
    )
    model: Any = built.model
    setattr(model, ATTRIBUTE, attachment)
    patcher = CourierPatcher(model, load_device=devices.load, offload_device=devices.offload)
    attachment.model_id = get_service().register(
        engine, order.name, order.paths[0].name, backend, asked_of(attachment), order.origin
    )
    attachment.before_use = before_use
    remember(patcher, attachment)
    return patcher


def _root_of(model: nn.Module) -> nn.Module:
    """What the engine takes for the model: where the model has weights of its own beside those of
    its parts, a module over the very same parts and weights.

    The engine holds each module that has weights, and the model holds its engine: a circle, which
    only a garbage collection would free.
    """
    if not any(weight is not None for weight in model._parameters.values()):
        return model
    root = nn.Module()
    root._parameters, root._buffers = model._parameters, model._buffers
    root._modules = model._modules
    return root


def diffusion_devices() -> Devices:
    """Where ComfyUI runs diffusion models."""
    management = comfy.model_management
    return Devices(management.get_torch_device(), management.unet_offload_device())


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
