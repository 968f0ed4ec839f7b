"""What is done to weights where they arrive on the device: patches, such as a LoRA, merged there.

A weight comes clean from its home each time. What streams is patched on each arrival, what stays
is patched once, and brought anew when its patch changes. So a patched weight on the device has the
bits of one that was merged once, and the home keeps the bits of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..device import DeviceBackend, LowRank
from .weights import Weight


class WeightPatch(Protocol):
    """What one weight becomes. Two patches are the same if they are the same object.

    Threads: the compute thread.
    """

    device_bytes: int
    """Device memory that the patch itself needs while its weight streams."""
    held_bytes: int
    """What it holds of that now."""

    def low_rank(self, weight: torch.Tensor) -> LowRank | None:
        """The whole patch as one update of ``weight``, which is clean and on the device; None if it
        is more than that."""

    def apply(self, weight: torch.Tensor) -> None:
        """Patch ``weight``, which is clean and on the device, in place."""

    def let_go(self) -> None:
        """Give up device memory: the weight was patched, and stays."""


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


NOTHING: Mapping[Weight, PatchedWeight] = {}


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

    @property
    def held_bytes(self) -> int:
        """What all patches together hold on the device now. Any thread."""
        return sum(one.patch.held_bytes for one in self._by_weight.values())

    def replace(self, by_weight: Mapping[Weight, PatchedWeight]) -> None:
        """These from now on. What is on the device is not touched: see ``of``."""
        for weight, now in self._by_weight.items():
            if by_weight.get(weight) is None or by_weight[weight].patch is not now.patch:
                now.patch.let_go()
        # Replaced whole: another thread may be reading the one of before.
        self._by_weight = dict(by_weight)
        self._wanted_bytes = sum(one.patch.device_bytes for one in by_weight.values())
        self.device_bytes = self._wanted_bytes

    def take_memory(self) -> None:
        """A budget is tried: it may have room for what patches hold."""
        self.device_bytes = self._wanted_bytes

    def do_without_memory(self) -> bool:
        """The budget has no room for it: what patches need is moved at each arrival from now on,
        which takes longer. Returns: whether anything is saved by that."""
        saves, self.device_bytes = self.device_bytes > 0, 0
        return saves

    def of(self, weights: Iterable[Weight]) -> tuple[WeightPatch | None, ...]:
        """What these weights are patched with, to be compared later."""
        found = (self._by_weight.get(weight) for weight in weights)
        return tuple(None if one is None else one.patch for one in found)

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
            update = patched.patch.low_rank(parameter.detach())
            if update is None:
                patched.patch.apply(parameter.detach())
            else:
                updates.append(update)
        if updates:
            self._backend.add_low_rank(updates)
        if stay or not self.device_bytes:
            for patch in self.of(weights):
                if patch is not None:
                    patch.let_go()

    def place(self, weight: Weight, at_home: bool) -> None:
        """The weight was put in place on the device, or its home was put back."""
        patched = self._by_weight.get(weight)
        if patched is not None:
            for one in patched.companions:
                setattr(one.module, one.name, one.at_home if at_home else one.on_device)
