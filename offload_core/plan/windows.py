"""Which part of each layer streams. Arithmetic only.

Every layer may keep a part of its weights on the device; the rest, one contiguous *window* of its
weights in the order of their host addresses, streams through a slot. Let L be the sum of all
layers, S a slot, k the number of slots and B the room: what streams is L - B + k * S bytes, so the
fewest bytes stream where the slot is smallest, and it is smallest where every layer streams about
as much as every other. That also spreads the copies evenly over the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..values.units import align_up

_SEARCH_STEPS = 6
"""Guesses at the slot size. What the last one leaves goes to single weights; more of them would
only cost time (a plan of ten thousand weights takes less than 50 ms)."""

_SMALL_BYTES = 1 << 20
"""Edges of a window up to this size do not count as a layer's turn when room is given away."""


@dataclass(frozen=True)
class Window:
    """Weights ``first`` up to, not including, ``last`` of one layer stream; the others stay."""

    first: int
    last: int

    @property
    def is_empty(self) -> bool:
        """Nothing of the layer streams."""
        return self.first >= self.last

    def __contains__(self, index: int) -> bool:
        return self.first <= index < self.last


NOTHING = Window(0, 0)


@dataclass(frozen=True)
class Footprint:
    """How many device bytes an allocation really takes: large ones are rounded up."""

    large_bytes: int = 1
    granularity_bytes: int = 1

    def of(self, size_bytes: int) -> int:
        """What ``size_bytes`` cost."""
        if size_bytes < self.large_bytes:
            return size_bytes
        return align_up(size_bytes, self.granularity_bytes)


@dataclass(frozen=True)
class Streaming:
    """A window for each layer, and the slots that all of them fit."""

    windows: tuple[Window, ...]
    slots: int
    slot_bytes: int
    device_bytes: int
    """Resident parts and slots, as allocated."""


@dataclass(frozen=True)
class Held:
    """All of a layer but ``window`` is on the device already, in allocations of ``device_bytes``
    together, and stays there as it is."""

    window: Window
    device_bytes: int


def stream_least(
    layers: Sequence[tuple[int, ...]],
    slots: int,
    room_bytes: int,
    footprint: Footprint,
    held: Sequence[Held] | None = None,
) -> Streaming | None:
    """The windows that stream the fewest bytes with what fits in ``room_bytes``.

    Args:
        layers: device bytes of each layer's weights, in the order of their host addresses.
        slots: how many slots there are to be, at least 1; fewer if fewer layers stream.
        held: of each layer, if windows may only become smaller: what leaves one is an allocation
            of its own, and nothing that is there has to move.
    Returns: None if even slots of the size that leaves the least resident do not fit.
    """
    fitting = _Fitting(layers, slots, footprint, held)
    whole = fitting.streaming([NOTHING] * len(layers))
    if whole.device_bytes <= room_bytes or not layers:
        return whole if whole.device_bytes <= room_bytes else None
    # Beyond the k-th largest layer a larger slot costs more than it takes off the device.
    high = sorted(fitting.largest_sizes(), reverse=True)[: max(1, slots)][-1]
    best = fitting.with_slot(high)
    if best.device_bytes > room_bytes:
        return None
    low, low_bytes = 0, whole.device_bytes
    for _ in range(_SEARCH_STEPS):
        # The device bytes fall about in proportion to the slot: guess by that, and a little high,
        # since a slot that fits is what is looked for.
        share = (low_bytes - room_bytes) / max(1, low_bytes - best.device_bytes)
        middle = low + int((high - low) * min(0.98, max(0.02, share * 1.002)))
        if middle in (low, high):
            break
        found = fitting.with_slot(middle)
        if found.device_bytes <= room_bytes:
            best, high = found, middle
        else:
            low, low_bytes = middle, found.device_bytes
    return fitting.filled(best, room_bytes)


@dataclass(eq=False)
class _Shape:
    """``sums`` are running sums of a layer's weights, one more than there are weights; a window
    lies within ``limits``, and what lies outside of those takes ``outside_bytes`` (None: it is one
    allocation with the rest of what stays)."""

    sums: tuple[int, ...]
    limits: Window
    outside_bytes: int | None

    @property
    def most_bytes(self) -> int:
        """Of a window."""
        return self.sums[self.limits.last] - self.sums[self.limits.first]

    def resident_bytes(self, streamed_bytes: int, footprint: Footprint) -> int:
        """What stays, as allocated, when so many bytes stream."""
        if self.outside_bytes is None:
            return footprint.of(self.sums[-1] - streamed_bytes)
        return self.outside_bytes + footprint.of(self.most_bytes - streamed_bytes)


def _shape_of(layer: tuple[int, ...], held: Held | None) -> _Shape:
    sums = (0, *accumulate(layer))
    if held is None:
        return _Shape(sums, Window(0, len(layer)), None)
    return _Shape(sums, held.window, held.device_bytes)


class _Fitting:
    """The layers under search. Layers of the same shape share one answer."""

    def __init__(
        self,
        layers: Sequence[tuple[int, ...]],
        slots: int,
        footprint: Footprint,
        held: Sequence[Held] | None,
    ) -> None:
        self._slots = slots
        self._footprint = footprint
        keys = list(zip(layers, held or (None,) * len(layers), strict=True))
        shapes = {key: _shape_of(*key) for key in keys}
        self._layers = [shapes[key] for key in keys]
        self._shapes = list(shapes.values())

    def largest_sizes(self) -> list[int]:
        """The most that each layer can stream."""
        return [layer.most_bytes for layer in self._layers]

    def with_slot(self, slot_bytes: int) -> Streaming:
        """Each layer's largest window that fits ``slot_bytes``."""
        largest = {id(shape): _largest_window(shape, slot_bytes) for shape in self._shapes}
        return self.streaming([largest[id(layer)] for layer in self._layers])

    def streaming(self, windows: Sequence[Window]) -> Streaming:
        """What these windows cost."""
        resident, sizes = 0, []
        for layer, window in zip(self._layers, windows, strict=True):
            size = layer.sums[window.last] - layer.sums[window.first]
            resident += layer.resident_bytes(size, self._footprint)
            if not window.is_empty:
                sizes.append(size)
        slots = min(self._slots, len(sizes))
        slot_bytes = max(sizes, default=0)
        device = resident + slots * self._footprint.of(slot_bytes)
        return Streaming(tuple(windows), slots, slot_bytes, device)

    def filled(self, streaming: Streaming, room_bytes: int) -> Streaming:
        """Give what is left of the room to weights at the edges of windows, evenly spread."""
        windows = list(streaming.windows)
        order = sorted(range(len(windows)), key=_scatter)
        found, before = streaming, None
        while found != before:
            left = room_bytes - found.device_bytes
            for index in order:
                smaller, cost = self._narrowed(index, windows[index], left)
                windows[index] = smaller
                left -= cost
            # Narrower windows may have made the slots smaller, which leaves more.
            before, found = found, self.streaming(windows)
        return found

    def _narrowed(self, index: int, window: Window, left: int) -> tuple[Window, int]:
        """``window`` less the larger of its edges that ``left`` bytes allow, and what that costs;
        edges go on falling while they are too small to matter."""
        layer, of = self._layers[index], self._footprint
        sums, first, last = layer.sums, window.first, window.last
        before = layer.resident_bytes(sums[last] - sums[first], of)
        spent = 0
        while first < last:
            head, tail = sums[first + 1] - sums[first], sums[last] - sums[last - 1]
            edges = sorted([(head, first + 1, last), (tail, first, last - 1)], reverse=True)
            affordable = [
                (size, cost, start, end)
                for size, start, end in edges
                if (cost := layer.resident_bytes(sums[end] - sums[start], of) - before) <= left
            ]
            if not affordable:
                break
            size, spent, first, last = affordable[0]
            if size > _SMALL_BYTES:
                break
        return Window(first, last), spent


def _largest_window(shape: _Shape, limit_bytes: int) -> Window:
    """The run of weights with the most bytes up to ``limit_bytes``, the first of those."""
    sums, first = shape.sums, shape.limits.first
    size = best_first = best_last = 0
    start = sums[first]
    for last in range(first, shape.limits.last + 1):
        end = sums[last]
        while end - start > limit_bytes:
            first += 1
            start = sums[first]
        if end - start > size:
            size, best_first, best_last = end - start, first, last
    return Window(best_first, best_last)


def _scatter(index: int) -> float:
    """A place in [0, 1) for each index such that every prefix is spread evenly (van der Corput)."""
    place, weight = 0.0, 0.5
    while index:
        place += weight * (index & 1)
        index >>= 1
        weight /= 2
    return place
