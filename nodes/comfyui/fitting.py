"""Patches that do not fit their weight are found once, when they are wired.

The core takes such a patch, logs an error, and leaves the weight as it is. It does so once, when it
merges. Applied at each use, the same patch would log an error for each weight in each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import comfy.lora
import torch

_VALUE, _STRENGTH_OF_MODEL = 1, 2
"""Places in a patch: (strength, value, strength of the model, offset, function)."""


def fitting(patches: Sequence[Any], weight: torch.Tensor | None, key: str) -> list[Any]:
    """Those of ``patches`` that change a weight of this shape. The core's own log names the others.

    Each is tried on a weight without memory, so that this takes next to nothing and the card has
    no part in it. What cannot be tried is kept: then the use itself says what is wrong.
    """
    if weight is None:
        return list(patches)
    shape = tuple(weight.shape)
    return [patch for patch in patches if _is_plain(patch, shape) or _changes(patch, shape, key)]


def _is_plain(patch: Any, shape: tuple[int, ...]) -> bool:
    """The usual LoRA of the right size, for which there is nothing to try."""
    value = patch[_VALUE]
    if getattr(value, "name", None) != "lora" or any(patch[3:]):
        return False
    up, down, _, middle, scale, *rest = value.weights
    if middle is not None or scale is not None or any(one is not None for one in rest):
        return False
    rank = down.shape[0]
    size = torch.Size(shape).numel()
    return bool(
        up.numel() == up.shape[0] * rank and up.shape[0] * (down.numel() // max(1, rank)) == size
    )


def _changes(patch: Any, shape: tuple[int, ...], key: str) -> bool:
    if patch[_STRENGTH_OF_MODEL] != 1.0:
        return True
    # Its version counts what is written into it; tensors of inference mode have none.
    with torch.inference_mode(False), torch.no_grad(), contextlib.suppress(Exception):
        probe = torch.empty(shape, dtype=torch.float32, device="meta")
        before = probe._version
        result = comfy.lora.calculate_weight([patch], probe, key)
        return result is not probe or probe._version != before
    return True
