"""What stays on the device: the base weights, the resident layers and parts of layers, buffers."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import nn

from ..device import DeviceBackend, DeviceEvent
from .binder import Bindings, bind, make_bindings, unbind
from .checking import check_arrival
from .patches import Patches, WeightPatch
from .source import LayerSource, transfer_error
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
        patches: Patches,
        self_check: bool = False,
    ) -> None:
        self.group = group
        self._self_check = self_check
        self._source = source
        self._backend = backend
        self._patches = patches
        self._patched_with: tuple[WeightPatch | None, ...] = ()
        self._is_renewing = False
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
        self._ship()

    def _ship(self) -> None:
        assert self._memory is not None
        pieces = self._source.copies_into(self._memory, self.group, lock=False)
        more = self._patches.pieces(self.group.weights)
        # The memory may have been somebody's until now, whose work is still to be done.
        ready = self._backend.mark()
        self._shipment = self._backend.ship([*pieces, *more], ready)

    def bind(self) -> None:
        """Wait until the copies are issued; work from here on sees the device weights."""
        assert self._memory is not None
        flat = make_bindings(self.group, self._memory)
        self._receive(flat)
        moved = tuple(_moved(weight, self._backend.device) for weight in self.group.solid)
        self._bindings = [flat, Bindings(self.group.solid, moved)]
        self.put_on()

    def put_on(self) -> None:
        """Have the device's weights in place, unless they are stale."""
        if self.is_stale:
            return
        for bindings in self._bindings:
            bind(bindings, self._patches)

    def take_off(self) -> None:
        """Have the homes in place; the device keeps its weights."""
        for bindings in self._bindings:
            unbind(bindings, self._patches)

    @property
    def is_stale(self) -> bool:
        """Whether a weight is patched otherwise than it should be by now."""
        should = self._patches.of(self.group.weights)
        return any(a is not b for a, b in zip(should, self._patched_with, strict=True))

    def begin_renewal(self) -> None:
        """Start to bring the clean bytes once more; homes are in place until ``end_renewal``."""
        if not self._is_renewing:
            self.let_shipment_end()
            self._ship()
            self._is_renewing = True

    def end_renewal(self) -> None:
        """Have the weights patched as they should be by now, and in place.

        Raises: TransferError; the weights are stale then, and a next call brings them again.
        """
        self.begin_renewal()
        self._is_renewing = False
        assert self._shipment is not None
        error = self._shipment.exception()
        if error is not None:
            raise transfer_error(self._source, error) from error
        self._receive(self._bindings[0])
        self.put_on()

    def _receive(self, flat: Bindings) -> None:
        """Wait until the copies are issued, and have the bytes as the model is to use them."""
        assert self._memory is not None
        assert self._shipment is not None
        self._backend.wait(self._shipment.result())
        self._backend.recode(self.group.recodes(self._memory))
        if self._self_check:
            check_arrival(self.group, self._memory)
        self._patches.arrived(flat.weights)
        self._patches.apply(flat.weights, flat.parameters, stay=True)
        self._patched_with = self._patches.of(self.group.weights)

    def offload(self) -> None:
        """Unbind, and return once nothing on the device reads or writes the memory any more."""
        # Forgotten once all is undone: an error in between leaves what a next call needs.
        self.take_off()
        if self._shipment is not None:
            self.let_shipment_end()
            self._backend.settle(self._backend.mark())
        self._bindings, self._shipment, self._memory = [], None, None
        self._is_renewing = False

    def let_shipment_end(self) -> None:
        """Wait until nothing is copied into the memory any more."""
        # An error is whoever began this one's to hear of; here it only must be over.
        if self._shipment is not None and self._shipment.exception() is None:
            self._backend.settle(self._shipment.result())


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
