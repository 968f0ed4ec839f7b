"""The door to sleep and wake, through a real server on loopback."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

MODELS = "/courier/v1/models"
SLEEP = "/courier/v1/sleep"
WAKE = "/courier/v1/wake"
CANCEL = "/courier/v1/cancel"
RELEASE = "/release_memory_occupation"
RESUME = "/resume_memory_occupation"
DOCUMENT = "/courier/v1/openapi.json"
ORDERS = [SLEEP, WAKE, RELEASE, RESUME]
# BusyError's own advice is a field, which the two other names do not read.
BUSY_ALIAS = " (fields are not read here: POST /courier/v1/sleep or /courier/v1/wake)"
READS = ["/courier/v1/status", MODELS, DOCUMENT]
JSON = {"Content-Type": "application/json"}
TOKEN = "a-token-of-the-tests"
ELSEWHERE = "192.168.1.77"
# For people: an answer that never comes is a failure, and not a test that hangs.
PATIENCE_SECONDS = 30


@dataclass
class Reply:
    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


@dataclass
class Door:
    """Our routes, and how to start a server with them."""

    pack: Any
    service: Any
    control: Any
    environment: dict[str, str] = field(default_factory=dict)
    peer: str | None = "127.0.0.1"
    now: float = 0.0

    def app(self, **options: Any) -> web.Application:
        guards = self.pack.module("nodes.http.guards")
        app = web.Application(**options)
        made = guards.Guards(
            self.environment,
            peer_of=lambda request: self.peer,
            rate=guards.RateLimit(clock=lambda: self.now),
        )
        register = self.pack.module("nodes.http.register").register_routes
        assert register(app.router, self.service, self.control, made) is True
        return app

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[TestClient[Any, Any]]:
        async with TestClient(TestServer(self.app(), **options)) as client:
            yield client

    def talk(self, conversation: Callable[[TestClient[Any, Any]], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with self.client() as client:
                return await asyncio.wait_for(conversation(client), PATIENCE_SECONDS)

        return asyncio.run(run())

    def ask(
        self,
        path: str,
        body: Any = b"{}",
        headers: dict[str, str] | None = None,
        method: str = "POST",
    ) -> Reply:
        """One request. ``body``: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def conversation(client: TestClient[Any, Any]) -> Reply:
            return await request(client, path, data, {**JSON, **(headers or {})}, method)

        return self.talk(conversation)

    def raw(self, *parts: bytes) -> Reply:
        """Send ``parts`` as they are, end our half, and read what comes."""

        async def conversation(client: TestClient[Any, Any]) -> Reply:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
            for part in parts:
                writer.write(part)
            await writer.drain()
            try:
                return await read_reply(reader)
            finally:
                writer.close()

        return self.talk(conversation)


async def request(
    client: TestClient[Any, Any], path: str, data: Any, headers: dict[str, str], method: str
) -> Reply:
    async with client.request(method, path, data=data, headers=headers) as answer:
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-store"
        return Reply(answer.status, answer.headers, await answer.text())


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head)}
    text = (await reader.readexactly(int(headers["content-length"]))).decode()
    return Reply(int(head[0].split()[1]), headers, text)


def head_of(path: str, *lines: str) -> bytes:
    first = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*first, *lines, "", ""]).encode()


@pytest.fixture
def door(pack: Any, service: Any, control: Any) -> Door:
    return Door(pack, service, control)


@pytest.fixture
def words(pack: Any) -> Any:
    return pack.module("nodes.requests.records")


# --- what the orders say


def test_models_are_listed(door: Door) -> None:
    reply = door.ask(MODELS, method="GET")
    assert reply.status == 200
    assert [model["id"] for model in reply.json["models"]] == ["wan-1", "sd3-2"]


def test_sleep_without_fields_is_all_models_now(door: Door, words: Any) -> None:
    reply = door.ask(SLEEP, {})
    assert reply.status == 200
    assert reply.json == {
        "ok": True,
        "action": "sleep",
        "message": "sleep is done",
        "seconds": 0.1,
        "models": [],
    }
    assert door.control.orders == [words.SleepOrder()]


def test_sleep_with_every_field(door: Door, words: Any) -> None:
    body = {"models": ["sd3-2", "wan-1"], "level": 2, "when": "idle", "on_use": "wake"}
    assert door.ask(SLEEP, body).status == 200
    wanted = words.SleepOrder(("sd3-2", "wan-1"), 2, words.When.IDLE, words.OnUse.WAKE)
    assert door.control.orders == [wanted]


def test_wake_with_and_without_fields(door: Door, words: Any) -> None:
    assert door.ask(WAKE, {}).json["action"] == "wake"
    assert door.ask(WAKE, {"models": ["wan-1"], "when": "idle"}).status == 200
    assert door.ask(WAKE, {"models": "all", "when": "now"}).status == 200
    one = words.WakeOrder(("wan-1",), words.When.IDLE)
    assert door.control.orders == [words.WakeOrder(), one, words.WakeOrder()]


@pytest.mark.parametrize("level", ["2", 99, None, True, 1.0])
def test_level_that_is_none_is_refused_and_named(door: Door, level: Any) -> None:
    reply = door.ask(SLEEP, {"level": level})
    assert (reply.status, reply.code) == (400, "invalid_field")
    assert reply.message.startswith("level has to be 1 or 2, not ")
    assert door.control.orders == []


@pytest.mark.parametrize("level", [1, 2])
def test_level_arrives(door: Door, level: int) -> None:
    assert door.ask(SLEEP, {"level": level}).status == 200
    assert [order.level for order in door.control.orders] == [level]


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (SLEEP, {"when": "later"}, "when "),
        (SLEEP, {"on_use": None}, "on_use "),
        (SLEEP, {"models": "wan-1"}, "models "),
        (SLEEP, {"models": []}, "models "),
        (SLEEP, {"lvl": 2}, "no field is called 'lvl'"),
        (WAKE, {"level": 1}, "no field is called 'level'"),
        (WAKE, {"when": True}, "when "),
    ],
)
def test_wrong_field_is_named(door: Door, path: str, body: Any, word: str) -> None:
    reply = door.ask(path, body)
    assert reply.status == 400
    assert reply.message.startswith(word)
    assert door.control.orders == []


@pytest.mark.parametrize("path", [SLEEP, WAKE])
def test_field_in_the_address_is_not_dropped_in_silence(door: Door, path: str) -> None:
    reply = door.ask(path + "?level=2")
    assert (reply.status, reply.code) == (400, "unknown_field")
    assert door.control.orders == []


@pytest.mark.parametrize("path", ORDERS)
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"[]", "invalid_json"),
        (b"null", "invalid_json"),
        (b"NaN", "invalid_json"),
        (b'{"level": NaN}', "invalid_json"),
        ("{}".encode("utf-16"), "invalid_json"),
        (b'{"level": ', "invalid_json"),
        (b"\xff", "invalid_json"),
        (b"[" * 60_000, "invalid_json"),
        (b'{"level": 1, "level": 2}', "invalid_json"),
    ],
)
def test_body_that_is_no_object_is_refused(door: Door, path: str, body: bytes, code: str) -> None:
    reply = door.ask(path, body)
    assert (reply.status, reply.code) == (400, code)
    assert door.control.orders == []


@pytest.mark.parametrize("path", [SLEEP, WAKE])
def test_empty_body_is_refused_and_the_smallest_one_named(door: Door, path: str) -> None:
    reply = door.ask(path, b"")
    assert (reply.status, reply.code) == (400, "empty_body")
    assert "{}" in reply.message


@pytest.mark.parametrize("model_id", ["../../x", "/etc/passwd", "..%2f", "wan-1\u0000", "wan-3"])
def test_unknown_id_is_not_found_whatever_it_is(door: Door, model_id: str) -> None:
    for path in (SLEEP, WAKE):
        reply = door.ask(path, {"models": [model_id]})
        assert (reply.status, reply.code) == (404, "unknown_model")
    assert door.control.orders == []


# --- what the control answers


@pytest.mark.parametrize("path", ORDERS)
def test_busy_is_a_conflict(door: Door, words: Any, path: str) -> None:
    door.control.fail_with = words.BusyError("a prompt runs")
    reply = door.ask(path)
    more = BUSY_ALIAS if path in (RELEASE, RESUME) else ""
    assert (reply.status, reply.code, reply.message) == (409, "busy", f"a prompt runs{more}")


@pytest.mark.parametrize("path", ORDERS)
def test_failure_half_way_comes_with_its_receipt(door: Door, words: Any, path: str) -> None:
    door.control.fail_with = words.OrderFailedError("half-way", {"models": [{"id": "wan-1"}]})
    reply = door.ask(path)
    assert (reply.status, reply.code, reply.message) == (503, "order_failed", "half-way")
    assert reply.json["receipt"] == {"models": [{"id": "wan-1"}]}


@pytest.mark.parametrize("path", [*ORDERS, MODELS])
def test_error_of_ours_is_logged_and_the_answer_has_no_path(
    door: Door, path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    door.control.fail_with = OSError(5, "input/output error", "/home/me/secret.safetensors")

    def broken() -> Any:
        raise door.control.fail_with

    if path == MODELS:
        monkeypatch.setattr(door.control, "models", broken)
    reply = door.ask(path, method="GET" if path == MODELS else "POST")
    assert reply.status == 500
    assert reply.code == f"{path.rpartition('/')[2]}_failed"
    assert "(OSError); ComfyUI's log has the details" in reply.message
    assert "secret" not in reply.text
    assert "secret.safetensors" in caplog.text


@pytest.mark.parametrize("receipt", [{"models": object()}, {"seconds": float("nan")}])
def test_receipt_that_is_no_json_is_an_error_of_ours(
    door: Door, words: Any, receipt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    door.control.fail_with = words.OrderFailedError("half-way", receipt)
    assert door.ask(SLEEP).code == "sleep_failed"
    monkeypatch.setattr(door.control, "wake", lambda order: receipt)
    assert door.ask(WAKE).code == "wake_failed"


# --- the names that other tools know


def test_release_and_resume_are_sleep_and_wake_of_all(door: Door, words: Any) -> None:
    released = door.ask(RELEASE, {})
    assert released.status == 200
    assert released.json == {
        "success": True,
        "sleeping": ["wan-1", "sd3-2"],
        "message": "sleep is done",
    }
    resumed = door.ask(RESUME, b"")
    assert resumed.json == {"success": True, "sleeping": [], "message": "wake is done"}
    assert door.control.orders == [words.SleepOrder(), words.WakeOrder()]


@pytest.mark.parametrize("path", [RELEASE, RESUME])
def test_fields_of_other_tools_are_ignored_and_it_says_so(door: Door, path: str) -> None:
    reply = door.ask(path, {"tags": ["weights"], "level": 2})
    assert reply.status == 200
    assert reply.json["message"].endswith(". Ignored: 'tags', 'level'.")
    (order,) = door.control.orders
    assert order.models is None


def test_nothing_freed_is_no_success(door: Door) -> None:
    door.control.ok = False
    reply = door.ask(RELEASE)
    assert (reply.status, reply.json["success"]) == (200, False)


def test_failed_release_is_no_success_either(door: Door, words: Any) -> None:
    door.control.fail_with = words.BusyError("a prompt runs")
    reply = door.ask(RELEASE)
    assert reply.json["success"] is False
    assert reply.json["message"] == reply.message == f"a prompt runs{BUSY_ALIAS}"


# --- methods


@pytest.mark.parametrize("path", ORDERS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_post_changes_a_state(door: Door, path: str, method: str) -> None:
    reply = door.ask(path, method=method)
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    if method != "HEAD":
        assert reply.code == "method_not_allowed"
        assert reply.message.startswith(f"{method} is not possible here; models are ")
    assert door.control.orders == []


@pytest.mark.parametrize("path", READS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_get_reads(door: Door, path: str, method: str) -> None:
    reply = door.ask(path, method=method)
    assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")
    assert reply.code == "method_not_allowed"
    assert door.ask(path, b"", method="HEAD").status == 200


# --- who may


@pytest.mark.parametrize("path", ORDERS)
@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content-Type": "text/plain"}, 415, "wrong_content_type"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "wrong_content_type"),
        ({"Content-Encoding": "gzip"}, 415, "wrong_content_encoding"),
        ({"Origin": "http://evil.example"}, 403, "foreign_origin"),
        ({"Origin": "null"}, 403, "foreign_origin"),
        ({"Sec-Fetch-Site": "cross-site"}, 403, "foreign_origin"),
        ({"Host": "evil.example"}, 403, "not_local"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403, "not_local"),
        ({"X-Forwarded-For": "127.0.0.1"}, 403, "not_local"),
    ],
)
def test_request_of_a_stranger_is_refused_and_costs_nothing(
    door: Door, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    async def conversation(client: TestClient[Any, Any]) -> None:
        data = b"" if "Content-Encoding" in headers else b"{}"
        for _ in range(20):  # twice the burst
            reply = await request(client, path, data, {**JSON, **headers}, "POST")
            assert (reply.status, reply.code) == (status, code)
        assert door.control.orders == []
        # The budget of those who may is still there: the clock stands.
        for _ in range(10):
            assert (await request(client, path, b"{}", JSON, "POST")).status == 200

    door.talk(conversation)


def test_page_of_ours_may(door: Door) -> None:
    headers = {
        "Host": "localhost:8188",
        "Origin": "http://localhost:8188",
        "Sec-Fetch-Site": "same-origin",
    }
    assert door.ask(SLEEP, {}, headers).status == 200


@pytest.mark.parametrize("path", ORDERS)
def test_who_is_elsewhere_needs_the_token(
    door: Door, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    door.peer = ELSEWHERE
    right = {"Authorization": f"Bearer {TOKEN}"}
    wrong = {"Authorization": "Bearer not-the-token"}
    assert door.ask(path, {}, right).code == "not_local"
    door.environment["COURIER_TOKEN"] = TOKEN
    replies = [door.ask(path, {}, headers) for headers in ({}, wrong, right)]
    assert [reply.status for reply in replies] == [401, 401, 200]
    assert [reply.code for reply in replies[:2]] == ["token_missing", "token_wrong"]
    assert replies[0].headers["WWW-Authenticate"] == 'Bearer realm="courier"'
    # A stranger's page in a browser that has the token is a stranger still.
    origin = {**right, "Origin": "http://evil.example"}
    assert door.ask(path, {}, origin).code == "foreign_origin"
    for secret in (TOKEN, "not-the-token"):
        assert secret not in caplog.text
        assert all(secret not in str(reply.headers) + reply.text for reply in replies)


def test_who_is_here_needs_no_token_also_where_there_is_one(door: Door) -> None:
    door.environment["COURIER_TOKEN"] = TOKEN
    assert door.ask(SLEEP).status == 200
    # Another pack may use this header for itself.
    assert door.ask(SLEEP, {}, {"Authorization": "Bearer of-another-pack"}).status == 200


def test_foreign_host_from_here_needs_the_token_itself(door: Door) -> None:
    """DNS rebinding: the page's browser runs here, and a configured token alone must not help."""
    door.environment["COURIER_TOKEN"] = TOKEN
    rebound = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert door.ask(SLEEP, {}, rebound).status == 401
    assert door.ask(SLEEP, {}, {**rebound, "Authorization": f"Bearer {TOKEN}"}).status == 200


def test_empty_token_file_lets_in_nobody(door: Door, tmp_path: Any) -> None:
    door.peer = ELSEWHERE
    (tmp_path / "token").write_text("\n")
    door.environment["COURIER_TOKEN_FILE"] = str(tmp_path / "token")
    reply = door.ask(SLEEP, {}, {"Authorization": "Bearer x"})
    assert (reply.status, reply.code) == (403, "token_unusable")
    assert str(tmp_path) not in reply.text


def test_peer_is_the_one_of_the_connection(pack: Any, service: Any, control: Any) -> None:
    """Nothing put in its place: the real peer here is 127.0.0.1, and a middleware cannot lie."""
    guards = pack.module("nodes.http.guards")

    @web.middleware
    async def lie(request: web.Request, handler: Any) -> web.StreamResponse:
        seen.append(guards.peer_of(request.clone(remote=ELSEWHERE)))
        return await handler(request.clone(remote=ELSEWHERE))

    async def talk() -> int:
        app = web.Application(middlewares=[lie])
        assert (
            pack.module("nodes.http.register").register_routes(app.router, service, control) is True
        )
        async with TestClient(TestServer(app)) as client:
            return (await request(client, SLEEP, b"{}", JSON, "POST")).status

    seen: list[str] = []
    assert asyncio.run(talk()) == 200
    assert seen == ["127.0.0.1"]


# --- bodies on the wire


def test_100_mb_are_refused_before_they_are_sent(door: Door) -> None:
    reply = door.raw(head_of(SLEEP, "Content-Length: 100000000"), b"{")
    assert (reply.status, reply.code) == (413, "body_too_large")
    assert reply.headers["connection"] == "close"


def test_refused_request_with_a_body_ends_its_connection(door: Door) -> None:
    reply = door.raw(head_of(SLEEP, "Content-Length: 50000", "Origin: null"), b"{")
    assert (reply.status, reply.code) == (403, "foreign_origin")
    assert reply.headers["connection"] == "close"


def test_endless_body_without_a_length_is_refused_on_the_way(door: Door) -> None:
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    reply = door.raw(head_of(SLEEP, "Transfer-Encoding: chunked"), *[chunk] * 5)
    assert (reply.status, reply.code) == (413, "body_too_large")
    assert reply.headers["connection"] == "close"


@pytest.mark.parametrize(("length", "status"), [(64 * 1024, 200), (64 * 1024 + 1, 413)])
def test_limit_is_64_kib(door: Door, length: int, status: int) -> None:
    body = b"{}".ljust(length)
    assert door.ask(SLEEP, body).status == status
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (length, body)
    assert door.raw(head_of(SLEEP, "Transfer-Encoding: chunked"), chunked).status == status


def test_chunked_body_is_taken(door: Door) -> None:
    body = b'9\r\n{"level":\r\n2\r\n2}\r\n0\r\n\r\n'
    assert door.raw(head_of(SLEEP, "Transfer-Encoding: chunked"), body).status == 200
    assert [order.level for order in door.control.orders] == [2]


def test_client_that_goes_away_in_the_middle_of_its_body_changes_nothing(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    entered: asyncio.Queue[bool] = asyncio.Queue()
    statuses: asyncio.Queue[int] = asyncio.Queue()

    @web.middleware
    async def watch(request: web.Request, handler: Any) -> web.StreamResponse:
        entered.put_nowait(True)
        answer = await handler(request)
        statuses.put_nowait(answer.status)
        return answer

    async def conversation() -> None:
        # As ComfyUI does it: the handler goes on after the connection.
        runner = web.AppRunner(door.app(middlewares=[watch]))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        length, chunked = "Content-Length: 5", "Transfer-Encoding: chunked"
        for line, sent, more in (
            (length, b"{", b""),
            (length, b"{}", b""),
            (chunked, b"2\r\n{}\r\n", b""),
            (chunked, b"2\r\n{}\r\n", b"zz\r\n"),
        ):
            _, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
            writer.write(head_of(SLEEP, line) + sent)
            # What is no chunk is refused by aiohttp itself when it comes before that.
            await entered.get()
            writer.write(more)
            await writer.drain()
            writer.close()
            assert await asyncio.wait_for(statuses.get(), PATIENCE_SECONDS) == 400
        await runner.cleanup()

    asyncio.run(conversation())
    assert door.control.orders == []
    assert "failed" not in caplog.text


def test_body_that_a_middleware_has_read_is_still_taken(
    pack: Any, service: Any, control: Any
) -> None:
    @web.middleware
    async def read_first(request: web.Request, handler: Any) -> web.StreamResponse:
        await request.read()
        return await handler(request)

    async def talk() -> int:
        app = web.Application(middlewares=[read_first])
        assert (
            pack.module("nodes.http.register").register_routes(app.router, service, control) is True
        )
        async with TestClient(TestServer(app)) as client:
            return (await request(client, SLEEP, b'{"level": 2}', JSON, "POST")).status

    assert asyncio.run(talk()) == 200
    assert [order.level for order in control.orders] == [2]


# --- many at once


def test_of_1000_sleeps_in_a_second_few_are_carried_out(door: Door) -> None:
    async def conversation(client: TestClient[Any, Any]) -> list[Reply]:
        replies = [await request(client, SLEEP, b"{}", JSON, "POST")]
        for number in range(999):
            door.now = (number + 1) / 1000
            replies.append(await request(client, SLEEP, b"{}", JSON, "POST"))
        return replies

    replies = door.talk(conversation)
    statuses = [reply.status for reply in replies]
    # The burst of ten, and what five a second make in 0.999 s.
    assert statuses.count(200) == len(door.control.orders) == 14
    assert statuses.count(429) == 986
    assert replies[-1].code == "too_many_requests"
    assert replies[-1].headers["Retry-After"] == "1"


def test_wrong_bodies_and_conflicts_cost_nothing(door: Door) -> None:
    async def conversation(client: TestClient[Any, Any]) -> None:
        for body in (b"[]", b"", b'{"level": 3}', b'{"x": 1}') * 5:
            assert (await request(client, SLEEP, body, JSON, "POST")).status == 400
        for _ in range(10):
            assert (await request(client, SLEEP, b"{}", JSON, "POST")).status == 200
        assert (await request(client, WAKE, b"{}", JSON, "POST")).status == 429

    door.talk(conversation)


class Gate:
    """A sleep that waits until it is let go."""

    def __init__(self, control: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.left = threading.Semaphore(0)
        self._sleep = control.sleep
        monkeypatch.setattr(control, "sleep", self)

    def __call__(self, order: Any) -> Any:
        self.entered.release()
        self.open.wait()
        try:
            return self._sleep(order)
        finally:
            self.left.release()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exception: Any) -> None:
        # Also when the test has failed: the server's threads have to end.
        self.open.set()

    async def wait_for_entry(self) -> None:
        await asyncio.to_thread(self.entered.acquire)


def test_orders_that_wait_leave_threads_for_others(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(door.control, monkeypatch)

    async def conversation(client: TestClient[Any, Any]) -> None:
        with gate:
            await talk(client)

    async def talk(client: TestClient[Any, Any]) -> None:
        # As small a pool as there can be: a single order in it would keep everybody out.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        waiting = []
        for _ in range(3):
            call = request(client, SLEEP, b'{"when": "idle"}', JSON, "POST")
            waiting.append(asyncio.create_task(call))
            await gate.wait_for_entry()
        # More of them than the burst: these cost nothing.
        for _ in range(20):
            reply = await request(client, WAKE, b"{}", JSON, "POST")
            assert (reply.status, reply.code) == (409, "busy")
        assert (await request(client, MODELS, None, {}, "GET")).status == 200
        gate.open.set()
        assert [(await call).status for call in waiting] == [200] * 3
        assert (await request(client, WAKE, b"{}", JSON, "POST")).status == 200

    door.talk(conversation)


def test_orders_complete_and_keep_their_room_although_the_client_is_gone(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(door.control, monkeypatch)
    ended: asyncio.Queue[str] = asyncio.Queue()

    @web.middleware
    async def watch(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except asyncio.CancelledError:
            ended.put_nowait("cancelled")
            raise

    async def conversation() -> None:
        # This server ends the handler with the connection; ComfyUI's does not.
        server = TestServer(door.app(middlewares=[watch]))
        async with TestClient(server) as client:
            with gate:
                await talk(client, server.port)

    async def talk(client: TestClient[Any, Any], port: int | None) -> None:
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head_of(SLEEP, "Content-Length: 2") + b"{}")
            await gate.wait_for_entry()
            writer.close()
            assert await ended.get() == "cancelled"
        assert (await request(client, WAKE, b"{}", JSON, "POST")).status == 409
        gate.open.set()
        for _ in range(3):
            await asyncio.to_thread(gate.left.acquire)

    asyncio.run(conversation())
    assert len(door.control.orders) == 3
    assert door.control.sleeping == ["sd3-2", "wan-1"]


def test_cancel_comes_through_where_all_other_orders_wait(
    door: Door, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many orders as there may be, each until it is cancelled."""
    listed = door.control.under_way
    begun = threading.Semaphore(0)

    def wait(order: Any) -> dict[str, Any]:
        with listed.entered("sleep") as entry:
            begun.release()
            while True:
                entry.check()

    monkeypatch.setattr(door.control, "sleep", wait)

    async def conversation(client: TestClient[Any, Any]) -> list[Reply]:
        tasks = [asyncio.create_task(request(client, SLEEP, b"{}", JSON, "POST")) for _ in range(3)]
        for _ in tasks:
            await asyncio.to_thread(begun.acquire)
        assert (await request(client, SLEEP, b"{}", JSON, "POST")).code == "busy"
        orders = (await request(client, MODELS, b"", {}, "GET")).json["orders"]
        assert [order["action"] for order in orders] == ["sleep"] * 3
        cancelled = await request(client, CANCEL, b"{}", JSON, "POST")
        assert (cancelled.status, cancelled.json["cancelled"]) == (200, 3)
        return [await task for task in tasks]

    replies = door.talk(conversation)
    assert [(reply.status, reply.code) for reply in replies] == [(409, "cancelled")] * 3
    assert door.ask(CANCEL).json == {
        "cancelled": 0,
        "message": "No order waits or is being carried out.",
    }
    assert door.ask(CANCEL, {"order": 1}).code == "unknown_field"


# --- registration


def test_second_copy_of_the_pack_adds_nothing(
    pack: Any, other_pack: Any, service: Any, control: Any, caplog: pytest.LogCaptureFixture
) -> None:
    table = web.RouteTableDef()
    routes = pack.module("nodes.http.register")
    assert routes.register_routes(table, service, control) is True
    assert routes.register_routes(table, service, control) is True
    assert [route.path for route in table] == [
        "/courier/v1/status",
        MODELS,
        DOCUMENT,
        SLEEP,
        WAKE,
        CANCEL,
        RELEASE,
        RESUME,
    ]
    assert (
        other_pack.module("nodes.http.register").register_routes(table, service, control) is False
    )
    assert len(table) == 8
    (record,) = caplog.records
    assert "is the pack installed twice?" in record.getMessage()


def test_our_prefix_taken_in_part_is_not_filled_up(
    pack: Any, service: Any, control: Any, caplog: pytest.LogCaptureFixture
) -> None:
    table = web.RouteTableDef()

    @table.post(WAKE)
    async def stranger(request: web.Request) -> web.Response:
        return web.Response(text="mine")

    assert pack.module("nodes.http.register").register_routes(table, service, control) is False
    assert len(table) == 1
    assert f"{WAKE} is registered already by {__file__}" in caplog.text


def test_name_that_is_not_ours_alone_is_left_to_who_has_it(
    pack: Any, service: Any, control: Any, caplog: pytest.LogCaptureFixture
) -> None:
    table = web.RouteTableDef()

    @table.post(RELEASE)
    async def stranger(request: web.Request) -> web.Response:
        return web.Response(text="mine")

    assert pack.module("nodes.http.register").register_routes(table, service, control) is True
    assert len(table) == 8
    assert f"{RELEASE} is left to {__file__}" in caplog.text


def test_control_that_comes_later_is_added(pack: Any, service: Any, control: Any) -> None:
    table = web.RouteTableDef()
    register = pack.module("nodes.http.register").register_routes
    assert register(table, service) is True
    assert [route.path for route in table] == ["/courier/v1/status"]
    assert register(table, service, control) is True
    assert len(table) == 8
