"""The HTTP door. Nothing is registered at import, only by ``register_routes``."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from .service import CourierService
from .wire import status_json

STATUS_PATH = "/courier/v1/status"
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

logger = logging.getLogger("courier")


class StatusRoute:
    """Answers for STATUS_PATH, always in JSON. It only reads, and what it tells has no paths.

    Threads: the server's event loop.
    """

    def __init__(self, service: CourierService) -> None:
        self.service = service

    async def handle(self, request: web.Request) -> web.Response:
        """GET: the status. Any other method: 405, with a sentence."""
        if request.method not in ("GET", "HEAD"):
            text = f"{request.method} is not possible here; the status is read with GET"
            return _error(405, "method_not_allowed", text, {"Allow": "GET, HEAD"})
        try:
            # Reading the limits of the host and the driver's memory may block.
            body = await asyncio.to_thread(self._body)
        except Exception as error:
            # The text of a foreign error may hold a path, so it stays in the log.
            logger.exception("Courier: the status could not be read")
            kind = type(error).__name__
            text = f"the status could not be read ({kind}); ComfyUI's log has the details"
            return _error(500, "status_failed", text)
        return _answer(200, body)

    def _body(self) -> str:
        return json.dumps(status_json(self.service.status()), allow_nan=False)


def register_routes(routes: web.RouteTableDef | web.UrlDispatcher, service: CourierService) -> bool:
    """Add our routes to ``routes``, unless they are there.

    Where somebody else has our path, ComfyUI's server would not start with a second one: then a
    warning names who has it, and nothing is registered.

    Args:
        routes: ComfyUI's route table, before the server takes it; or a router of aiohttp.
    Returns: whether this copy of the pack answers.
    """
    for handler in _handlers(routes, STATUS_PATH):
        if isinstance(getattr(handler, "__self__", None), StatusRoute):
            return True
        logger.warning(
            "Courier: %s is registered already by %s; is the pack installed twice? "
            "This copy (%s) adds no routes.",
            STATUS_PATH,
            _place(handler),
            __file__,
        )
        return False
    handle = StatusRoute(service).handle
    if isinstance(routes, web.UrlDispatcher):
        routes.add_route("*", STATUS_PATH, handle)
    else:
        routes.route("*", STATUS_PATH)(handle)
    return True


def _handlers(routes: web.RouteTableDef | web.UrlDispatcher, path: str) -> Iterator[Any]:
    if isinstance(routes, web.UrlDispatcher):
        for added in routes.routes():
            if added.resource is not None and added.resource.canonical == path:
                yield added.handler
        return
    for route in routes:
        if isinstance(route, web.RouteDef) and route.path == path:
            yield route.handler


def _place(handler: Any) -> str:
    """Where a handler was written: its file, or else what it calls itself."""
    code = getattr(handler, "__code__", None)
    return str(code.co_filename) if code is not None else repr(handler)


def _error(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> web.Response:
    body = json.dumps({"error": {"code": code, "message": message}})
    return _answer(status, body, headers)


def _answer(status: int, body: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        text=body,
        status=status,
        content_type="application/json",
        headers={**HEADERS, **(headers or {})},
    )
