"""Talk to a running ComfyUI over loopback HTTP: queue a workflow, follow it, fetch its pictures."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from devtools.console import DevError

POLL_SECONDS = 0.1
TOO_MANY = 429
TURN_SECONDS = 0.2
# No proxy: the server is on this machine, and a proxy of the user's could not reach it.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class PromptError(DevError):
    """ComfyUI refused a workflow, or one of its nodes failed.

    Attributes:
        detail: ComfyUI's own answer, as parsed JSON.
    """

    def __init__(self, message: str, detail: Any = None) -> None:
        super().__init__(message)
        self.detail = detail


class HttpError(DevError):
    """An answer that is no success.

    Attributes:
        status: the HTTP status.
        body: the parsed JSON answer, or its text.
    """

    def __init__(self, message: str, status: int, body: Any) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


@dataclass(frozen=True)
class PromptResult:
    """One finished workflow.

    Attributes:
        outputs: node id to what the node showed, as ``/history`` tells it.
        seconds: from queueing to the end.
    """

    prompt_id: str
    outputs: dict[str, Any]
    seconds: float
    messages: list[Any] = field(default_factory=list)

    def images(self) -> list[dict[str, str]]:
        """Every picture of every node: ``filename``, ``subfolder`` and ``type``."""
        return [image for node in self.outputs.values() for image in node.get("images", [])]

    def cached_nodes(self) -> list[str]:
        """Ids of the nodes that ComfyUI did not run again."""
        for name, data in self.messages:
            if name == "execution_cached":
                return list(data.get("nodes", []))
        return []


class ComfyUIClient:
    """Requests to one address.

    Threads: any; it keeps no state between calls.
    """

    def __init__(self, address: str, timeout_seconds: float = 30.0) -> None:
        self.address = address.rstrip("/")
        self.timeout_seconds = timeout_seconds

    def request(
        self, path: str, body: Any = None, method: str | None = None, raw: bool = False
    ) -> Any:
        """GET ``path``, or POST ``body`` as JSON to it.

        Where there were too many changes in a short time it asks again until there is a turn, for
        as long as it waits for any answer.

        Returns: parsed JSON, None for an empty answer, or bytes if ``raw``.
        Raises: HttpError for an answer that is no success; OSError if nobody answers.
        """
        deadline = time.monotonic() + self.timeout_seconds
        while (content := self._asked_once(path, body, method, deadline)) is None:
            time.sleep(TURN_SECONDS)
        return content if raw else _parse(content)

    def _asked_once(
        self, path: str, body: Any, method: str | None, deadline: float
    ) -> bytes | None:
        """None where there is no turn for it yet."""
        try:
            return self._ask(path, body, method)
        except HttpError as error:
            if error.status != TOO_MANY or time.monotonic() > deadline:
                raise
            return None

    def _ask(self, path: str, body: Any, method: str | None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data=data, method=method)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        try:
            with _opener.open(request, timeout=self.timeout_seconds) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                parsed = _parse(error.read())
            text = f"{request.get_method()} {path} answered {error.code}: {parsed}"
            raise HttpError(text, error.code, parsed) from None

    def is_up(self) -> bool:
        try:
            self.request("/system_stats")
        except (OSError, HttpError):
            return False
        return True

    def queue(self, prompt: dict[str, Any], client_id: str | None = None) -> str:
        """POST /prompt. Returns: the prompt's id. Raises: PromptError naming what is wrong."""
        body = {"prompt": prompt, "client_id": client_id or uuid.uuid4().hex}
        try:
            return str(self.request("/prompt", body)["prompt_id"])
        except HttpError as error:
            if error.status != 400:
                raise
            raise PromptError(refusal_text(error.body, prompt), error.body) from None

    def follow(
        self,
        prompt_id: str,
        timeout_seconds: float = 300.0,
        on_poll: Callable[[], None] | None = None,
    ) -> PromptResult:
        """Wait for a queued prompt to end. ``on_poll`` may raise to stop waiting.

        Raises: PromptError if a node failed, it was interrupted, or time is up.
        """
        started = time.monotonic()
        while True:
            entry = (self.request(f"/history/{prompt_id}") or {}).get(prompt_id)
            seconds = time.monotonic() - started
            if entry is not None and "status" in entry:
                break
            if on_poll is not None:
                on_poll()
            if seconds > timeout_seconds:
                raise PromptError(f"the workflow did not end within {timeout_seconds:.0f} s")
            time.sleep(POLL_SECONDS)
        status = entry["status"] or {}
        if status.get("status_str") != "success":
            raise PromptError(failure_text(status), status)
        messages = status.get("messages", [])
        return PromptResult(prompt_id, entry.get("outputs", {}), seconds, messages)

    def run(self, prompt: dict[str, Any], timeout_seconds: float = 300.0) -> PromptResult:
        return self.follow(self.queue(prompt), timeout_seconds)

    def image(self, image: dict[str, str]) -> bytes:
        """The bytes of one of ``PromptResult.images()``."""
        names = ("filename", "subfolder", "type")
        query = urllib.parse.urlencode({name: image.get(name, "") for name in names})
        return bytes(self.request(f"/view?{query}", raw=True))


def _parse(content: bytes) -> Any:
    if not content:
        return None
    try:
        return json.loads(content)
    except ValueError:
        return content.decode("utf-8", "replace")


def refusal_text(body: Any, prompt: dict[str, Any]) -> str:
    """One sentence a fault from ComfyUI's answer to a workflow that it refused."""
    if not isinstance(body, dict):
        return f"ComfyUI refused the workflow: {body}"
    error = body.get("error")
    if isinstance(error, dict):
        head = " ".join(str(error.get(name) or "") for name in ("message", "details")).strip()
    else:
        head = str(error or "no reason given")
    lines = [f"ComfyUI refused the workflow: {head}"]
    for node_id, node in (body.get("node_errors") or {}).items():
        kind = node.get("class_type") or prompt.get(node_id, {}).get("class_type", "?")
        lines += [
            f"  node {node_id} ({kind}): {fault.get('message')}: {fault.get('details')}"
            for fault in node.get("errors", [])
        ]
    return "\n".join(lines)


def failure_text(status: dict[str, Any]) -> str:
    """What went wrong in which node, from a history entry's status."""
    for name, data in status.get("messages", []):
        if name == "execution_error":
            text = str(data.get("exception_message", "")).strip()
            where = f"node {data.get('node_id')} ({data.get('node_type')})"
            trace = "".join(data.get("traceback") or [])
            return f"{where} failed with {data.get('exception_type')}: {text}\n{trace}".rstrip()
        if name == "execution_interrupted":
            return f"the workflow was interrupted in node {data.get('node_id')}"
    return f"the workflow ended with status {status.get('status_str')!r} and no error message"
