"""What is done to weights where they arrive on the device: patches, such as a LoRA, merged there.

A weight comes clean from its home each time. What streams is patched on each arrival, what stays
is patched once, and brought anew when its patch changes. So a patched weight on the device has the
bits of one that was merged once, and the home keeps the bits of the file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..device import CopyPiece, DeviceBackend, DeviceEvent, LowRank
from ..plan import ALIGNMENT
from ..values import align_up
from .weights import Weight


class WeightPatch(Protocol):
    """What one weight becomes. Two patches are the same if they are the same object.

    Threads: the compute thread.
    """

    tensors: Sequence[torch.Tensor]
    """What it needs on the device: contiguous, on the CPU. They travel with the weight, and stay
    while it streams."""

    def low_rank(self, weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> LowRank | None:
        """The whole patch as one update of ``weight``, which is clean and on the device; None if it
        is more than that. ``tensors`` are its own, on the device."""

    def apply(self, weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Patch ``weight``, which is clean and on the device, in place."""


@dataclass(frozen=True)
class Companion:
    """An attribute of a module that has one value while a weight is at home and another one while
    its patched form is on the device."""

    module: nn.Module
    name: str
    at_home: Any
    on_device: Any


@dataclass(frozen=True)
class PatchedWeight:
    """A patch and what changes with its weight's place."""

    patch: WeightPatch
    companions: tuple[Companion, ...] = ()


_MOST_LEAVING = 2
"""Groups of weights whose patches are freed later, so that the host need not wait for them now."""

NOTHING: Mapping[Weight, PatchedWeight] = {}


@dataclass(eq=False)
class _Held:
    """A patch's tensors on the device; before they have arrived, only the room for them."""

    memory: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    arrived: bool = False


class Patches:
    """The patches in force, by weight. They change between runs only.

    Threads: the compute thread; the byte counts may be read by any.
    """

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._by_weight: Mapping[Weight, PatchedWeight] = NOTHING
        self.device_bytes = 0
        """What patches are to be left on the device: enough if all their weights stream."""
        self._wanted_bytes = 0
        self._held: dict[Weight, _Held] = {}
        self._leaving: deque[tuple[DeviceEvent, list[_Held]]] = deque()
        self.held_bytes = 0
        """What all patches together hold on the device now."""

    def replace(self, by_weight: Mapping[Weight, PatchedWeight]) -> None:
        """These from now on. What is on the device is not touched: see ``of``."""
        changed = [
            weight
            for weight, now in self._by_weight.items()
            if weight not in by_weight or by_weight[weight].patch is not now.patch
        ]
        self._let_go(changed)
        # Replaced whole: another thread may be reading the one of before.
        self._by_weight = dict(by_weight)
        self._wanted_bytes = sum(_room(one.patch.tensors) for one in by_weight.values())
        self.device_bytes = self._wanted_bytes

    def take_memory(self) -> None:
        """A budget is tried: it may have room for what patches hold."""
        self.device_bytes = self._wanted_bytes

    def do_without_memory(self) -> bool:
        """The budget has no room for it: what patches need is moved when it is needed from now on,
        from the room for activations, which takes longer. Returns: whether that saves anything."""
        saves, self.device_bytes = self.device_bytes > 0, 0
        return saves

    def of(self, weights: Iterable[Weight]) -> tuple[WeightPatch | None, ...]:
        """What these weights are patched with, to be compared later."""
        found = (self._by_weight.get(weight) for weight in weights)
        return tuple(None if one is None else one.patch for one in found)

    def pieces(self, weights: Iterable[Weight]) -> list[CopyPiece]:
        """What has to be copied besides these weights so that they can be patched: nothing where it
        is on the device. The copies may begin once all work issued so far is done."""
        found: list[CopyPiece] = []
        for weight in weights if self.device_bytes else ():
            patched, held = self._by_weight.get(weight), self._held.get(weight)
            if patched is None or (held is not None and held.arrived):
                continue
            if held is None:
                held = self._held[weight] = self._room_for(patched.patch.tensors)
                self.held_bytes += held.memory.numel()
            for source, there in zip(patched.patch.tensors, held.tensors, strict=True):
                if source.numel():
                    found.append(CopyPiece(_bytes(there), _bytes(source), locked=False))
        return found

    def arrived(self, weights: Iterable[Weight]) -> None:
        """What ``pieces`` gave for these weights is on the device, and waited for."""
        for weight in weights:
            if weight in self._held:
                self._held[weight].arrived = True

    def apply(
        self, weights: Sequence[Weight], parameters: Sequence[nn.Parameter], stay: bool
    ) -> None:
        """Patch what has just arrived, and is clean, in place.

        Args:
            parameters: over the device's memory, in the order of ``weights``.
            stay: whether they stay. The patches' own memory may go then.
        """
        if not self._by_weight:
            return
        updates: list[LowRank] = []
        for weight, parameter in zip(weights, parameters, strict=True):
            patched = self._by_weight.get(weight)
            if patched is None:
                continue
            tensors = self._on_device(weight, patched.patch)
            update = patched.patch.low_rank(parameter.detach(), tensors)
            if update is None:
                patched.patch.apply(parameter.detach(), tensors)
            else:
                updates.append(update)
        if updates:
            self._backend.add_low_rank(updates)
        if stay:
            self._let_go(weights)

    def end_pass(self) -> None:
        """Free what is only waiting to be freed. Nothing is, from the second pass on."""
        while self._leaving:
            self._free_oldest()

    def release(self) -> None:
        """Leave the device. Nothing may be shipping."""
        self._let_go(list(self._held))
        self.end_pass()

    def _on_device(self, weight: Weight, patch: WeightPatch) -> Sequence[torch.Tensor]:
        held = self._held.get(weight)
        if held is not None and held.arrived:
            return held.tensors
        # There is no room to keep them, or the weight was under way before the patch was known.
        return [tensor.to(self._backend.device) for tensor in patch.tensors]

    def _room_for(self, tensors: Sequence[torch.Tensor]) -> _Held:
        memory = self._backend.allocate(_room(tensors))
        views, offset = [], 0
        for tensor in tensors:
            flat = memory[offset : offset + tensor.nbytes].view(tensor.dtype)
            views.append(flat.view(tensor.shape))
            offset += align_up(tensor.nbytes, ALIGNMENT)
        return _Held(memory, tuple(views))

    def _let_go(self, weights: Iterable[Weight]) -> None:
        """Free what these hold once the work that reads it is done. Waits for such work of a while
        ago, or a first pass would pile it up."""
        found = [held for w in weights if (held := self._held.pop(w, None)) is not None]
        if found:
            self._leaving.append((self._backend.mark(), found))
        while len(self._leaving) > _MOST_LEAVING:
            self._free_oldest()

    def _free_oldest(self) -> None:
        event, found = self._leaving[0]
        self._backend.settle(event)
        self._leaving.popleft()
        self.held_bytes -= sum(held.memory.numel() for held in found)

    def place(self, weight: Weight, at_home: bool) -> None:
        """The weight was put in place on the device, or its home was put back."""
        patched = self._by_weight.get(weight)
        if patched is not None:
            for one in patched.companions:
                setattr(one.module, one.name, one.at_home if at_home else one.on_device)


def _room(tensors: Iterable[torch.Tensor]) -> int:
    return sum(align_up(tensor.nbytes, ALIGNMENT) for tensor in tensors)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
