"""Bodies of some MiB: read, parsed and checked while everybody else is answered at once."""

from __future__ import annotations

import asyncio
import json
import json.scanner
from collections.abc import Callable
from typing import Any

from aiohttp import web

from .bodies import parse_object, read_body, read_fields
from .guards import RefusedError
from .own_thread import in_own_thread
from .table import RouteSpec

SMALL_BYTES = 16 << 10
MOST_AT_ONCE = 8
MOST_CONTAINERS = 100_000
"""Lists and objects in one body. Python's collector stops all threads to look at every one."""


class PatientDecoder(json.JSONDecoder):
    """Lets other threads run meanwhile. The one in C does not, for as long as it takes."""

    def __init__(self, **hooks: Any) -> None:
        super().__init__(**hooks)
        self.scan_once = json.scanner.py_make_scanner(self)


class LargeBodies:
    """Takes a few at a time, and parses one after the other, in a thread of its own.

    Threads: the server's event loop.
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._turn = asyncio.Lock()

    async def fields(
        self, request: web.Request, spec: RouteSpec, limit_bytes: int
    ) -> dict[str, Any]:
        """Every field of ``spec``, from a body of at most that length. Raises: RefusedError."""
        length = request.content_length
        if length is not None and length <= SMALL_BYTES:
            return _fields_of(await read_body(request, limit_bytes), spec)
        if self._under_way >= MOST_AT_ONCE:
            text = f"{MOST_AT_ONCE} large bodies are being read already; ask again in 1 s"
            raise RefusedError(429, "too_many_requests", text, {"Retry-After": "1"})
        self._under_way += 1
        try:
            body = await read_body(request, limit_bytes)
            _check_containers(body)
            async with self._turn:
                return await in_own_thread("courier-body", _patiently(body, spec))
        finally:
            self._under_way -= 1


def _patiently(body: bytes, spec: RouteSpec) -> Callable[[], dict[str, Any]]:
    return lambda: _fields_of(body, spec, PatientDecoder)


def _fields_of(
    body: bytes, spec: RouteSpec, decoder: type[json.JSONDecoder] = json.JSONDecoder
) -> dict[str, Any]:
    return read_fields(parse_object(body, decoder), spec.fields or ())


def _check_containers(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") > MOST_CONTAINERS:
        text = f"the body has more than {MOST_CONTAINERS:,} lists and objects; send less"
        raise RefusedError(413, "body_too_large", text)
