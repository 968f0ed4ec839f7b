"""The HTTP door to runs: parse, call the service once, shape the reply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from ..requests.records import NotWithThisComfyError, OnUse
from ..runs.records import PromptRefusedError, RunOrder
from ..runs.run_json import brief_json, run_json
from ..runs.service import QueueFullError, RunService, UnknownRunError
from ..runs.state import Event
from .answers import HEADERS, error_answer, error_body, json_answer, method_answer
from .guards import Guards, RefusedError
from .large_bodies import LargeBodies
from .run_table import CANCEL_RUN, LIST_RUNS, READ_RUN, RUN_EVENTS, START_RUN
from .table import RouteSpec

LOOK_SECONDS = 0.1
KEEP_ALIVE_SECONDS = 15.0
WRITE_SECONDS = 20.0
"""A client that reads nothing for so long has its connection ended."""
MOST_LISTENERS = 64
_LONGEST_NUMBER = 18

logger = logging.getLogger("courier")

Action = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RunPath:
    """Answers for one path of runs, always in JSON but for events.

    Threads: the server's event loop.
    """

    def __init__(self, *actions: tuple[RouteSpec, Action]) -> None:
        """``actions``: what each method of the path does."""
        self.specs = tuple(spec for spec, _ in actions)
        self.spec = self.specs[0]
        self._actions = {method: (spec, act) for spec, act in actions for method in spec.methods}
        self._ways = ", ".join(f"{spec.what} with {spec.method}" for spec, _ in actions)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One of the path's methods; any other: 405, with a sentence."""
        answer = await self._answer(request)
        if not request.content.is_eof():
            # Of what is still on its way aiohttp drops some, so that the client can read this
            # answer; it is nobody's next request.
            answer.force_close()
        return answer

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.method not in self._actions:
            return method_answer(request.method, tuple(self._actions), self._ways)
        spec, act = self._actions[request.method]
        try:
            return await act(request)
        except Exception as error:
            return _failure(spec, error)


class RunDoor:
    """What the paths of runs do.

    Threads: the server's event loop.
    """

    def __init__(
        self, service: RunService, guards: Guards, begin_to_follow: Callable[[], None]
    ) -> None:
        """``begin_to_follow`` is called when there is a run to look at."""
        self._service = service
        self._guards = guards
        self._begin_to_follow = begin_to_follow
        self._listeners = 0
        self._bodies = LargeBodies()

    def paths(self) -> tuple[RunPath, ...]:
        """One for each path."""
        followed = self._followed
        return (
            RunPath((START_RUN, followed(self._start)), (LIST_RUNS, followed(self._list))),
            RunPath((READ_RUN, followed(self._read)), (CANCEL_RUN, followed(self._cancel))),
            RunPath((RUN_EVENTS, followed(self._events))),
        )

    def _followed(self, act: Action) -> Action:
        """Before it acts, see to it that somebody follows what runs: when a run began, there may
        have been no thread to be had for that."""

        async def acting(request: web.Request) -> web.StreamResponse:
            if self._service.has_unfinished:
                self._begin_to_follow()
            return await act(request)

        return acting

    async def _start(self, request: web.Request) -> web.Response:
        self._guards.check(request)
        if request.query_string:
            text = "there are no parameters in the address; fields go into the body"
            raise RefusedError(400, "unknown_field", text)
        # A prompt may be as large here as at ComfyUI's own route (--max-upload-size).
        limit = max(START_RUN.body_limit_bytes, request.client_max_size)
        fields = await self._bodies.fields(request, START_RUN, limit)
        order = RunOrder(**{**fields, "on_use": OnUse(fields["on_use"])})
        # Last: whoever is refused above has taken nothing from those who are not.
        self._guards.rate.take()
        # shield: a client that goes away now must not leave a prompt queued that nobody follows.
        record = await asyncio.shield(asyncio.ensure_future(self._submit(order)))
        where = f"{START_RUN.path}/{record['id']}"
        return json_answer(202, record, {"Location": where})

    async def _submit(self, order: RunOrder) -> dict[str, Any]:
        record = await self._service.start(order)
        self._begin_to_follow()
        return run_json(record)

    async def _list(self, request: web.Request) -> web.Response:
        return json_answer(200, {"runs": [brief_json(run) for run in self._service.records()]})

    async def _read(self, request: web.Request) -> web.Response:
        # Whoever asks wants to know, and not what was so a moment ago.
        record = await asyncio.to_thread(self._service.record, request.match_info["id"], True)
        return json_answer(200, run_json(record))

    async def _cancel(self, request: web.Request) -> web.Response:
        self._guards.check_sender(request)
        run_id = request.match_info["id"]
        self._service.record(run_id)
        self._guards.rate.take()
        # Looking at the models may block.
        record = await asyncio.to_thread(self._service.cancel, run_id)
        return json_answer(200, run_json(record))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        run_id = request.match_info["id"]
        self._service.record(run_id)
        if self._listeners >= MOST_LISTENERS:
            text = f"{MOST_LISTENERS} listen already; read the run itself now and then"
            return error_answer(503, "too_many_listeners", text, {"Retry-After": "5"})
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        if request.method == "HEAD":
            await answer.prepare(request)
            return answer
        self._listeners += 1
        try:
            await answer.prepare(request)
            await self._send_events(answer, run_id, last_number(request.headers))
        except (ConnectionError, UnknownRunError):
            pass  # it went away, or the run was forgotten while it was far behind
        except TimeoutError:
            # It does not read; without this it would keep its place for ever.
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._listeners -= 1
        return answer

    async def _send_events(self, answer: web.StreamResponse, run_id: str, after: int) -> None:
        quiet_seconds = 0.0
        while True:
            events, is_over = self._service.events(run_id, after)
            for event in events:
                await _write(answer, event_bytes(event))
                after, quiet_seconds = event.number, 0.0
            if is_over:
                return
            if quiet_seconds >= KEEP_ALIVE_SECONDS:
                # A comment, for proxies that end what is silent, and to see that nobody listens.
                await _write(answer, b": still here\n\n")
                quiet_seconds = 0.0
            await asyncio.sleep(LOOK_SECONDS)
            quiet_seconds += LOOK_SECONDS


async def _write(answer: web.StreamResponse, data: bytes) -> None:
    """Raises: TimeoutError where nobody reads."""
    try:
        await asyncio.wait_for(answer.write(data), WRITE_SECONDS)
    except asyncio.TimeoutError as error:  # its own class before Python 3.11
        raise TimeoutError from error


def last_number(headers: Mapping[str, str]) -> int:
    """The number of the event that a client had last; 0 where it says none, or no number."""
    text = headers.get("Last-Event-ID", "").strip()
    is_number = text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER
    return int(text) if is_number else 0


def event_bytes(event: Event) -> bytes:
    """As a stream of server-sent events has it. The data is JSON and so on one line."""
    return f"id: {event.number}\nevent: {event.kind}\ndata: {event.text}\n\n".encode()


def _failure(spec: RouteSpec, error: Exception) -> web.Response:
    if isinstance(error, RefusedError):
        return error_answer(error.status, error.code, str(error), error.headers)
    if isinstance(error, UnknownRunError):
        return error_answer(404, "unknown_run", str(error))
    if isinstance(error, NotWithThisComfyError):
        return error_answer(501, "not_with_this_comfyui", str(error))
    if isinstance(error, QueueFullError):
        return error_answer(409, "queue_full", str(error))
    if isinstance(error, PromptRefusedError):
        body = error_body("prompt_refused", str(error))
        return json_answer(422, {**body, "node_errors": error.node_errors})
    # The text of a foreign error may hold a path, so it stays in the log.
    logger.error("Courier: %s failed", spec.name, exc_info=error)
    text = f"{spec.name} failed ({type(error).__name__}); ComfyUI's log has the details"
    return error_answer(500, f"{spec.name}_failed", text)
