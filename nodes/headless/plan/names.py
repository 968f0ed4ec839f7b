"""Which tensors of a checkpoint make one layer, by their names alone. Pure.

As the engine finds block lists in a model: the outermost lists of modules that have modules of
their own. A list of bare weights cannot be told from a small Sequential by names, and is not one.
"""

from __future__ import annotations

from collections.abc import Iterable

_MODEL_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
BASE = "(outside the blocks)"
_MARKS = (".comfy_quant", "scaled_fp8")


def without_other_models(names: Iterable[str]) -> dict[str, str]:
    """Each name by what it is called inside the diffusion model. In a checkpoint that has a text
    encoder and a VAE too, only the diffusion model's."""
    found = list(names)
    for prefix in _MODEL_PREFIXES:
        inside = {name: name[len(prefix) :] for name in found if name.startswith(prefix)}
        if inside:
            return inside
    return {name: name for name in found}


def without_marks(names: Iterable[str]) -> list[str]:
    """The names of weights alone: what only says how others are quantised is read once, and is no
    part of the model."""
    return [name for name in names if not name.endswith(_MARKS)]


def layers_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The names by layer, in the order in which layers are held; BASE has all others."""
    named = list(names)
    lists = {name for name in map(_list_of, named) if name is not None}
    layers: dict[str, list[str]] = {}
    for name in named:
        owner = next((own for own in _outer(name) if own in lists), None)
        layer = BASE if owner is None else _layer(name, owner)
        layers.setdefault(layer, []).append(name)
    base = layers.pop(BASE, [])
    ordered = {layer: layers[layer] for layer in sorted(layers, key=_natural)}
    return {**ordered, BASE: base} if base else ordered


def _list_of(name: str) -> str | None:
    """The outermost list that ``name`` shows: something, a number, and a module below it."""
    parts = name.split(".")
    for place in range(1, len(parts) - 2):
        if parts[place].isdigit():
            return ".".join(parts[:place])
    return None


def _outer(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:place]) for place in range(1, len(parts)) if parts[place].isdigit())


def _layer(name: str, owner: str) -> str:
    """A list inside of a list is opened, as a UNet walks it."""
    parts = name[len(owner) + 1 :].split(".")
    count = next((i for i, part in enumerate(parts) if not part.isdigit()), len(parts))
    # The last part is the weight itself.
    return ".".join([owner, *parts[: max(1, min(count, len(parts) - 1))]])


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
