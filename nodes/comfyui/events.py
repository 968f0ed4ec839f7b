"""Events to the pages and programs that are connected to ComfyUI, from a thread of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import comfy.model_management

from ..background import try_to_start
from ..models.events import (
    LEAST_SECONDS,
    REFUSED_EVENT,
    STATUS_EVENT,
    Deliveries,
    Feed,
    Listeners,
    model_event,
)
from ..models.registry import get_service
from .compat import has
from .host import server
from .orders import get_orders, rest_of
from .sleeping import count_asleep
from .symbols import Part

_LOG = logging.getLogger("courier")

_starting = threading.Lock()
_thread: threading.Thread | None = None
_something_begins = threading.Event()


def _sockets() -> Mapping[str, Any]:
    """ComfyUI's websockets by the id of their client."""
    return getattr(server(), "sockets", None) or {}


_listeners = Listeners(lambda client_id: client_id in _sockets())


def listen(client_id: str, address: str | None) -> None:
    """That websocket gets events from now on."""
    _listeners.add(client_id, address)


def start_feed() -> None:
    """Begin to look, once in a process, and look closely for a while: a prompt has arrived."""
    global _thread
    with _starting:
        if _thread is None and server() is not None and has(Part.PAGE, Part.SLEEP):
            _thread = try_to_start("courier-events", _run)
    _something_begins.set()


def tell_of_refusal(client_id: Any, message: str) -> None:
    """A prompt of that client is refused because a model sleeps."""
    if client_id in _connected() and _has_room(client_id):
        server().send_sync(REFUSED_EVENT, {"message": message}, client_id)


def _run() -> None:
    mail = Deliveries(_has_room, _hand_over)
    feed = Feed(
        read,
        lambda: bool(_connected()),
        lambda body: mail.send(_connected(), body),
        lambda: mail.send_owed(_connected()),
    )
    told, begins = "", True
    while True:
        seconds = LEAST_SECONDS
        try:
            seconds = feed.look(time.monotonic(), begins)
        except Exception as error:
            # A model caught between two states; the next look may go well, the log has it once.
            if repr(error) != told:
                told = repr(error)
                _LOG.exception("Courier: no event could be made")
        # Never sooner than that, whatever begins: it is what bounds the number of events.
        time.sleep(LEAST_SECONDS)
        begins = _something_begins.wait(max(0.0, seconds - LEAST_SECONDS))
        _something_begins.clear()


def _connected() -> list[str]:
    return _listeners.among(list(_sockets()))


def _has_room(client_id: str) -> bool:
    """Whether nothing waits in this process for that client to read it.

    Of a websocket aiohttp tells the connection nowhere but in a name of its own. Without it, a
    client is taken for one that reads.
    """
    request = getattr(_sockets().get(client_id), "_req", None)
    unsent = getattr(getattr(request, "transport", None), "get_write_buffer_size", None)
    return unsent is None or not unsent()


def _hand_over(client_id: str, body: dict[str, Any]) -> None:
    server().send_sync(STATUS_EVENT, body, client_id)


def read() -> dict[str, Any]:
    """What the next event would say. Threads: any; takes no lock of an engine."""
    orders, models = get_orders(), []
    for model_id, name, engine in get_service().engines():
        asked = get_service().asked_of(model_id)
        rest = rest_of(engine, model_id, name)
        models.append(model_event(model_id, rest, engine.snapshot(), asked))
    return {
        "boot_id": get_service().boot_id,
        "models": models,
        "orders": orders.under_way.listed(),
        "orders_done": orders.orders_done,
        "busy": orders.is_busy(),
        # Those of the core come, go, sleep and wake without a word; who sees another number asks.
        "loaded": len(comfy.model_management.current_loaded_models),
        "asleep": count_asleep(),
    }
