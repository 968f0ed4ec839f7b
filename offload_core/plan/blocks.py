"""Which modules of a model are its layers: a walk over names, no tensor is touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class LayerModule:
    """One streamed unit: a module that its parent calls, with weights below it."""

    name: str
    module: nn.Module


@dataclass(frozen=True)
class BlockList:
    """A list of repeated blocks and the layers found in it, in the order they are held."""

    name: str
    layers: tuple[LayerModule, ...]


def find_block_lists(root: nn.Module) -> tuple[BlockList, ...]:
    """The outermost block lists of ``root``, each module taken once.

    A ModuleList or ModuleDict with weights is a block list; a Sequential is one if some element
    has modules of its own (an MLP written as a Sequential is not worth streaming). Elements that
    are containers are opened: a UNet walks the Sequentials inside ``input_blocks`` itself and
    never calls them, so only what they hold is sure to be called. So are elements that nobody can
    call, because they have no ``forward``: a VAE keeps the parts of a level in such a module.

    Returns: empty when nothing repeats; such a model runs with everything resident.
    """
    seen: set[int] = set()
    lists = []
    for name, container in _outermost_containers("", root):
        layers = tuple(
            LayerModule(layer_name, module)
            for layer_name, module in _layers_in(name, container)
            if id(module) not in seen and not seen.add(id(module))  # type: ignore[func-returns-value]
        )
        if layers:
            lists.append(BlockList(name, layers))
    return tuple(lists)


def _outermost_containers(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if _is_block_list(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _outermost_containers(_join(name, child_name), child)


def _is_block_list(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return any(_has_weights_below(child) for child in module.children())
    return isinstance(module, _CONTAINERS) and _has_weights(module)


def _layers_in(name: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    # ``_modules`` and not named_children(): the latter hides a block that is listed twice, and
    # the caller has to see (and drop) it by identity.
    for child_name, child in container._modules.items():
        if child is None or not _has_weights(child):
            continue
        child_path = _join(name, child_name)
        if isinstance(child, _CONTAINERS) or type(child).forward is nn.Module.forward:
            yield from _layers_in(child_path, child)
        else:
            yield child_path, child


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_weights_below(module: nn.Module) -> bool:
    return any(_has_weights(child) for child in module.children())


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
