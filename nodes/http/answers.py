"""The shape of every answer of the HTTP door: JSON, never kept by a browser."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def json_answer(
    status: int, value: Any, headers: dict[str, str] | None = None, text: str | None = None
) -> web.Response:
    """``value`` as JSON.

    Args:
        text: the JSON itself, where the caller has it already; ``value`` is not looked at then.
    Raises: TypeError or ValueError where ``value`` is no JSON, or holds a NaN.
    """
    return web.Response(
        text=json.dumps(value, allow_nan=False) if text is None else text,
        status=status,
        content_type="application/json",
        headers={**HEADERS, **(headers or {})},
    )


def error_body(code: str, message: str) -> dict[str, Any]:
    """``code`` is for programs and stays; ``message`` says to people what to do."""
    return {"error": {"code": code, "message": message}}


def error_answer(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> web.Response:
    """A failure and nothing else."""
    return json_answer(status, error_body(code, message), headers)


def method_answer(method: str, allowed: tuple[str, ...], purpose: str) -> web.Response:
    """405. ``purpose``: "the status is read with GET"."""
    text = f"{method} is not possible here; {purpose}"
    return error_answer(405, "method_not_allowed", text, {"Allow": ", ".join(allowed)})
