"""What stays on the device: the base weights, the resident layers and parts of layers, buffers."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import nn

from ..device import DeviceBackend, DeviceEvent
from .binder import Bindings, bind, make_bindings, unbind
from .checking import check_arrival
from .source import LayerSource
from .weights import Weight, WeightGroup


class Resident:
    """One group on its way to the device, or there: its memory, its bindings, its solid weights.

    ``onload`` begins, ``bind`` ends it; several may be under way at once, so that their copies
    follow each other without a gap. ``offload`` undoes either from any state.

    Threads: the compute thread.
    """

    def __init__(
        self,
        group: WeightGroup,
        source: LayerSource,
        backend: DeviceBackend,
        self_check: bool = False,
    ) -> None:
        self.group = group
        self._self_check = self_check
        self._source = source
        self._backend = backend
        self._memory: torch.Tensor | None = None
        self._shipment: Future[DeviceEvent] | None = None
        self._bindings: list[Bindings] = []

    @property
    def size_bytes(self) -> int:
        """Device bytes held."""
        memory = self._memory
        return 0 if memory is None else memory.numel() + self.group.solid_bytes

    @property
    def unlocked_bytes(self) -> int:
        """Bytes that would have to be staged if the copies began now."""
        return self._source.unlocked_bytes(self.group)

    def onload(self) -> None:
        """Take the memory and start the copies. Raises: DeviceMemoryError, StateError."""
        self._memory = self._backend.allocate(self.group.layout.size_bytes)
        # The memory may have been somebody's until now, whose work is still to be done.
        ready = self._backend.mark()
        pieces = self._source.copies_into(self._memory, self.group, lock=False)
        self._shipment = self._backend.ship(pieces, ready)

    def bind(self) -> None:
        """Wait until the copies are issued; work from here on sees the device weights."""
        assert self._memory is not None
        assert self._shipment is not None
        event = self._shipment.result()
        self._backend.wait(event)
        self._backend.recode(self.group.recodes(self._memory))
        if self._self_check:
            check_arrival(self.group, self._memory)
        flat = make_bindings(self.group, self._memory)
        moved = tuple(_moved(weight, self._backend.device) for weight in self.group.solid)
        self._bindings = [flat, Bindings(self.group.solid, moved)]
        for bindings in self._bindings:
            bind(bindings)

    def offload(self) -> None:
        """Unbind, and return once nothing on the device reads or writes the memory any more."""
        # Forgotten once all is undone: an error in between leaves what a next call needs.
        for bindings in self._bindings:
            unbind(bindings)
        if self._shipment is not None:
            # An error is whoever began this one's to hear of; here it only must be over.
            if self._shipment.exception() is None:
                self._backend.settle(self._shipment.result())
            self._backend.settle(self._backend.mark())
        self._bindings, self._shipment, self._memory = [], None, None


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
