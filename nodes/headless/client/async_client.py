"""The same API for programs that run an event loop. Needs aiohttp, which ComfyUI brings."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConnectionLostError, RefusedError, UsageError
from . import calls
from .address import server_of, trust
from .blocking import FIRST_PAUSE_SECONDS, PATIENCE_SECONDS, SILENCE_SECONDS, TRIES
from .calls import Call, EventReader, headers_of, list_of, read_answer
from .ends import check_ended_well, lost_text, unreachable_text
from .records import KEEP, Gib, OutputFile, Run, RunEvent, RunOptions

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncConnection:
    """Requests to one ComfyUI, over HTTP.

    Threads: the event loop's that entered it.
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        timeout_seconds: float = PATIENCE_SECONDS,
        cacert: str | None = None,
    ) -> None:
        """See CourierClient."""
        server = server_of(address)
        self.address = server.address
        self.timeout_seconds = timeout_seconds
        self._token, self._basic = token, server.basic
        self._context = trust(server, cacert)
        self._session: Any = None

    async def __aenter__(self) -> Self:
        try:
            import aiohttp
        except ImportError:
            raise UsageError(
                "AsyncCourierClient needs aiohttp: pip install aiohttp. CourierClient needs nothing"
            ) from None
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        session, self._session = self._session, None
        await session.close()

    async def download(self, file: OutputFile) -> bytes:
        """See CourierClient."""
        call = calls.view(file)
        status, data = await self._open(call)
        calls.refuse_redirect(call, status)
        if status != 200:
            text = f"{file.filename} is not there any more ({status})"
            raise RefusedError(text, status, "no_file")
        return data

    async def call(self, call: Call) -> Any:
        """The JSON that a request is answered with."""
        return read_answer(call, *await self._open(call))

    async def _open(self, call: Call) -> tuple[int, bytes]:
        import aiohttp

        total = None if call.takes_its_time else self.timeout_seconds
        try:
            async with self._send(call, aiohttp.ClientTimeout(total=total)) as answer:
                return answer.status, await answer.read()
        except (OSError, aiohttp.ClientError) as error:
            raise ConnectionLostError(unreachable_text(self.address, error)) from error

    async def listen(self, run_id: str, reader: EventReader) -> AsyncIterator[RunEvent]:
        """One connection's events."""
        import aiohttp

        call = calls.run_events(run_id)
        patience = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_SECONDS)
        headers = {"Last-Event-ID": str(reader.last_number)}
        async with self._send(call, patience, headers) as answer:
            if answer.status == 503:
                return
            if answer.status != 200:
                read_answer(call, answer.status, await answer.read())
            rest = b""
            # Not by lines: aiohttp ends a line that is longer than its buffer.
            async for piece in answer.content.iter_any():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    for event in reader.feed(line):
                        yield event

    def _send(self, call: Call, timeout: Any, headers: Mapping[str, str] | None = None) -> Any:
        if self._session is None:
            raise UsageError("use it as: async with AsyncCourierClient(...) as courier")
        data = call.data()
        return self._session.request(
            call.method,
            self.address + call.path,
            # Of bytes alone, aiohttp warns where there are many.
            data=None if data is None else io.BytesIO(data),
            headers={**headers_of(call, self._token, self._basic), **(headers or {})},
            timeout=timeout,
            ssl=True if self._context is None else self._context,
            allow_redirects=False,
        )


class AsyncCourierClient(AsyncConnection):
    """As CourierClient, with ``await``: ``async with AsyncCourierClient() as courier: ...``

    Threads: the event loop's that entered it.
    """

    async def status(self) -> dict[str, Any]:
        """See CourierClient."""
        return dict(await self.call(calls.status()))

    async def models(self) -> list[dict[str, Any]]:
        """See CourierClient."""
        return list_of(await self.call(calls.models()), "models")

    async def sleep(
        self,
        models: str | Sequence[str] | None = None,
        level: int = 1,
        when: str = "now",
        on_use: str = "refuse",
    ) -> dict[str, Any]:
        """See CourierClient."""
        return dict(await self.call(calls.sleep(models, level, when, on_use)))

    async def wake(
        self, models: str | Sequence[str] | None = None, when: str = "now"
    ) -> dict[str, Any]:
        """See CourierClient."""
        return dict(await self.call(calls.wake(models, when)))

    async def cancel_orders(self) -> dict[str, Any]:
        """See CourierClient."""
        return dict(await self.call(calls.cancel_orders()))

    async def plan(
        self, model: str, device_gib: Gib = KEEP, host_gib: Gib = KEEP
    ) -> dict[str, Any]:
        """See CourierClient."""
        return dict(await self.call(calls.plan(model, device_gib, host_gib)))

    async def budget(
        self, model: str, device_gib: Gib = KEEP, host_gib: Gib = KEEP, when: str = "now"
    ) -> dict[str, Any]:
        """See CourierClient."""
        return dict(await self.call(calls.budget(model, device_gib, host_gib, when)))

    async def start(self, prompt: Mapping[str, Any], options: RunOptions | None = None) -> Run:
        """See CourierClient."""
        return Run.from_json(await self.call(calls.start_run(prompt, options or RunOptions())))

    async def runs(self) -> list[Run]:
        """See CourierClient."""
        return [Run.from_json(value) for value in list_of(await self.call(calls.runs()), "runs")]

    async def run(self, run_id: str) -> Run:
        """See CourierClient."""
        return Run.from_json(await self.call(calls.run(run_id)))

    async def cancel(self, run_id: str) -> Run:
        """See CourierClient."""
        return Run.from_json(await self.call(calls.cancel_run(run_id)))

    async def follow(self, run_id: str, after: int = 0) -> AsyncIterator[RunEvent]:
        """See CourierClient."""
        import aiohttp

        reader, failed = EventReader(after), 0
        while True:
            before = reader.last_number
            lost: Exception | None = None
            try:
                async for event in self.listen(run_id, reader):
                    yield event
                    if event.kind == "end":
                        return
                if (await self.run(run_id)).is_over:
                    return
                failed = 0
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
                continue
            except (OSError, aiohttp.ClientError, ConnectionLostError) as error:
                lost = error
            failed = 0 if reader.last_number > before else failed + 1
            if failed > TRIES:
                raise ConnectionLostError(lost_text(self.address, run_id)) from lost
            await asyncio.sleep(FIRST_PAUSE_SECONDS * failed)

    async def wait(self, run_id: str) -> Run:
        """See CourierClient."""
        async for event in self.follow(run_id):
            if event.kind == "end":
                return check_ended_well(event.run)
        return check_ended_well(await self.run(run_id))
