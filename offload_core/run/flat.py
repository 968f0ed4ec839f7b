"""Whether a tensor is flat bytes: what can be copied as such and viewed anew elsewhere."""

from __future__ import annotations

import torch

_WASTE_LIMIT = 2
"""A strided tensor whose storage span exceeds this many times its own bytes is moved whole."""


def flat_refusal(tensor: torch.Tensor) -> str:
    """Why ``tensor`` cannot travel as flat bytes; "" if it can."""
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}, which has no flat bytes"
    if span_bytes(tensor) > _WASTE_LIMIT * tensor.nelement() * tensor.element_size():
        return "its strides leave most of its storage unused"
    return ""


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes of storage from the first to the last element; strides may leave some unused."""
    if tensor.nelement() == 0:
        return 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    return (last + 1) * tensor.element_size()
