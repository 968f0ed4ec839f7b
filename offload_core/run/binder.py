"""Puts a group's device parameters in place of its home parameters, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .patches import Patches
from .weights import Weight, WeightGroup
from .wrappers import Path, Wrapper, WrapperBinding


@dataclass(frozen=True)
class Bindings:
    """Device parameters of one group over one piece of device memory, in the group's order.

    ``wrappers`` are those of which the group has inner tensors; those tensors are in no list.
    """

    weights: tuple[Weight, ...]
    parameters: tuple[nn.Parameter, ...]
    wrappers: tuple[WrapperBinding, ...] = ()


def make_bindings(group: WeightGroup, memory: torch.Tensor) -> Bindings:
    """Parameters over ``memory``, made once and kept: a pass then only swaps references.

    Must run outside inference mode, or the parameters become inference tensors that later
    in-place work outside it refuses.
    """
    plain: list[tuple[Weight, nn.Parameter]] = []
    inner: dict[Wrapper, dict[Path, torch.Tensor]] = {}
    for weight, offset in zip(group.weights, group.layout.offsets, strict=True):
        view = weight.device_view(memory, offset)
        if weight.wrapper is None:
            plain.append((weight, nn.Parameter(view, requires_grad=False)))
        else:
            inner.setdefault(weight.wrapper, {})[weight.place] = view
    return Bindings(
        tuple(weight for weight, _ in plain),
        tuple(parameter for _, parameter in plain),
        tuple(WrapperBinding(wrapper, tensors) for wrapper, tensors in inner.items()),
    )


def bind(bindings: Bindings, patches: Patches) -> None:
    """Put the device parameters in place.

    A place that holds neither home nor this parameter has been given a value by somebody else (a
    patch); theirs stays. Threads: the compute thread only.
    """
    for weight, parameter in zip(bindings.weights, bindings.parameters, strict=True):
        for site in weight.sites:
            if site.module._parameters.get(site.attribute) is weight.home:
                site.module._parameters[site.attribute] = parameter
                patches.place(weight, at_home=False)
    for wrapper in bindings.wrappers:
        wrapper.bind()


def unbind(bindings: Bindings, patches: Patches) -> None:
    """Put the home parameters back wherever ours are in place. Threads: the compute thread only."""
    for weight, parameter in zip(bindings.weights, bindings.parameters, strict=True):
        for site in weight.sites:
            if site.module._parameters.get(site.attribute) is parameter:
                site.module._parameters[site.attribute] = weight.home
                patches.place(weight, at_home=True)
    for wrapper in bindings.wrappers:
        wrapper.unbind()
