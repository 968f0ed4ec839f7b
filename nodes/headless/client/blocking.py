"""Courier's HTTP API from Python. The standard library only: no ComfyUI, no torch."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConnectionLostError, RefusedError, UsageError
from . import calls
from .address import server_of, trust
from .calls import Call, EventReader, headers_of, list_of, read_answer
from .ends import check_ended_well, lost_text, unreachable_text
from .records import KEEP, Gib, OutputFile, Run, RunEvent, RunOptions

if TYPE_CHECKING:
    from typing_extensions import Self

PATIENCE_SECONDS = 60.0
SILENCE_SECONDS = 60.0
"""The server says something every 15 s; so long without a word and the connection is dead."""
TRIES = 5
FIRST_PAUSE_SECONDS = 0.5
"""Before a broken connection is taken up again; then twice that, and so on."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would take the token along to whatever address an answer names."""

    def redirect_request(self, *args: Any) -> None:
        """Nowhere: the answer is handed on as it is."""


class Connection:
    """Requests to one ComfyUI, over HTTP.

    Threads: any; it keeps no connection between calls.
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        timeout_seconds: float = PATIENCE_SECONDS,
        cacert: str | None = None,
    ) -> None:
        """
        Args:
            address: default is COURIER_SERVER, or http://127.0.0.1:8188. It may have a user and a
                password, which ``self.address`` has no more.
            token: for a server elsewhere; default is COURIER_TOKEN, or what is in the file
                that COURIER_TOKEN_FILE names.
            timeout_seconds: for an answer. Sleep and wake have as long as they take.
            cacert: a PEM with certificates to trust beside the system's; default is COURIER_CACERT.
        """
        server = server_of(address)
        self.address = server.address
        self.timeout_seconds = timeout_seconds
        self._token, self._basic = token, server.basic
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if (context := trust(server, cacert)) is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        # A proxy of the user's could not reach a server on this machine.
        handlers += [urllib.request.ProxyHandler({})] if server.is_here else []
        self._opener = urllib.request.build_opener(*handlers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def download(self, file: OutputFile) -> bytes:
        """The bytes of one of ``Run.files()``."""
        call = calls.view(file)
        status, data = self._open(call, self.timeout_seconds)
        calls.refuse_redirect(call, status)
        if status != 200:
            raise RefusedError(
                f"{file.filename} is not there any more ({status})", status, "no_file"
            )
        return data

    def call(self, call: Call) -> Any:
        """The JSON that a request is answered with."""
        # An order that waits for other prompts answers when they have ended.
        patience = None if call.takes_its_time else self.timeout_seconds
        return read_answer(call, *self._open(call, patience))

    def _open(self, call: Call, timeout_seconds: float | None) -> tuple[int, bytes]:
        try:
            with self.send(call, timeout_seconds) as answer:
                return int(answer.status), bytes(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionLostError(unreachable_text(self.address, error)) from error

    def send(
        self, call: Call, timeout_seconds: float | None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """The answer with its body still to come. Raises: HTTPError and OSError, as urllib does."""
        request = urllib.request.Request(
            self.address + call.path, data=call.data(), method=call.method
        )
        for name, value in {
            **headers_of(call, self._token, self._basic),
            **(headers or {}),
        }.items():
            request.add_header(name, value)
        try:
            return self._opener.open(request, timeout=timeout_seconds)
        except (UnicodeError, ValueError) as error:
            # A host that no request can hold.
            raise UsageError(f"the request to {self.address} cannot be written: {error}") from None


class CourierClient(Connection):
    """One ComfyUI with Courier.

    ``with CourierClient("http://127.0.0.1:8188") as courier: print(courier.status())``

    Every method may raise ConnectionLostError (nobody answers) and RefusedError (the server said
    no: ``status``, ``code``, ``body``).

    Threads: any.
    """

    def status(self) -> dict[str, Any]:
        """Every model of Courier's and where its layers are: docs/status.md."""
        return dict(self.call(calls.status()))

    def models(self) -> list[dict[str, Any]]:
        """Every model with the id that sleep, wake, plan and budget take."""
        return list_of(self.call(calls.models()), "models")

    def sleep(
        self,
        models: str | Sequence[str] | None = None,
        level: int = 1,
        when: str = "now",
        on_use: str = "refuse",
    ) -> dict[str, Any]:
        """Put models to sleep (None: all). Gives the receipt: docs/http.md."""
        return dict(self.call(calls.sleep(models, level, when, on_use)))

    def wake(self, models: str | Sequence[str] | None = None, when: str = "now") -> dict[str, Any]:
        """Wake models (None: all that sleep). Gives the receipt."""
        return dict(self.call(calls.wake(models, when)))

    def cancel_orders(self) -> dict[str, Any]:
        """Cancel every order to sleep or to wake that waits or is being carried out."""
        return dict(self.call(calls.cancel_orders()))

    def plan(self, model: str, device_gib: Gib = KEEP, host_gib: Gib = KEEP) -> dict[str, Any]:
        """What a budget would do to a model; nothing changes. None: automatic."""
        return dict(self.call(calls.plan(model, device_gib, host_gib)))

    def budget(
        self, model: str, device_gib: Gib = KEEP, host_gib: Gib = KEEP, when: str = "now"
    ) -> dict[str, Any]:
        """Give a model another budget. ``applied`` says when: ``now`` or ``next_run``."""
        return dict(self.call(calls.budget(model, device_gib, host_gib, when)))

    def start(self, prompt: Mapping[str, Any], options: RunOptions | None = None) -> Run:
        """Queue a workflow in API form; it runs to its end also when nobody looks."""
        return Run.from_json(self.call(calls.start_run(prompt, options or RunOptions())))

    def runs(self) -> list[Run]:
        """Those that the server remembers, the youngest first."""
        return [Run.from_json(value) for value in list_of(self.call(calls.runs()), "runs")]

    def run(self, run_id: str) -> Run:
        """A run as it is now. RefusedError with code ``unknown_run``: there is none, or no more."""
        return Run.from_json(self.call(calls.run(run_id)))

    def cancel(self, run_id: str) -> Run:
        """Take it off the queue, or stop it. It ends at the next step; ``wait`` sees that."""
        return Run.from_json(self.call(calls.cancel_run(run_id)))

    def follow(self, run_id: str, after: int = 0) -> Iterator[RunEvent]:
        """Its events until the end; a broken connection is taken up again where it was."""
        return _follow(self, run_id, after)

    def wait(self, run_id: str) -> Run:
        """The run when it is over.

        Raises: RunFailedError, RunCancelledError.
        """
        for event in self.follow(run_id):
            if event.kind == "end":
                return check_ended_well(event.run)
        return check_ended_well(self.run(run_id))


def _follow(client: CourierClient, run_id: str, after: int) -> Iterator[RunEvent]:
    reader, failed = EventReader(after), 0
    while True:
        before, lost = reader.last_number, None
        try:
            for event in _listen(client, run_id, reader):
                yield event
                if event.kind == "end":
                    return
            # Ended in order, without an "end": it was told before, the server ends, or has no place
            # for one more that listens. Where it answers, it is asked now and then.
            if client.run(run_id).is_over:
                return
            failed = 0
            time.sleep(FIRST_PAUSE_SECONDS)
            continue
        except (OSError, http.client.HTTPException, ConnectionLostError) as error:
            lost = error
        failed = 0 if reader.last_number > before else failed + 1
        if failed > TRIES:
            raise ConnectionLostError(lost_text(client.address, run_id)) from lost
        time.sleep(FIRST_PAUSE_SECONDS * failed)


def _listen(client: CourierClient, run_id: str, reader: EventReader) -> Iterator[RunEvent]:
    """One connection's events. Raises: OSError and others where it breaks; RefusedError."""
    call = calls.run_events(run_id)
    headers = {"Last-Event-ID": str(reader.last_number)}
    try:
        answer = client.send(call, SILENCE_SECONDS, headers)
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 503:
                read_answer(call, error.code, error.read())
        return
    with answer:
        for line in answer:
            yield from reader.feed(line)
