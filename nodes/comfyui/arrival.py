"""Weight patches merged where a weight arrives on the device: see ``offload_core.run.Patches``.

A LoRA at use costs six passes over each weight in each step, and moves its matrices from ordinary
memory each time. Merged on arrival it costs one pass, for what streams only.
"""

from __future__ import annotations

import copy
from typing import Any

import comfy.lora
import comfy.weight_adapter
import torch

from ...offload_core.device import LowRank, Term
from .lora import PatchAtUse, patch_dtype

_LORA = getattr(comfy.weight_adapter, "LoRAAdapter", None)


class MergedOnArrival:
    """One weight's patches, merged into it on the device with ComfyUI's own bits.

    Its matrices are on the device from the first arrival on, until the weight stays there.
    Threads: the prompt worker; the byte counts may be read by any.
    """

    def __init__(self, at_use: PatchAtUse, shape: torch.Size) -> None:
        """``shape`` is the weight's."""
        self._at_use = at_use
        self._is_low_rank = is_low_rank(at_use.patches, shape)
        self._terms: tuple[Term, ...] | None = None
        self._patches: list[Any] | None = None
        self.held_bytes = 0
        self.device_bytes = sum(tensor.nbytes for tensor in _tensors(at_use.patches))

    def low_rank(self, weight: torch.Tensor) -> LowRank | None:
        """See ``WeightPatch``."""
        if not self._is_low_rank or not weight.is_contiguous():
            return None
        if self._terms is None:
            self._terms = tuple(_term(patch, weight.device) for patch in self._at_use.patches)
            self.held_bytes = sum(term.up.nbytes + term.down.nbytes for term in self._terms)
        return LowRank(weight, self._terms, patch_dtype(weight.device))

    def apply(self, weight: torch.Tensor) -> None:
        """See ``WeightPatch``."""
        if self._patches is None:
            self._patches = [_moved(patch, weight.device) for patch in self._at_use.patches]
            self.held_bytes = sum(tensor.nbytes for tensor in _tensors(self._patches))
        weight.copy_(self._at_use.merged(weight, self._patches))

    def let_go(self) -> None:
        """See ``WeightPatch``."""
        self._terms, self._patches, self.held_bytes = None, None, 0


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


def _term(patch: Any, device: torch.device) -> Term:
    strength, adapter = patch[:2]
    up, down, alpha = adapter.weights[:3]
    alpha = 1.0 if alpha is None else alpha / down.shape[0]
    kinds = {up.dtype, down.dtype}
    kind = kinds.pop() if len(kinds) == 1 else torch.float32
    if kind not in (torch.bfloat16, torch.float16):
        kind = torch.float32
    # Turned over on the host's side of the link would be slow: there, rows are read one by one.
    up = up.flatten(start_dim=1).to(device).to(kind).t().contiguous()
    down = down.flatten(start_dim=1).to(device).to(kind).contiguous()
    return Term(up, down, float(strength * alpha))


def _moved(patch: Any, device: torch.device) -> Any:
    """The same patch with its tensors on ``device``; what is no tensor stays."""
    strength, value, *rest = patch
    return (strength, _value_moved(value, device), *rest)


def _value_moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        found = copy.copy(value)
        found.weights = _value_moved(value.weights, device)
        return found
    if isinstance(value, (tuple, list)):
        return type(value)(_value_moved(one, device) for one in value)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        return _tensors(value.weights)
    if isinstance(value, (tuple, list)):
        return [tensor for one in value for tensor in _tensors(one)]
    return []
