"""Weight patches merged where a weight arrives on the device: see ``offload_core.run.Patches``.

A LoRA at use costs six passes over each weight in each step, and moves its matrices from ordinary
memory each time. Merged on arrival it costs one pass, for what streams only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import comfy.lora
import comfy.weight_adapter
import torch

from ...offload_core.device import LowRank, Term
from .lora import PatchAtUse, compute_dtype

_LORA = getattr(comfy.weight_adapter, "LoRAAdapter", None)


class MergedOnArrival:
    """One weight's patches, merged into it on the device with ComfyUI's own bits.

    Threads: the prompt worker.
    """

    def __init__(self, at_use: PatchAtUse, shape: torch.Size) -> None:
        """``shape`` is the weight's."""
        self._at_use = at_use
        self._is_low_rank = is_low_rank(at_use.patches, shape)
        found = [_factors(patch) for patch in at_use.patches] if self._is_low_rank else None
        tensors = _tensors(at_use.patches) if found is None else [t for pair in found for t in pair]
        self.tensors = tuple(tensor.detach().cpu().contiguous() for tensor in tensors)

    def low_rank(self, weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> LowRank | None:
        """See ``WeightPatch``."""
        if not self._is_low_rank or not weight.is_contiguous():
            return None
        pairs = zip(tensors[::2], tensors[1::2], self._at_use.patches, strict=True)
        terms = tuple(Term(up, down, _scale(patch)) for up, down, patch in pairs)
        return LowRank(weight, terms, compute_dtype(weight.device))

    def apply(self, weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """See ``WeightPatch``."""
        patches = self._at_use.patches
        if not self._is_low_rank:
            there = iter(tensors)
            patches = [_exchanged(patch, there) for patch in patches]
        weight.copy_(self._at_use.merged(weight, patches=patches))


def is_low_rank(patches: list[Any], shape: torch.Size) -> bool:
    """Whether all of them are plain LoRAs: a product of two matrices, scaled and added."""
    return bool(patches) and all(_is_plain_lora(patch, shape) for patch in patches)


def _is_plain_lora(patch: Any, shape: torch.Size) -> bool:
    _, adapter, strength_model, offset, function = patch
    if _LORA is None or type(adapter) is not _LORA:
        return False
    up, down, _, mid, dora_scale, reshape = adapter.weights
    return (
        (strength_model, offset, function, mid, dora_scale, reshape) == (1.0, *(None,) * 5)
        and up.shape[0] == shape[0]
        and up.flatten(start_dim=1).shape[1] == down.shape[0]
        and down.flatten(start_dim=1).shape[1] * shape[0] == shape.numel()
    )


def _factors(patch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both matrices of a plain LoRA, of one dtype that a kernel knows."""
    up, down = (matrix.flatten(start_dim=1) for matrix in patch[1].weights[:2])
    if up.dtype != down.dtype or up.dtype not in (torch.bfloat16, torch.float16):
        up, down = up.to(torch.float32), down.to(torch.float32)
    return up, down


def _scale(patch: Any) -> float:
    strength, adapter = patch[:2]
    alpha = adapter.weights[2]
    return float(strength * (1.0 if alpha is None else alpha / adapter.weights[1].shape[0]))


def _exchanged(value: Any, there: Iterator[torch.Tensor]) -> Any:
    """The same patch with the next of ``there`` in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return next(there)
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        found = copy.copy(value)
        found.weights = _exchanged(value.weights, there)
        return found
    if isinstance(value, (tuple, list)):
        return type(value)(_exchanged(one, there) for one in value)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        return _tensors(value.weights)
    if isinstance(value, (tuple, list)):
        return [tensor for one in value for tensor in _tensors(one)]
    return []
