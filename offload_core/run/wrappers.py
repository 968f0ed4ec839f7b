"""Tensors that are a shell around others: quantised weights and their like.

Nothing here knows a layout. Whatever has torch's own pair of methods to be taken apart and put
together (``__tensor_flatten__``, ``__tensor_unflatten__``) is treated as the tensors it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Path = tuple[str, ...]
"""The attribute that holds an inner tensor; several where wrappers hold wrappers."""


def is_wrapper(tensor: Any) -> bool:
    """Whether ``tensor`` holds its values in tensors of its own."""
    return hasattr(tensor, "__tensor_flatten__") and hasattr(tensor, "__tensor_unflatten__")


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The bytes that ``tensor`` takes, on any device: of a wrapper those of all that it holds."""
    if is_wrapper(tensor):
        return sum(tensor_bytes(inner) for _, inner in inner_tensors(tensor))
    return tensor.nelement() * tensor.element_size()


def inner_tensors(wrapper: torch.Tensor) -> Iterator[tuple[Path, torch.Tensor]]:
    """The plain tensors that ``wrapper`` holds, through wrappers in wrappers, with their places."""
    names, _ = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        inner = getattr(wrapper, name)
        if inner is None:
            continue  # an optional one that this wrapper has not
        if is_wrapper(inner):
            for path, tensor in inner_tensors(inner):
                yield (name, *path), tensor
        else:
            yield (name,), inner


@dataclass(frozen=True)
class Recipe:
    """How a wrapper is put together over other inner tensors of the same kind."""

    kind: type
    shape: torch.Size
    stride: tuple[int, ...]
    context: Any
    parts: tuple[tuple[str, Recipe | None], ...]
    """Its attributes in torch's order, each a tensor (None) or a wrapper."""

    @staticmethod
    def of(wrapper: torch.Tensor) -> Recipe:
        """The recipe of ``wrapper``, without its tensors."""
        names, context = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = []
        for name in names:
            inner = getattr(wrapper, name)
            parts.append((name, Recipe.of(inner) if is_wrapper(inner) else None))
        shape, stride = wrapper.shape, tuple(wrapper.stride())
        return Recipe(type(wrapper), shape, stride, context, tuple(parts))

    def made_of(self, tensors: Mapping[Path, torch.Tensor], at: Path = ()) -> torch.Tensor:
        """The wrapper over ``tensors``, by their places; it holds them themselves, no copies."""
        inner: dict[str, torch.Tensor | None] = {}
        for name, part in self.parts:
            place = (*at, name)
            inner[name] = tensors.get(place) if part is None else part.made_of(tensors, place)
        unflatten: Callable[..., torch.Tensor] = self.kind.__tensor_unflatten__  # type: ignore[attr-defined]
        return unflatten(inner, self.context, self.shape, self.stride)


def as_parameter(wrapper: torch.Tensor) -> nn.Parameter:
    """``wrapper`` as a parameter, over the very same inner tensors.

    ``nn.Parameter`` would detach it first, and wrappers copy some of what they hold on that: a
    copy that is made before the bytes arrive holds other ones.
    """
    wrapper._is_param = True
    wrapper.requires_grad_(False)
    return wrapper  # type: ignore[return-value]
