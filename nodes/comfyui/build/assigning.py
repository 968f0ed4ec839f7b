"""The file's tensors in the places of the weights that ComfyUI would have filled with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ....offload_core.values import CheckpointFormatError, HostBudgetError, size_text
from .dtypes import widens_exactly
from .recorder import LoadRecorder

_PROJECTION = "text_projection"
"""Of CLIP-L, which most models use without it: ComfyUI says nothing where a file lacks it."""
_HEADS = ("lm_head", _PROJECTION)
"""Single layers that an encoder's file may lack: encoding does without."""


@dataclass(frozen=True)
class AssignedWeights:
    """By key of the model: the dtypes that ComfyUI would store, what no file gave a value, and what
    of that has none at all, not even one that its model began with."""

    stored_dtypes: dict[str, torch.dtype]
    absent: frozenset[str]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    key: str
    module: nn.Module
    attribute: str
    held: torch.Tensor
    source: torch.Tensor | None
    stored: torch.dtype
    usable: torch.dtype
    """What the weight is at rest, to give the numbers of ``stored`` in use."""


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
        if place.usable != place.stored:
            # Some of the core's layers convert at use, all of them can.
            setattr(place.module, "comfy_cast_weights", True)  # noqa: B010 - not in torch's types
    missing = [
        place.key
        for place in parameters
        if place.source is None and recorder.is_unwritten(place.held)
    ]
    missing += _assign_buffers(model, recorder)
    absent = {p.key for p in parameters if p.source is None and type(p.held.data) is torch.Tensor}
    stored = {p.key: p.stored for p in parameters}
    return AssignedWeights(stored, frozenset(absent), tuple(missing))


def _places(model: nn.Module, recorder: LoadRecorder) -> Iterator[_Place]:
    for path, module in model.named_modules():
        for attribute, held in module._parameters.items():
            if held is None:
                continue
            key = f"{path}.{attribute}" if path else attribute
            source, stored = recorder.source_of(held), held.dtype
            if source is None and recorder.is_source(held):
                # With dynamic VRAM the core assigns, and notes the dtype that it had declared.
                source = held.detach()
                stored = getattr(module, f"{attribute}_comfy_model_dtype", stored)
            usable = stored if source is None else _usable_dtype(source, stored, module, attribute)
            yield _Place(key, module, attribute, held, source, stored, usable)


def _usable_dtype(
    source: torch.Tensor, stored: torch.dtype, module: nn.Module, attribute: str
) -> torch.dtype:
    """The file's own where it is rounded on arrival, or widened at use, to the very numbers."""
    given = source.dtype
    if not (given.is_floating_point and stored.is_floating_point):
        return stored
    if not hasattr(module, "comfy_cast_weights") or attribute not in ("weight", "bias"):
        return stored
    is_rounded_on_arrival = given.itemsize == stored.itemsize > 1
    return given if is_rounded_on_arrival or widens_exactly(given, stored) else stored


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


def absent_parts(model: nn.Module, assigned: AssignedWeights, names: str, depth: int) -> str:
    """What the files lack, for people. A part that can be done without (a vision tower, the head
    that generates, the half of a VAE that encodes) becomes zeros; anything else is refused.

    Args:
        depth: how many names a part has at least, so that it is not all of the model.
    Raises: CheckpointFormatError.
    """
    parts: dict[str, int] = {}
    lost = []
    for key in assigned.missing:
        part = _optional_part(model, key, assigned.absent, depth)
        if part is None:
            lost.append(key)
        elif not part.endswith(_PROJECTION):
            parts[part] = parts.get(part, 0) + 1
    if lost:
        # ComfyUI runs such a model on uninitialised memory after a warning.
        shown = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
        raise CheckpointFormatError(
            f"{names} lacks {len(lost)} weights of {type(model).__name__} ({shown}); the file is "
            "incomplete, or of another model or type; download it again or choose another"
        )
    for key in assigned.missing:
        _fill_with_zeros(model, key)
    if not parts:
        return ""
    held = ", ".join(f"{name} ({count} weights)" for name, count in parts.items())
    return f"{names} has no {held}: what needs it gives nothing of use"


def _fill_with_zeros(model: nn.Module, key: str) -> None:
    path, _, attribute = key.rpartition(".")
    module = model.get_submodule(path)
    weight = module._parameters.get(attribute)
    if weight is None:
        module._buffers[attribute] = torch.zeros_like(module._buffers[attribute])
        return
    # Zeros that nobody writes to are the system's own page, over and over.
    zeros = torch.zeros(weight.shape, dtype=weight.dtype)
    module._parameters[attribute] = nn.Parameter(zeros, requires_grad=False)


def _optional_part(model: nn.Module, key: str, absent: frozenset[str], depth: int) -> str | None:
    """The largest part that a file lacks whole, if it is one to do without."""
    path = key.rpartition(".")[0].split(".")
    for end in range(depth, len(path) + 1):
        name = ".".join(path[:end])
        part = model.get_submodule(name)
        held = [f"{name}.{one}" for one, _ in part.named_parameters()]
        if not all(one in absent for one in held):
            continue
        in_a_list = path[end - 1].isdigit()
        is_part = any(True for _ in part.children()) or path[end - 1] in _HEADS
        return name if is_part and not in_a_list else None
    return None
