"""What stays on the device: the base weights, the resident layers, the buffers."""

from __future__ import annotations

import torch
from torch import nn

from ..device import DeviceBackend, DeviceEvent
from .binder import Bindings, bind, make_bindings, unbind
from .source import LayerSource
from .weights import Weight, WeightGroup


class Resident:
    """One group on the device: its memory, its bindings and its solid weights.

    Made only when everything is there; a failed allocation or copy leaves nothing.
    Threads: the compute thread.
    """

    def __init__(self, group: WeightGroup, source: LayerSource, backend: DeviceBackend) -> None:
        self._backend = backend
        self._solid_bytes = group.solid_bytes
        self._memory = backend.allocate(group.layout.size_bytes)
        self._event: DeviceEvent = backend.ship(source.copies_into(self._memory), None)
        try:
            self._bindings: Bindings = make_bindings(group, self._memory)
            self._solid = Bindings(
                group.solid, tuple(_moved(weight, backend.device) for weight in group.solid)
            )
        except BaseException:
            backend.settle(self._event)  # the copies still write to memory that is about to go
            raise

    @property
    def size_bytes(self) -> int:
        """Device bytes held."""
        return self._memory.numel() + self._solid_bytes

    def onload(self) -> None:
        """Bind; work issued from here on sees the device weights."""
        self._backend.wait(self._event)
        bind(self._bindings)
        bind(self._solid)

    def offload(self) -> None:
        """Unbind, and return once nothing on the device reads the memory any more."""
        unbind(self._bindings)
        unbind(self._solid)
        self._backend.settle(self._event)
        self._backend.settle(self._backend.mark())


def move_buffers(root: nn.Module, device: torch.device) -> None:
    """Have every registered buffer on ``device``, values kept (they may change while running)."""
    # One tensor that two modules hold stays one: they see each other's changes to it.
    moved: dict[int, torch.Tensor] = {}
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]


def _moved(weight: Weight, device: torch.device) -> nn.Parameter:
    home = weight.home
    if home.device == device:
        return home
    # As one object: ``.data =`` on a wrapper subclass would swap its shell and leave what it holds.
    return nn.Parameter(home.detach().to(device), requires_grad=False)
