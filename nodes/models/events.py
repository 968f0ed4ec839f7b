"""What clients are told while models run: small, seldom, and only what changed.

A client is right without it: an event has nothing that the status does not have. ``plan`` changes
when something of the status did that is not in the event, so that a client reads that again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

from ...offload_core.values import EngineSnapshot, EngineState, LayerState, Placement
from .registry import AskedBudget
from .status_json import measured_json, traffic_json

STATUS_EVENT = "courier.status"
REFUSED_EVENT = "courier.refused"
LEAST_SECONDS = 0.2
"""Between two events."""
REST_SECONDS = 1.0
"""Between two looks where nothing happens."""
_RESTLESS_SECONDS = 3.0
_PLACES = {
    Placement.RESIDENT: "r",
    Placement.PINNED: "p",
    Placement.MAPPED: "m",
    Placement.PAGEABLE: "a",
}
_ACTIVITIES = {
    LayerState.ABSENT: ".",
    LayerState.LOADING: "l",
    LayerState.READY: "y",
    LayerState.IN_USE: "u",
    LayerState.RELEASING: "g",
}
CLIENT_HEADER = "Courier-Client"
"""With it, whoever reads the status or the list of models asks for events: the id of its websocket.
Others are not told, since not every program takes messages that it does not know."""
MOST_LISTENERS = 64
_ID_LIMIT = 200
_RESTS = frozenset({EngineState.UNLOADED, EngineState.LOADED, EngineState.ASLEEP})


def model_event(
    model_id: str, rest: str, snapshot: EngineSnapshot, asked: AskedBudget | None
) -> dict[str, Any]:
    """One model of an event. ``placements`` and ``activity`` have one letter for each layer of the
    status, in its order: resident, pinned, mapped, pAgeable; absent ".", Loading, readY, in Use,
    releasinG."""
    return {
        "id": model_id,
        "state": snapshot.state.value,
        "rest": rest,
        "placements": "".join(_PLACES[layer.placement] for layer in snapshot.layers),
        "activity": "".join(_ACTIVITIES[layer.state] for layer in snapshot.layers),
        "plan": _mark(snapshot, asked),
        "measured": measured_json(snapshot.memory),
        "traffic": traffic_json(snapshot.traffic),
    }


def _mark(snapshot: EngineSnapshot, asked: AskedBudget | None) -> int:
    layers = [
        (layer.placement.value, layer.resident_bytes, layer.locked_bytes, layer.reason)
        for layer in snapshot.layers
    ]
    return zlib.crc32(repr((snapshot.budget, asked, snapshot.notes, layers)).encode())


class Listeners:
    """The clients that asked for events, the last MOST_LISTENERS of them.

    Threads: any. A dict of Python's own: to put into it, to take out and to copy is one step each.
    """

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def add(self, client_id: str) -> None:
        """That client listens from now on."""
        if not 1 <= len(client_id) <= _ID_LIMIT:
            return
        self._ids.pop(client_id, None)
        self._ids[client_id] = None
        for oldest in list(self._ids)[:-MOST_LISTENERS]:
            self._ids.pop(oldest, None)

    def among(self, connected: Iterable[str]) -> list[str]:
        """Those that are connected."""
        known = set(connected)
        return [client_id for client_id in list(self._ids) if client_id in known]


class Feed:
    """Sends an event when what it reads is not what it read before.

    Threads: one, which is none that runs a model. ``read`` takes no lock of an engine, and
    ``send`` hands over and returns.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        has_clients: Callable[[], bool],
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        self._read = read
        self._has_clients = has_clients
        self._send = send
        self._last: dict[str, Any] | None = None
        self._changed_at = 0.0

    def look(self, now_seconds: float, begins: bool = False) -> float:
        """Send, or not. Returns: seconds until the next look, at least LEAST_SECONDS.

        Args:
            begins: something is about to happen, so that the next looks should be soon.
        """
        if begins:
            self._changed_at = now_seconds
        if not self._has_clients():
            return REST_SECONDS
        body = self._read()
        if body != self._last:
            self._last, self._changed_at = body, now_seconds
            self._send(body)
            return LEAST_SECONDS
        restless = now_seconds - self._changed_at < _RESTLESS_SECONDS or moves(body["models"])
        return LEAST_SECONDS if restless else REST_SECONDS


def moves(models: Iterable[dict[str, Any]]) -> bool:
    """Whether any of these models is between two rests."""
    rests = {state.value for state in _RESTS}
    return any(model["state"] not in rests for model in models)
