"""The wire of the client: requests as data, answers read. Pure, and shared by both clients."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RefusedError, UsageError
from .records import Gib, Keep, OutputFile, Run, RunEvent, RunOptions, not_understood

TOKEN_VARIABLE = "COURIER_TOKEN"
TOKEN_FILE_VARIABLE = "COURIER_TOKEN_FILE"
_PREFIX = "/courier/v1/"
_LONGEST_NUMBER = 18


@dataclass(frozen=True)
class Call:
    """One request. ``body`` None: there is none."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    takes_its_time: bool = False

    def data(self) -> bytes | None:
        """The body as it is sent. Raises: UsageError where it is no JSON."""
        if self.body is None:
            return None
        try:
            return json.dumps(self.body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(f"the request cannot be written as JSON: {error}") from None


def headers_of(call: Call, token: str | None, basic: str | None = None) -> dict[str, str]:
    """What goes with a request.

    Args:
        token: None: that of the environment, where there is one.
        basic: user and password of the address; the two go into the same header.
    Raises: UsageError for a token that no header can hold, and for both at once, without a word
        of either.
    """
    if token and basic:
        raise UsageError(
            "a token and a user with a password go into the same header; give one of them: the "
            "token for Courier itself, the user for a server before it"
        )
    if basic:
        return {**_headers(call), "Authorization": basic}
    token = token or environment_token()
    if not (token.isascii() and token.isprintable()):
        raise UsageError(
            "the token has characters that no header can hold (a line break, or none of ASCII); "
            "give the very line of the server's"
        )
    headers = _headers(call)
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _headers(call: Call) -> dict[str, str]:
    headers = {"Accept": "application/json"}
    if call.body is not None:
        headers["Content-Type"] = "application/json"
    return headers


def environment_token() -> str:
    """The variable COURIER_TOKEN, or the file that COURIER_TOKEN_FILE names; "" where neither is.

    Raises: UsageError.
    """
    token, file = (
        os.environ.get(name, "").strip() for name in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE)
    )
    return token or (token_in(file) if file else "")


def token_in(file: str) -> str:
    """The token that a file holds. Raises: UsageError."""
    try:
        token = Path(file).expanduser().read_text(encoding="utf-8-sig").strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"the file with the token cannot be read ({why}): {file}") from None
    if not token:
        raise UsageError(f"the file with the token is empty: {file}")
    return token


def status() -> Call:
    """``GET /courier/v1/status``."""
    return Call("GET", _PREFIX + "status")


def models() -> Call:
    """``GET /courier/v1/models``."""
    return Call("GET", _PREFIX + "models")


def sleep(models: str | Sequence[str] | None, level: int, when: str, on_use: str) -> Call:
    """``POST /courier/v1/sleep``."""
    body = {"models": _ids(models), "level": level, "when": when, "on_use": on_use}
    return Call("POST", _PREFIX + "sleep", body, takes_its_time=True)


def wake(models: str | Sequence[str] | None, when: str) -> Call:
    """``POST /courier/v1/wake``."""
    body = {"models": _ids(models), "when": when}
    return Call("POST", _PREFIX + "wake", body, takes_its_time=True)


def cancel_orders() -> Call:
    """``POST /courier/v1/cancel``."""
    return Call("POST", _PREFIX + "cancel", {})


def plan(model: str, device_gib: Gib, host_gib: Gib) -> Call:
    """``POST /courier/v1/plan``."""
    return Call("POST", _PREFIX + "plan", _figures(model, device_gib, host_gib))


def budget(model: str, device_gib: Gib, host_gib: Gib, when: str) -> Call:
    """``POST /courier/v1/budget``."""
    body = {**_figures(model, device_gib, host_gib), "when": when}
    return Call("POST", _PREFIX + "budget", body, takes_its_time=True)


def start_run(prompt: Mapping[str, Any], options: RunOptions) -> Call:
    """``POST /courier/v1/runs``."""
    body = {
        "prompt": dict(prompt),
        "name": options.name,
        "workflow": None if options.workflow is None else dict(options.workflow),
        "wake_before": options.wake_before,
        "sleep_after": options.sleep_after,
        "on_use": options.on_use,
        "time_limit_seconds": options.time_limit_seconds,
    }
    return Call("POST", _PREFIX + "runs", body)


def runs() -> Call:
    """``GET /courier/v1/runs``."""
    return Call("GET", _PREFIX + "runs")


def run(run_id: str) -> Call:
    """``GET /courier/v1/runs/{id}``."""
    return Call("GET", f"{_PREFIX}runs/{_quoted(run_id)}")


def cancel_run(run_id: str) -> Call:
    """``DELETE /courier/v1/runs/{id}``."""
    return Call("DELETE", f"{_PREFIX}runs/{_quoted(run_id)}")


def run_events(run_id: str) -> Call:
    """``GET /courier/v1/runs/{id}/events``."""
    return Call("GET", f"{_PREFIX}runs/{_quoted(run_id)}/events")


def object_info() -> Call:
    """ComfyUI's own description of its nodes."""
    return Call("GET", "/object_info")


def system_stats() -> Call:
    """ComfyUI's own description of itself."""
    return Call("GET", "/system_stats")


def view(file: OutputFile) -> Call:
    """ComfyUI's own way to a file that a node wrote."""
    names = {"filename": file.filename, "subfolder": file.subfolder, "type": file.type}
    return Call("GET", f"/view?{urllib.parse.urlencode(names)}")


def read_answer(call: Call, status: int, data: bytes) -> Any:
    """The JSON of an answer.

    Returns: an object; Courier answers nothing else.
    Raises: RefusedError where it is no success, or no JSON object.
    """
    refuse_redirect(call, status)
    body = _parsed(data)
    if 200 <= status < 300 and isinstance(body, dict):
        return body
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        raise RefusedError(error["message"], status, str(error.get("code")), body)
    what = f"{call.method} {call.path}"
    if status in (401, 407):
        text = (
            f"{what} answered {status}: a server before ComfyUI wants another user or password; "
            "write them into the address, https://user:password@host"
        )
        raise RefusedError(text, status, "unauthorized", body)
    if status == 404:
        text = (
            f"{what} answered 404: no Courier answers there. Is it a ComfyUI with ComfyUI-Courier "
            "in its custom_nodes, and is that new enough?"
        )
        raise RefusedError(text, status, "no_courier", body)
    text = f"{what} answered {status} and no JSON object; is it a ComfyUI?"
    raise RefusedError(text, status, "no_json", body)


def refuse_redirect(call: Call, status: int) -> None:
    """A request and the token with it go to the server that was named and nowhere else.

    Raises: RefusedError for an answer that sends us on.
    """
    if 300 <= status < 400:
        text = (
            f"{call.method} {call.path} answered {status}: the server sends us to another address, "
            "and no token is taken there. Name that address itself, as a browser shows it"
        )
        raise RefusedError(text, status, "redirected")


def list_of(answer: Mapping[str, Any], name: str) -> list[Any]:
    """The list ``name`` of an answer. Raises: RefusedError where there is none."""
    found = answer.get(name)
    if not isinstance(found, list):
        raise not_understood(f"no list of {name}")
    return found


class EventReader:
    """Server-sent events out of lines. Keep-alive comments are dropped.

    Threads: one at a time.
    """

    def __init__(self, after: int = 0) -> None:
        self.last_number = after
        """Of the event read last: where to go on after the connection broke."""
        self._kind = ""
        self._data: list[str] = []
        self._number = after

    def feed(self, line: bytes) -> Iterator[RunEvent]:
        """Take one line, with or without its end; give the event that it completes."""
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if not text:
            if self._data:
                self.last_number = self._number
                run = Run.from_json(_parsed("\n".join(self._data)))
                yield RunEvent(self._number, self._kind, run)
            self._kind, self._data = "", []
            return
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "id" and value.isdigit() and len(value) <= _LONGEST_NUMBER:
            self._number = int(value)
        elif name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)


def _parsed(text: str | bytes) -> Any:
    """None where it is no JSON; whoever needs an object finds that this is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _figures(model: str, device_gib: Gib, host_gib: Gib) -> dict[str, Any]:
    figures = {"device_gib": device_gib, "host_gib": host_gib}
    given = {name: figure for name, figure in figures.items() if figure is not Keep.KEEP}
    return {"model": model, **given}


def _ids(models: str | Sequence[str] | None) -> Any:
    # A lone string is one id, and no sequence of letters; "all" means what it means over HTTP.
    if models is None or models == "all":
        return "all"
    return [models] if isinstance(models, str) else list(models)


def _quoted(run_id: str) -> str:
    return urllib.parse.quote(run_id, safe="")
