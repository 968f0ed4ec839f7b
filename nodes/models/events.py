"""What clients are told while models run: small, seldom, and only what changed.

A client is right without it: an event has nothing that the status does not have. ``plan`` changes
when something of the status did that is not in the event, so that a client reads that again.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
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
MOST_OF_ADDRESS = 32
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
    """The clients that asked for events: websockets that are connected, and a few of each address.

    Who comes to a full place takes that of a client that is gone, or of an address that has more
    than its own. So nobody can take them all, and whoever has a place keeps it from strangers.

    Threads: any.
    """

    def __init__(self, is_connected: Callable[[str], bool]) -> None:
        self._is_connected = is_connected
        self._lock = threading.Lock()
        self._addresses: dict[str, str | None] = {}
        """By client, the one that came first first."""

    def add(self, client_id: str, address: str | None) -> None:
        """That client listens from now on, if the server has such a websocket.

        Args:
            address: of whoever asks; None where nobody can say.
        """
        if not self._is_connected(client_id):
            return
        with self._lock:
            if client_id in self._addresses:
                return
            counts = Counter(self._addresses.values())
            if counts[address] >= MOST_OF_ADDRESS or len(self._addresses) >= MOST_LISTENERS:
                self._forget_gone()
                counts = Counter(self._addresses.values())
            if counts[address] >= MOST_OF_ADDRESS:
                return
            if len(self._addresses) >= MOST_LISTENERS:
                greedy, most = counts.most_common(1)[0]
                if most <= counts[address] + 1:
                    return
                self._addresses.pop([i for i, of in self._addresses.items() if of == greedy][-1])
            self._addresses[client_id] = address

    def among(self, connected: Iterable[str]) -> list[str]:
        """Those that are connected."""
        known = set(connected)
        with self._lock:
            return [client_id for client_id in self._addresses if client_id in known]

    def _forget_gone(self) -> None:
        for client_id in [i for i in self._addresses if not self._is_connected(i)]:
            del self._addresses[client_id]


class Deliveries:
    """Gives each client the last event, and one that does not read nothing before it does.

    What ComfyUI sends goes through one queue for all: a message for a client whose connection is
    full would hold up everybody else's.

    Threads: one at a time.
    """

    def __init__(
        self, has_room: Callable[[str], bool], hand_over: Callable[[str, dict[str, Any]], None]
    ) -> None:
        """``has_room``: whether all that a client was sent before is on its way."""
        self._has_room = has_room
        self._hand_over = hand_over
        self._owed: set[str] = set()
        self._last: dict[str, Any] | None = None

    def send(self, clients: Iterable[str], body: dict[str, Any]) -> None:
        """To all of them, or as soon as they read again."""
        self._last, self._owed = body, set(clients)
        self.send_owed(self._owed)

    def send_owed(self, clients: Iterable[str]) -> None:
        """The last event to those of ``clients`` that had no room for it."""
        self._owed &= set(clients)
        for client_id in sorted(self._owed):
            if self._last is not None and self._has_room(client_id):
                self._owed.discard(client_id)
                self._hand_over(client_id, self._last)


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
        send_owed: Callable[[], None] = lambda: None,
    ) -> None:
        """``send_owed``: called where there is nothing new."""
        self._read = read
        self._has_clients = has_clients
        self._send = send
        self._send_owed = send_owed
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
        self._send_owed()
        restless = now_seconds - self._changed_at < _RESTLESS_SECONDS or moves(body["models"])
        return LEAST_SECONDS if restless else REST_SECONDS


def moves(models: Iterable[dict[str, Any]]) -> bool:
    """Whether any of these models is between two rests."""
    rests = {state.value for state in _RESTS}
    return any(model["state"] not in rests for model in models)
