"""The file's tensors in the places of the weights that ComfyUI would have filled with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ....offload_core.values import HostBudgetError, size_text
from .dtypes import widens_exactly
from .recorder import LoadRecorder


@dataclass(frozen=True)
class AssignedWeights:
    """By key of the model: the dtypes that ComfyUI would store, and what has no values at all."""

    stored_dtypes: dict[str, torch.dtype]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    key: str
    module: nn.Module
    attribute: str
    held: torch.Tensor
    source: torch.Tensor | None
    usable: torch.dtype
    """What the weight is at rest, to give the numbers of ``held.dtype`` in use."""


def put_in_place(
    model: nn.Module, recorder: LoadRecorder, name: str, copy_limit_bytes: int
) -> AssignedWeights:
    """Assign what ``recorder`` noted. A buffer is copied: nothing converts one at use.

    Args:
        name: of the files, for messages.
        copy_limit_bytes: how much may be copied to have the dtypes that ComfyUI would store.
    Raises: HostBudgetError, before anything is copied.
    """
    parameters = list(_places(model, recorder))
    copied = sum(
        place.source.nelement() * place.usable.itemsize
        for place in parameters
        if place.source is not None and place.source.dtype != place.usable
    )
    if copied > copy_limit_bytes:
        raise HostBudgetError(
            f"{name} would need {size_text(copied)} of host memory for weights converted to "
            f"another dtype, and {size_text(copy_limit_bytes)} is allowed; raise the host budget "
            "(at 0, what has to be copied is, and nothing is locked)",
            copied,
        )
    made: dict[int, nn.Parameter] = {}
    for place in parameters:
        if place.source is None:
            continue
        # By identity: a weight that two modules share stays one.
        if id(place.held) not in made:
            tensor = place.source.to(place.usable)
            made[id(place.held)] = nn.Parameter(tensor, requires_grad=False)
        place.module._parameters[place.attribute] = made[id(place.held)]
    missing = [
        place.key
        for place in parameters
        if place.source is None and recorder.is_unwritten(place.held)
    ]
    missing += _assign_buffers(model, recorder)
    return AssignedWeights({p.key: p.held.dtype for p in parameters}, tuple(missing))


def _places(model: nn.Module, recorder: LoadRecorder) -> Iterator[_Place]:
    for path, module in model.named_modules():
        for attribute, held in module._parameters.items():
            if held is None:
                continue
            key = f"{path}.{attribute}" if path else attribute
            source = recorder.source_of(held)
            usable = held.dtype if source is None else _usable_dtype(source, held.dtype, module)
            yield _Place(key, module, attribute, held, source, usable)


def _usable_dtype(source: torch.Tensor, declared: torch.dtype, module: nn.Module) -> torch.dtype:
    """The file's own where it is rounded on arrival, or widened at use, to the very numbers."""
    given = source.dtype
    if not (given.is_floating_point and declared.is_floating_point):
        return declared
    if given.itemsize == declared.itemsize > 1:
        return given
    casts_at_use = bool(getattr(module, "comfy_cast_weights", False))
    return given if casts_at_use and widens_exactly(given, declared) else declared


def _assign_buffers(model: nn.Module, recorder: LoadRecorder) -> list[str]:
    missing = []
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            source = recorder.source_of(buffer)
            if source is not None:
                module._buffers[name] = source.to(buffer.dtype, copy=True)
            elif recorder.is_unwritten(buffer):
                missing.append(f"{path}.{name}" if path else name)
    return missing
