"""The weights of a model by the layer that owns them: one entry a weight, however many names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from ..device import Recode
from ..host import PAGE_BYTES, FileMapping, MemoryKind, memory_kind
from ..plan import ALIGNMENT, BlockList, BufferLayout, Extent, lay_out
from ..values import ConfigError, shortened, whole_pages
from .flat import flat_refusal, span_bytes
from .wrappers import (
    Path,
    Recipe,
    Site,
    Wrapper,
    inner_tensors,
    is_wrapper,
    refusal_of,
    tensor_bytes,
)

BASE_NAME = "(outside the blocks)"
"""The name under which the status shows what belongs to no single layer."""

_NAMES_SHOWN = 3
_NAME_CHARACTERS = 40


@dataclass(eq=False)
class Weight:
    """One parameter object, all the places that hold it, and where its bytes are at rest.

    ``home`` is the host's own Parameter, put back whenever the weight is not on the device.
    ``refusal`` says why the weight cannot travel as flat bytes, or is empty. ``device_dtype`` is
    what it is on the device: its own, or another of that size that it is rounded to on arrival.

    A parameter that is a wrapper is as many weights as it has inner tensors. Each has ``wrapper``
    and its ``place`` in it; its ``home`` is over that tensor alone and stands nowhere in a module.
    """

    name: str
    home: nn.Parameter
    sites: list[Site]
    extent: Extent
    mapping: FileMapping | None
    refusal: str
    device_dtype: torch.dtype
    wrapper: Wrapper | None = None
    place: Path = ()
    loose_bytes: int = 0
    """Of one that moves as a whole: what of it lies on no checkpoint mapping."""

    def device_view(self, memory: torch.Tensor, offset: int) -> torch.Tensor:
        """The weight over ``memory`` (uint8, 1-d) at ``offset``, with its own shape and strides."""
        home = self.home
        if self.extent.size_bytes == 0:
            return torch.empty(home.shape, dtype=self.device_dtype, device=memory.device)
        # Not ``view(dtype)``: torch.compile's stand-ins for tensors lose the element size on it.
        first = (memory.storage_offset() + offset) // self.device_dtype.itemsize
        view = torch.empty(0, dtype=self.device_dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), first, home.shape, home.stride())


@dataclass(frozen=True)
class PageRun:
    """Whole pages that hold weights of one layer alone, and what keeps them in memory.

    ``mapping`` is None for a copy in ordinary memory.
    """

    address: int
    size_bytes: int
    owner: object
    mapping: FileMapping | None

    @property
    def kind(self) -> MemoryKind:
        """As the kernel says."""
        if self.mapping is not None:
            return self.mapping.kind
        return memory_kind(self.address, self.size_bytes)


@dataclass(eq=False)
class WeightGroup:
    """What travels together: the weights of one layer or a part of it, or all that belong to none.

    ``weights`` are in the order of their host addresses, so that a run of them is a run of bytes.
    ``solid`` weights (quantised wrappers and the like) move as whole objects and stay resident.
    """

    name: str
    module: nn.Module | None
    weights: tuple[Weight, ...]
    layout: BufferLayout
    solid: tuple[Weight, ...] = ()
    notes: list[str] = field(default_factory=list)

    def part(self, indices: Sequence[int]) -> WeightGroup:
        """The weights at ``indices`` (places in ``weights``) as a group with its own layout."""
        weights = tuple(self.weights[index] for index in indices)
        return WeightGroup(self.name, self.module, weights, lay_out([w.extent for w in weights]))

    def recodes(self, memory: torch.Tensor) -> list[Recode]:
        """What is to be rounded in ``memory`` (uint8, 1-d) once the bytes are there."""
        return [Recode(memory[a:b], stored, used) for a, b, stored, used in self._recode_spans]

    @cached_property
    def _recode_spans(self) -> list[tuple[int, int, torch.dtype, torch.dtype]]:
        """Neighbours that are rounded alike share a span, and one kernel."""
        spans: list[tuple[int, int, torch.dtype, torch.dtype]] = []
        placed = zip(self.layout.offsets, self.weights, strict=True)
        for offset, weight in sorted(placed, key=lambda pair: pair[0]):
            stored, used = weight.home.dtype, weight.device_dtype
            if stored == used or not weight.extent.size_bytes:
                continue
            end = offset + weight.extent.size_bytes
            last = spans[-1] if spans else None
            # What lies between two is padding if it is less than one alignment.
            if last is not None and last[2:] == (stored, used) and offset - last[1] < ALIGNMENT:
                spans[-1] = (last[0], end, stored, used)
            else:
                spans.append((offset, end, stored, used))
        return spans

    @cached_property
    def runs(self) -> tuple[PageRun, ...]:
        """The whole pages inside each contiguous run of file bytes, and inside each copy."""
        return tuple(run for run in _page_runs(self.weights) if run.size_bytes)

    @cached_property
    def solid_bytes(self) -> int:
        """Bytes of the weights that move as whole objects, on the host and on the device alike."""
        return sum(tensor_bytes(w.home) for w in self.solid)

    @cached_property
    def copied_bytes(self) -> int:
        """Host bytes of weights that no checkpoint mapping holds."""
        loose = sum(w.extent.size_bytes for w in self.weights if w.mapping is None)
        return loose + sum(w.loose_bytes for w in self.solid)

    @cached_property
    def mapped_bytes(self) -> int:
        """Bytes of weights that are views on a checkpoint mapping."""
        mapped = sum(w.extent.size_bytes for w in self.weights if w.mapping is not None)
        return mapped + self.solid_bytes - sum(w.loose_bytes for w in self.solid)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all the group's weights."""
        return self.copied_bytes + self.mapped_bytes

    @cached_property
    def dtype_names(self) -> tuple[str, ...]:
        """Of the weights as the host holds them, sorted, such as "bfloat16"."""
        weights = (*self.weights, *self.solid)
        return tuple(sorted({str(weight.home.dtype).removeprefix("torch.") for weight in weights}))


@dataclass(frozen=True)
class Inventory:
    """Every parameter of a model exactly once, in ``base`` or in one of ``layers``.

    ``buffer_bytes`` are the registered buffers, shared ones once; all of them stay on the device.
    """

    base: WeightGroup
    layers: tuple[WeightGroup, ...]
    buffer_bytes: int


def take_inventory(
    root: nn.Module,
    block_lists: Sequence[BlockList],
    mappings: Sequence[FileMapping],
    device_dtypes: Mapping[str, torch.dtype] | None = None,
) -> Inventory:
    """Find every parameter, its owner and its home.

    A weight held by two layers (or by a layer and the rest) belongs to the base, which stays
    resident: with one owner it can have one state. So does one whose bytes are another layer's
    too. Identity is that of the Parameter object, never of its data pointer, which is 0 for every
    empty and every meta tensor.

    Raises: ConfigError if a weight has no data or is not on the CPU.
    """
    layers = [layer for block_list in block_lists for layer in block_list.layers]
    owners = _owners(layers_modules=[layer.module for layer in layers])
    found: dict[int, Weight] = {}
    keys_of: dict[int, list[int]] = {}
    holders: dict[int, set[int | None]] = {}
    for name, site, parameter in _parameters(root):
        if id(parameter) in keys_of:
            # The inner tensors of a wrapper share one list.
            found[keys_of[id(parameter)][0]].sites.append(site)
        else:
            used = (device_dtypes or {}).get(name, parameter.dtype)
            weights = _weights(name, site, parameter, mappings, used)
            keys_of[id(parameter)] = [id(weight.home) for weight in weights]
            found.update((id(weight.home), weight) for weight in weights)
        held_by = owners.get(id(site.module), {None})
        for key in keys_of[id(parameter)]:
            holders.setdefault(key, set()).update(held_by)
    members: dict[int | None, list[Weight]] = {}
    staying: dict[str, list[str]] = {}
    single = {key: next(iter(held)) for key, held in holders.items() if len(held) == 1}
    overlapping = _overlapping(found, single)
    for key, weight in found.items():
        reason = weight.refusal
        if key not in single:
            reason = reason or "shared by several layers"
        if key in overlapping:
            reason = reason or "another layer has the same bytes"
        if reason:
            staying.setdefault(reason, []).append(weight.name)
        members.setdefault(None if reason else single[key], []).append(weight)
    base = _group(BASE_NAME, None, members.get(None, []))
    base.notes.extend(_staying_note(reason, names) for reason, names in staying.items())
    groups = (
        _group(layer.name, layer.module, members.get(index, []))
        for index, layer in enumerate(layers)
    )
    buffer_bytes = sum(tensor_bytes(buffer) for buffer in root.buffers())
    return Inventory(base, tuple(groups), buffer_bytes)


def _staying_note(reason: str, names: Sequence[str]) -> str:
    """Short, however many they are: it is in every answer of the status."""
    shown = ", ".join(shortened(name, _NAME_CHARACTERS) for name in names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    if more > 0:
        shown = f"{shown} and {more} more"
    verb = "stays" if len(names) == 1 else "stay"
    return f"{shown} {verb} on the device: {reason}"


def _overlapping(found: Mapping[int, Weight], owners: Mapping[int, int | None]) -> set[int]:
    """Keys of weights to take from their layers so that no two layers have bytes in common: each
    page is locked at most once."""
    taken: set[int] = set()
    by_address = sorted(
        (key for key in owners if owners[key] is not None and found[key].extent.size_bytes),
        key=lambda key: found[key].extent.address,
    )
    while True:
        more: set[int] = set()
        furthest: int | None = None
        for key in by_address:
            if key in taken:
                continue
            extent = found[key].extent
            if furthest is not None:
                overlap = extent.address < _end(found[furthest].extent)
                if overlap and owners[key] != owners[furthest]:
                    more |= {key, furthest}
            if furthest is None or _end(extent) >= _end(found[furthest].extent):
                furthest = key
        if not more:
            return taken
        taken |= more


def _end(extent: Extent) -> int:
    return extent.address + extent.size_bytes


def _owners(layers_modules: Sequence[nn.Module]) -> dict[int, set[int | None]]:
    owners: dict[int, set[int | None]] = {}
    for index, layer in enumerate(layers_modules):
        for module in layer.modules():
            owners.setdefault(id(module), set()).add(index)
    return owners


def _parameters(root: nn.Module) -> Iterator[tuple[str, Site, nn.Parameter]]:
    # ``_parameters`` and not named_parameters(): the latter drops the second name of a tied weight.
    for module_name, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{module_name}.{attribute}" if module_name else attribute
                yield name, Site(module, attribute), parameter


def _weights(
    name: str,
    site: Site,
    parameter: nn.Parameter,
    mappings: Sequence[FileMapping],
    used: torch.dtype,
) -> list[Weight]:
    """The parameter as one weight, or a wrapper as one for each of its inner tensors."""
    inner: dict[Path, torch.Tensor] = {(): parameter}
    if is_wrapper(parameter):
        inner = dict(inner_tensors(parameter))
    if any(tensor.device.type == "meta" for tensor in inner.values()):
        raise ConfigError(f"weight {name} has no data (it is on the meta device); load it first")
    refusal = _refusal(parameter, inner)
    if refusal:
        loose = sum(tensor_bytes(t) for t in inner.values() if not _mapping_of(t, mappings))
        nowhere = Extent(0, 0)
        one = Weight(name, parameter, [site], nowhere, None, refusal, parameter.dtype)
        return [replace(one, loose_bytes=loose)]
    if not is_wrapper(parameter):
        if parameter.device.type != "cpu":
            raise ConfigError(
                f"weight {name} is on {parameter.device}; move the model to the CPU first"
            )
        used = used if _is_recodable(parameter.dtype, used) else parameter.dtype
        return [_weight(name, parameter, [site], mappings, used)]
    sites = [site]
    wrapper = Wrapper(parameter, sites, Recipe.of(parameter), frozenset(inner))
    weights = []
    for place, tensor in inner.items():
        home = nn.Parameter(tensor, requires_grad=False)
        inner_name = ".".join((name, *place))
        weight = _weight(inner_name, home, sites, mappings, home.dtype)
        weights.append(replace(weight, wrapper=wrapper, place=place))
    return weights


def _weight(
    name: str,
    home: nn.Parameter,
    sites: list[Site],
    mappings: Sequence[FileMapping],
    used: torch.dtype,
) -> Weight:
    extent = Extent(home.data_ptr(), span_bytes(home))
    return Weight(name, home, sites, extent, _mapping_of(home, mappings), "", used)


def _mapping_of(tensor: torch.Tensor, mappings: Sequence[FileMapping]) -> FileMapping | None:
    address = tensor.data_ptr()
    return next((mapping for mapping in mappings if mapping.holds(address)), None)


def _is_recodable(stored: torch.dtype, used: torch.dtype) -> bool:
    # Elements of 2 bytes and more: of the 8-bit floats torch converts only some into each other.
    same = stored.itemsize == used.itemsize > 1
    return same and stored.is_floating_point and used.is_floating_point


def _refusal(parameter: nn.Parameter, inner: Mapping[Path, torch.Tensor]) -> str:
    """Why it cannot travel as the flat bytes of ``inner``; "" if it can."""
    if not is_wrapper(parameter):
        if type(parameter.data) is not torch.Tensor or type(parameter) is not nn.Parameter:
            return f"{type(parameter.data).__name__} cannot be taken apart and moves as a whole"
        return flat_refusal(parameter)
    if any(tensor.device.type != "cpu" for tensor in inner.values()):
        return "what it holds is not in host memory"
    return refusal_of(parameter) or next(filter(None, map(flat_refusal, inner.values())), "")


def _page_runs(weights: Sequence[Weight]) -> Iterator[PageRun]:
    spans: list[tuple[FileMapping, int, int]] = []
    copies_end = 0
    for weight in weights:
        start, end = weight.extent.address, _end(weight.extent)
        if weight.mapping is None:
            # Where two weights are over the same bytes, those of the first; the rest goes unlocked.
            if start >= copies_end:
                first, size = whole_pages(start, end, PAGE_BYTES)
                yield PageRun(first, size, weight.home.detach(), None)
            copies_end = max(copies_end, end)
        elif spans and spans[-1][0] is weight.mapping and spans[-1][2] >= start:
            spans[-1] = (weight.mapping, spans[-1][1], max(end, spans[-1][2]))
        elif end > start:
            spans.append((weight.mapping, start, end))
    for mapping, start, end in spans:
        address, size = mapping.lockable_range(start - mapping.base_address, end - start)
        yield PageRun(address, size, mapping.owner, mapping)


def _group(name: str, module: nn.Module | None, weights: Sequence[Weight]) -> WeightGroup:
    movable = (weight for weight in weights if not weight.refusal)
    flat = tuple(sorted(movable, key=lambda weight: weight.extent.address))
    solid = tuple(weight for weight in weights if weight.refusal)
    return WeightGroup(name, module, flat, lay_out([w.extent for w in flat]), solid)
