"""Streaming: which layer gets which slot, and what to prefetch next. All on the compute thread.

One slot goes through: free, filling (an order is out), filled, in use, free again. The order that
fills a slot again carries the event of the slot's last reader, so the copy waits for the compute
on the device and nobody waits on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..device import POISON, DeviceBackend, DeviceEvent
from ..values import LAYER_MOVES, EngineConfig, LayerState, StateError, TrafficRecord, TransferError
from .binder import Bindings, bind, make_bindings, unbind
from .checking import check_arrival
from .courier import Courier, Order
from .patches import Patches
from .source import LayerSource
from .weights import WeightGroup


@dataclass(eq=False)
class Slot:
    """One reusable device buffer. ``layer`` and ``order`` are None exactly when it is free.

    ``left_over``: its order was still out when the run that gave it ended.
    """

    memory: torch.Tensor
    layer: int | None = None
    order: Order | None = None
    released: DeviceEvent | None = None
    left_over: bool = False
    bindings: dict[int, Bindings] = field(default_factory=dict)


class LayerStream:
    """The slots of one engine and the policy over them.

    A wrong prediction costs a wait, never a wrong weight: a layer is bound only after its own
    order has been collected. A layer that is still in use when the next begins may have called it,
    or was left by an exception that reached no hook; either way it keeps its slot while another
    can be had, and ``finish`` sweeps what is left.

    Threads: the compute thread. ``states`` and ``traffic`` may be read by any.
    """

    def __init__(
        self,
        layers: int,
        sources: Sequence[LayerSource],
        backend: DeviceBackend,
        courier: Courier,
        config: EngineConfig,
        patches: Patches,
    ) -> None:
        self.states = [LayerState.ABSENT] * layers
        self.traffic = TrafficRecord()
        self.interrupt: Callable[[], None] | None = None
        self._sources = sources
        self._backend = backend
        self._courier = courier
        self._patches = patches
        self._poll_seconds = config.interrupt_poll_seconds
        self._poison = config.switches.poison
        self._self_check = config.switches.self_check
        self._slots: list[Slot] = []
        self._parts: Mapping[int, WeightGroup] = {}
        self._streamed: tuple[int, ...] = ()
        self._successor: dict[int, int] = {}
        self._last: int | None = None

    @property
    def slot_bytes(self) -> int:
        """Device bytes of all slots."""
        return sum(slot.memory.numel() for slot in self._slots)

    def streams(self, index: int) -> bool:
        """Whether a part of layer ``index`` comes anew each pass."""
        return index in self._parts

    def open(self, parts: Mapping[int, WeightGroup], memories: Sequence[torch.Tensor]) -> None:
        """Stream these parts of layers through these buffers, each large enough for any of them."""
        assert not self._slots, "close first"
        self._slots = [Slot(memory) for memory in memories]
        for slot in self._slots:
            # The memory may have been somebody's until now, whose work is still to be done.
            slot.released = self._backend.mark()
        self._parts = dict(parts)
        self._streamed = tuple(sorted(parts))
        self._successor.clear()  # may name layers that no longer stream
        self._last = None

    def close(self) -> None:
        """Take everything off the slots and let them go once no copy or kernel touches them."""
        self.settle_orders()
        self.finish()
        for slot in self._slots:
            if slot.released is not None:
                self._backend.settle(slot.released)
            slot.bindings.clear()
        self._slots = []
        self._parts = {}
        self._streamed = ()

    def settle_orders(self) -> None:
        """Wait until no order is out. Raises: StateError if the courier is stuck; all is kept."""
        self._call_off()
        for slot in self._slots:
            order = slot.order
            if order is not None and not order.finished.wait(self._courier.patience_seconds):
                raise StateError(self._courier.stuck_text())

    def acquire(self, index: int) -> None:
        """Have layer ``index`` on the device and bound. Raises: TransferError, or the interrupt."""
        if self.states[index] is LayerState.IN_USE:
            return  # left by an exception that reached no hook: its bytes and bindings stand
        for left in self._slots:
            if self._is_half_freed(left):
                self._free(left)
        slot = self._slot_of(index)
        if slot is not None and self._is_lost(slot):
            self._discard(slot)
            slot = None
        hit = slot is not None
        if slot is None:
            slot = self._take_slot()
            self._ship(index, slot)
        self._count(prefetch_hits=int(hit), prefetch_misses=int(not hit))
        # Before the wait, not after: the other slot's copy is to be queued behind this one.
        self._learn(index)
        self._prefetch(index)
        self._collect(slot, index)

    def release(self, index: int) -> None:
        """The layer's work has been issued; its slot is free once that work is done."""
        slot = self._slot_of(index)
        if slot is None or self.states[index] is not LayerState.IN_USE:
            return  # swept already, for a layer that it called when there was one slot
        self._free(slot)
        self._prefetch(index)

    def wind_down(self) -> None:
        """End of a run that went well: wait for the copy under way. Raises: the interrupt.

        Nothing may read the file between runs: whoever truncated it then would end the process
        with SIGBUS.
        """
        self._call_off()
        for slot in self._slots:
            if slot.order is not None:
                slot.order.wait(self.interrupt, self._poll_seconds)

    def finish(self) -> None:
        """End of any run: nothing stays in use, and prefetches nobody came for are dropped.

        Never waits for the courier (a cancel must not hang on a slow drive): an order under way
        keeps its slot, and is collected by the next run or waited for by ``close``.
        """
        self._sweep()
        self._call_off()
        for slot in self._slots:
            if slot.order is not None and slot.order.finished.is_set():
                self._discard(slot)

    def _collect(self, slot: Slot, index: int) -> None:
        assert slot.order is not None
        if self.states[index] is LayerState.LOADING:
            try:
                # An interrupt leaves the order running and its slot filling: the copy may still
                # be under way, and the layer is what the next run begins with anyway.
                event = slot.order.collect(self.interrupt, self._poll_seconds)
                # Waited for before anything may free the slot: a copy may still be filling it.
                self._backend.wait(event)
            except TransferError:
                self._free(slot)
                raise
            try:
                self._receive(slot, index)
            except BaseException:
                # Whatever it was, nothing may be done to these bytes a second time.
                self._free(slot)
                raise
            self._move(index, LayerState.READY)
        bind(slot.bindings[index], self._patches)
        self._move(index, LayerState.IN_USE)

    def _receive(self, slot: Slot, index: int) -> None:
        """The bytes are there; have them as the model is to use them."""
        part = self._parts[index]
        self._patches.arrived(part.weights)
        self._backend.recode(part.recodes(slot.memory))
        if self._self_check:
            check_arrival(part, slot.memory)
        if index not in slot.bindings:
            slot.bindings[index] = make_bindings(part, slot.memory)
        bindings = slot.bindings[index]
        self._patches.apply(bindings.weights, bindings.parameters, stay=False)

    def _ship(self, index: int, slot: Slot) -> None:
        part = self._parts[index]
        memory = slot.memory[: part.layout.size_bytes]
        ahead = self._expected(index, 1)
        more = self._patches.pieces(part.weights)
        # Memory that was just taken may be read by work that is still to be done.
        after = self._backend.mark() if more else slot.released
        order = Order(self._sources[index], part, memory, after, more=more)
        if ahead and ahead[0] != index and not self._slot_of(ahead[0]):
            order.ahead = (self._sources[ahead[0]], self._parts[ahead[0]])
        self._courier.ship(order)
        slot.layer, slot.order, slot.released, slot.left_over = index, order, None, False
        self._move(index, LayerState.LOADING)
        self._count(layers_shipped=1, shipped_bytes=part.size_bytes)

    def _free(self, slot: Slot) -> None:
        """Take the layer off. After an error it is half-freed; a next call goes on with it."""
        assert slot.layer is not None
        if not self._is_half_freed(slot):
            self._move(slot.layer, LayerState.RELEASING)
        if slot.layer in slot.bindings:
            unbind(slot.bindings[slot.layer], self._patches)
        if self._poison:
            slot.memory.fill_(POISON)
        slot.released = self._backend.mark()
        if slot.order is not None:
            # The traceback of a failed order holds the order: a cycle that would keep its memory.
            slot.order.error = None
        if self.states[slot.layer] is not LayerState.ABSENT:
            self._move(slot.layer, LayerState.ABSENT)
        slot.layer, slot.order = None, None

    def _discard(self, slot: Slot) -> None:
        """Drop a prefetch: its copies must have been issued before the slot is given away."""
        assert slot.order is not None
        slot.order.wait(self.interrupt, self._poll_seconds)
        if slot.order.event is not None:
            self._backend.wait(slot.order.event)
        self._free(slot)
        self._count(prefetches_discarded=1)

    def _is_lost(self, slot: Slot) -> bool:
        """Whether it has an order of an earlier run that was dropped, or failed: not our error."""
        if not slot.left_over or slot.order is None:
            return False
        slot.order.wait(self.interrupt, self._poll_seconds)
        return slot.order.event is None

    def _call_off(self) -> None:
        for slot in self._slots:
            if slot.order is not None and not slot.order.finished.is_set():
                slot.order.called_off = True
                slot.left_over = True

    def _take_slot(self) -> Slot:
        """A free slot, or the one whose prefetched layer is expected last."""
        for slot in self._slots:
            if slot.layer is None:
                return slot
        if not self._slots:
            raise StateError("a layer ran while nothing was loaded to stream it; load first")
        prefetched = [slot for slot in self._slots if not self._is_in_use(slot)]
        if not prefetched:
            self._sweep()
            return self._slots[0]
        expected = self._expected(self._last, len(self._streamed))
        victim = max(
            prefetched,
            key=lambda slot: expected.index(slot.layer) if slot.layer in expected else 1 << 30,
        )
        self._discard(victim)
        return victim

    def _prefetch(self, index: int) -> None:
        free = [slot for slot in self._slots if slot.layer is None]
        if not free:
            return
        here = {slot.layer for slot in self._slots}
        for expected in self._expected(index, len(self._slots)):
            if not free:
                return
            if expected not in here:
                self._ship(expected, free.pop())

    def _expected(self, index: int | None, count: int) -> list[int]:
        """The next ``count`` layers after ``index``, as they came last time."""
        if index is None or not self._streamed:
            return list(self._streamed[:count])
        chain: list[int] = []
        for _ in range(count):
            index = self._successor.get(index, self._next_in_order(index))
            if index not in chain:
                chain.append(index)
        return chain

    def _next_in_order(self, index: int) -> int:
        later = (streamed for streamed in self._streamed if streamed > index)
        return next(later, self._streamed[0])

    def _learn(self, index: int) -> None:
        if self._last is not None:
            self._successor[self._last] = index
        self._last = index

    def _sweep(self) -> None:
        for slot in self._slots:
            if self._is_in_use(slot) or self._is_half_freed(slot):
                self._free(slot)

    def _is_in_use(self, slot: Slot) -> bool:
        return slot.layer is not None and self.states[slot.layer] is LayerState.IN_USE

    def _is_half_freed(self, slot: Slot) -> bool:
        """An error, or Ctrl-C, came while its layer was taken off it or had only been given it."""
        half = (LayerState.RELEASING, LayerState.ABSENT)
        return slot.layer is not None and self.states[slot.layer] in half

    def _slot_of(self, index: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.layer == index), None)

    def _move(self, index: int, state: LayerState) -> None:
        assert state in LAYER_MOVES[self.states[index]], (index, self.states[index], state)
        self.states[index] = state

    def _count(self, **more: int) -> None:
        # Replaced whole, so a reader on another thread sees one moment or the next.
        now = self.traffic
        self.traffic = replace(
            now, **{name: getattr(now, name) + amount for name, amount in more.items()}
        )
