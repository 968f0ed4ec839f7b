"""Tensors that are a shell around others: quantised weights and their like.

Nothing here knows a layout. Whatever has torch's own pair of methods to be taken apart and put
together (``__tensor_flatten__``, ``__tensor_unflatten__``) is treated as the tensors it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
    return wrapper  # type: ignore[return-value]


@dataclass(frozen=True)
class Site:
    """One place that holds a weight: ``module._parameters[attribute]``."""

    module: nn.Module
    attribute: str


@dataclass(eq=False)
class Wrapper:
    """One parameter that is a wrapper, all the places that hold it, and what of it is where.

    Its inner tensors come to the device on their own, maybe at different times and in different
    memory. Only once all are there can the wrapper over them be in place; until then ``home`` is.

    Threads: the compute thread.
    """

    home: nn.Parameter
    sites: list[Site]
    recipe: Recipe
    places: frozenset[Path]
    """Of all its inner tensors."""
    held: dict[Path, torch.Tensor] = field(default_factory=dict)
    """Those that are on the device now."""
    placed: nn.Parameter | None = None
    """The wrapper over ``held`` that is in place; None: ``home`` is."""

    def put(self, parameter: nn.Parameter | None) -> None:
        """Have ``parameter`` in place, or ``home`` again. A place that somebody else has given
        another value keeps it."""
        new = self.home if parameter is None else parameter
        for site in self.sites:
            current = site.module._parameters.get(site.attribute)
            if current is not None and (current is self.home or current is self.placed):
                site.module._parameters[site.attribute] = new
        self.placed = parameter


class WrapperBinding:
    """The inner tensors of one wrapper that lie in one piece of device memory.

    The wrapper over them is made once and kept: a pass then only swaps references.

    Threads: the compute thread.
    """

    def __init__(self, wrapper: Wrapper, tensors: Mapping[Path, torch.Tensor]) -> None:
        self._wrapper = wrapper
        self._tensors = dict(tensors)
        self._made: nn.Parameter | None = None
        self._made_over: dict[Path, torch.Tensor] = {}
        if self._tensors.keys() == wrapper.places:
            self._make(self._tensors)

    def bind(self) -> None:
        """These tensors have arrived; put the wrapper in place if they were the last."""
        held = self._wrapper.held
        held.update(self._tensors)
        if len(held) < len(self._wrapper.places):
            return
        # Parts that are elsewhere may have moved since.
        if any(self._made_over.get(place) is not tensor for place, tensor in held.items()):
            self._make(held)
        self._wrapper.put(self._made)

    def unbind(self) -> None:
        """These tensors leave; the wrapper over them with them."""
        held = self._wrapper.held
        for place, tensor in self._tensors.items():
            if held.get(place) is tensor:
                del held[place]
        if len(held) < len(self._wrapper.places):
            self._wrapper.put(None)

    def _make(self, tensors: Mapping[Path, torch.Tensor]) -> None:
        self._made_over = dict(tensors)
        # As the home: torch detaches no ordinary wrapper in inference mode, if it makes new ones.
        with torch.inference_mode(self._wrapper.home.is_inference()):
            self._made = as_parameter(self._wrapper.recipe.made_of(tensors))


def refusal_of(wrapper: torch.Tensor) -> str:
    """Why the inner tensors of ``wrapper`` cannot travel one by one; "" if they can."""
    inner = dict(inner_tensors(wrapper))
    kind = type(wrapper).__name__
    if not inner:
        return f"{kind} says of no tensor that it holds it, and moves as a whole"
    if any(type(tensor.data) is not torch.Tensor for tensor in inner.values()):
        return f"{kind} holds tensors of another kind, and moves as a whole"
    try:
        again = dict(inner_tensors(Recipe.of(wrapper).made_of(inner)))
    except Exception as error:
        return f"{kind} cannot be put together anew ({type(error).__name__}), and moves as a whole"
    # One that converts or copies what it is given would do so before the bytes have arrived.
    if again.keys() != inner.keys() or not all(_is_same(inner[k], again[k]) for k in inner):
        return f"{kind} copies what it holds when it is put together, and moves as a whole"
    return ""


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def over_originals(wrapper: torch.Tensor, originals: list[torch.Tensor]) -> nn.Parameter | None:
    """``wrapper`` anew, over those of ``originals`` that inner tensors of it are copies of.

    Many a loader copies the smaller of them on the way; what has the same bytes in a file need not
    be in memory a second time. Each original that is used is taken off the list.

    Returns: None where nothing changes, or where it cannot be put together anew.
    """
    inner = dict(inner_tensors(wrapper))
    found = {
        place: original
        for place, tensor in inner.items()
        if (original := _original_of(tensor, originals)) is not None
    }
    if not found or refusal_of(wrapper):
        return None
    with torch.inference_mode(wrapper.is_inference()):
        return as_parameter(Recipe.of(wrapper).made_of({**inner, **found}))


def _original_of(tensor: torch.Tensor, originals: list[torch.Tensor]) -> torch.Tensor | None:
    if not tensor.is_contiguous() or not tensor.nelement():
        return None
    bits = tensor.reshape(-1).view(torch.uint8)
    for place, original in enumerate(originals):
        if original.nbytes != tensor.nbytes or not original.is_contiguous():
            continue
        same = original.reshape(-1).view(torch.uint8)
        if torch.equal(same, bits):
            del originals[place]
            return same.view(tensor.dtype).reshape(tensor.shape)
    return None
