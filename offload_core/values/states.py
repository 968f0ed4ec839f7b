"""The states of things, each with the moves it may make. No state is ever a string."""

from __future__ import annotations

import enum


class Placement(enum.Enum):
    """Where a layer's weights rest between two uses."""

    RESIDENT = "resident"
    """On the device until offloaded; costs its device bytes all the time."""
    PINNED = "pinned"
    """Streamed from page-locked host memory; costs locked host bytes."""
    MAPPED = "mapped"
    """Streamed from the page cache of the checkpoint file; costs no host memory of our own."""
    PAGEABLE = "pageable"
    """Streamed from ordinary host memory: the weights have no usable bytes in a file."""


class LayerState(enum.Enum):
    """What a streamed layer's weights are doing on the device."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    IN_USE = "in use"
    RELEASING = "releasing"


LAYER_MOVES: dict[LayerState, frozenset[LayerState]] = {
    LayerState.ABSENT: frozenset({LayerState.LOADING}),
    # LOADING -> RELEASING: an order that failed, or a prefetch that nobody came for.
    LayerState.LOADING: frozenset({LayerState.READY, LayerState.RELEASING}),
    LayerState.READY: frozenset({LayerState.IN_USE, LayerState.RELEASING}),
    LayerState.IN_USE: frozenset({LayerState.RELEASING}),
    LayerState.RELEASING: frozenset({LayerState.ABSENT}),
}


class EngineState(enum.Enum):
    """What an engine's device memory is doing."""

    UNLOADED = "unloaded"
    """Nothing on the device, nothing locked; parameters are the host's own."""
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    UNLOADING = "unloading"
    ASLEEP = "asleep"
    """As UNLOADED, but nothing loads it until it is woken; its page locks may be held."""
    DETACHED = "detached"
    """For good: hooks gone, the module is as if it had never been attached."""


ENGINE_MOVES: dict[EngineState, frozenset[EngineState]] = {
    EngineState.UNLOADED: frozenset(
        {EngineState.LOADING, EngineState.ASLEEP, EngineState.DETACHED}
    ),
    # LOADING -> UNLOADED: a load that failed leaves nothing behind.
    EngineState.LOADING: frozenset({EngineState.LOADED, EngineState.UNLOADED}),
    EngineState.LOADED: frozenset(
        {EngineState.LOADING, EngineState.RUNNING, EngineState.UNLOADING}
    ),
    EngineState.RUNNING: frozenset({EngineState.LOADED}),
    # UNLOADING stays when giving back failed half-way; unload may then be called again.
    EngineState.UNLOADING: frozenset({EngineState.UNLOADED}),
    EngineState.ASLEEP: frozenset({EngineState.UNLOADED}),
    EngineState.DETACHED: frozenset(),
}
