"""The door to runs, through a real server on loopback."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from ..runs.test_service import PROMPT, Studio

RUNS = "/courier/v1/runs"
JSON = {"Content-Type": "application/json"}
TOKEN = "a-token-of-the-tests"


class Door:
    """Our routes over a queue that the test moves."""

    def __init__(self, pack: Any, service: Any, control: Any) -> None:
        self.studio = Studio(pack, control)
        self.pack, self.service, self.control = pack, service, control
        self.environment: dict[str, str] = {}
        self.peer = "127.0.0.1"
        self.now = 0.0
        self.begun_to_follow = 0
        self.middlewares: list[Any] = []

    def talk(self, conversation: Callable[[TestClient[Any, Any]], Awaitable[Any]]) -> Any:
        """With a client, and with nobody who looks but the test."""

        async def run() -> Any:
            guards = self.pack.module("nodes.http.guards")
            made = guards.Guards(
                self.environment,
                peer_of=lambda request: self.peer,
                rate=guards.RateLimit(clock=lambda: self.now),
            )
            door = self.pack.module("nodes.http.run_routes").RunDoor(
                self.studio.service, made, self.begin_to_follow
            )
            app = web.Application(middlewares=self.middlewares)
            for path in door.paths():
                app.router.add_route("*", path.spec.path, path.handle)
            # It ends the handler of a client that went away, as some servers do.
            async with TestClient(TestServer(app)) as client:
                return await asyncio.wait_for(conversation(client), 30)

        return asyncio.run(run())

    def begin_to_follow(self) -> None:
        self.begun_to_follow += 1

    def ask(self, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any, Any]:
        """(status, headers, JSON) of one request."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        data = None if raw is None else io.BytesIO(raw)
        headers = {**(JSON if body is not None else {}), **more}

        async def conversation(client: TestClient[Any, Any]) -> Any:
            async with client.request(method, path, data=data, headers=headers) as reply:
                return reply.status, reply.headers, json.loads(await reply.text())

        return self.talk(conversation)  # type: ignore[no-any-return]

    def start(self, **fields: Any) -> str:
        status, _, body = self.ask("POST", RUNS, {"prompt": PROMPT, **fields})
        assert status == 202, body
        return str(body["id"])


@pytest.fixture
def door(pack: Any, service: Any, control: Any) -> Door:
    return Door(pack, service, control)


def test_a_run_is_begun_read_listed_and_cancelled(door: Door) -> None:
    status, headers, body = door.ask("POST", RUNS, {"prompt": PROMPT, "name": "morning"})
    assert (status, body["state"], body["name"]) == (202, "queued", "morning")
    assert headers["Location"] == f"{RUNS}/{body['id']}"
    assert door.ask("GET", headers["Location"])[2]["id"] == body["id"]
    assert [run["id"] for run in door.ask("GET", RUNS)[2]["runs"]] == [body["id"]]
    status, _, body = door.ask("DELETE", headers["Location"])
    assert (status, body["id"]) == (200, body["id"])
    assert door.studio.host.stopped


def test_a_run_that_is_asked_for_is_looked_at(door: Door) -> None:
    """Also where its follower has not looked since."""
    run_id = door.start()
    records = door.studio.records
    door.studio.host.places[run_id] = records.Look(
        records.Place.ENDED, outcome=records.Outcome({"2": {"images": []}})
    )
    assert door.studio.service.record(run_id).state.value == "queued"
    assert door.ask("GET", f"{RUNS}/{run_id}")[2]["state"] == "done"


def test_every_request_sees_to_it_that_unfinished_runs_are_followed(door: Door) -> None:
    door.ask("GET", RUNS)
    assert door.begun_to_follow == 0, "there is nothing to follow"
    run_id = door.start()
    assert door.begun_to_follow == 1
    for path in (RUNS, f"{RUNS}/{run_id}"):
        before = door.begun_to_follow
        door.ask("GET", path)
        assert door.begun_to_follow == before + 1
    door.studio.end(run_id)
    before = door.begun_to_follow
    door.ask("GET", RUNS)
    assert door.begun_to_follow == before


def test_every_field_reaches_the_order(door: Door, pack: Any) -> None:
    fields = {
        "prompt": PROMPT, "name": "a\nb", "workflow": {"nodes": []}, "wake_before": True,
        "sleep_after": 2, "on_use": "refuse", "time_limit_seconds": 5,
    }  # fmt: skip
    run_id = door.start(**fields)
    order = door.studio.service.record(run_id).order
    words = pack.module("nodes.requests.records")
    assert order == door.studio.records.RunOrder(
        PROMPT, "a?b", {"nodes": []}, True, 2, words.OnUse.REFUSE, 5.0
    )


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


BAD_BODIES = [
    (b"", "empty_body"),
    (b"[]", "invalid_json"),
    (b"null", "invalid_json"),
    ('{"prompt": {"1": {}}}'.encode("utf-16"), "invalid_json"),
    (b'{"prompt": {"1": {"inputs": {"x": NaN}}}}', "invalid_json"),
    ({}, "invalid_field"),
    ({"prompt": {}}, "invalid_field"),
    ({"prompt": None}, "invalid_field"),
    ({"prompt": [1]}, "invalid_field"),
    ({"prompt": PROMPT, "level": 1}, "unknown_field"),
    ({"prompt": PROMPT, "workflow": nested(101)}, "invalid_field"),
    ({"prompt": {"1": {"class_type": "X", "inputs": {"x": [nested(101)]}}}}, "invalid_field"),
    ({"prompt": PROMPT, "wake_before": 1}, "invalid_field"),
    ({"prompt": PROMPT, "sleep_after": True}, "invalid_field"),
    ({"prompt": PROMPT, "sleep_after": "1"}, "invalid_field"),
    ({"prompt": PROMPT, "on_use": "maybe"}, "invalid_field"),
    ({"prompt": PROMPT, "time_limit_seconds": 0}, "invalid_field"),
    ({"prompt": PROMPT, "time_limit_seconds": "9"}, "invalid_field"),
    ({"prompt": PROMPT, "time_limit_seconds": 10**9}, "invalid_field"),
    ({"prompt": PROMPT, "name": ""}, "invalid_field"),
    ({"prompt": PROMPT, "name": "\ud800"}, "invalid_field"),
    ({"prompt": PROMPT, "workflow": []}, "invalid_field"),
]


@pytest.mark.parametrize(("body", "code"), BAD_BODIES)
def test_a_body_that_is_not_as_described_is_refused_and_nothing_is_queued(
    door: Door, body: Any, code: str
) -> None:
    status, _, answer = door.ask("POST", RUNS, body)
    assert (status, answer["error"]["code"]) == (400, code), answer
    assert door.studio.host.places == {}


def test_as_deep_as_it_may_be_is_taken(door: Door) -> None:
    status, _, answer = door.ask("POST", RUNS, {"prompt": PROMPT, "workflow": nested(100)})
    assert status == 202, answer


def test_a_body_that_is_too_long_is_refused(door: Door, pack: Any) -> None:
    limit = pack.module("nodes.http.run_table").RUN_BODY_LIMIT_BYTES
    status, _, answer = door.ask("POST", RUNS, b'{"prompt": "' + b"x" * limit + b'"}')
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    # More than orders to sleep may have.
    padded = json.dumps({"prompt": PROMPT}).encode() + b" " * 200_000
    assert door.ask("POST", RUNS, padded)[0] == 202


def test_what_comfyui_refuses_is_422_with_its_own_account(door: Door) -> None:
    errors = {"1": {"errors": [{"message": "no"}]}}
    refusal = door.studio.records.PromptRefusedError("node 1 (Load): no", errors)
    door.studio.host.refuse = refusal
    status, _, answer = door.ask("POST", RUNS, {"prompt": PROMPT})
    assert (status, answer["error"]["code"], answer["node_errors"]) == (
        422, "prompt_refused", errors,
    )  # fmt: skip
    assert door.ask("GET", RUNS)[2]["runs"] == []


def test_a_full_queue_is_409(door: Door, pack: Any) -> None:
    for _ in range(pack.module("nodes.runs.service").MOST_UNFINISHED):
        door.studio.start()
    status, _, answer = door.ask("POST", RUNS, {"prompt": PROMPT})
    assert (status, answer["error"]["code"]) == (409, "queue_full")


@pytest.mark.parametrize("path", ["x", "..%2F..%2Fx", "%00", "a" * 3000])
@pytest.mark.parametrize(("method", "more"), [("GET", ""), ("DELETE", ""), ("GET", "/events")])
def test_an_unknown_id_is_404(door: Door, path: str, method: str, more: str) -> None:
    status, _, answer = door.ask(method, f"{RUNS}/{path}{more}")
    assert (status, answer["error"]["code"]) == (404, "unknown_run")


@pytest.mark.parametrize(("method", "path", "allow"), [
    ("PUT", RUNS, "POST, GET, HEAD"), ("POST", f"{RUNS}/x", "GET, HEAD, DELETE"),
    ("DELETE", f"{RUNS}/x/events", "GET, HEAD"), ("DELETE", RUNS, "POST, GET, HEAD"),
])  # fmt: skip
def test_another_method_is_405(door: Door, method: str, path: str, allow: str) -> None:
    status, headers, answer = door.ask(method, path)
    assert (status, answer["error"]["code"], headers["Allow"]) == (405, "method_not_allowed", allow)


@pytest.mark.parametrize(("more", "status"), [
    ({"Content-Type": "text/plain"}, 415),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Host": "evil.example"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"X-Forwarded-For": "1.2.3.4"}, 403),
])  # fmt: skip
def test_who_may_not_sleep_models_may_not_run_workflows(
    door: Door, more: dict[str, str], status: int
) -> None:
    assert door.ask("POST", RUNS, {"prompt": PROMPT}, **more)[0] == status
    assert door.studio.host.places == {}
    if status == 403:
        run_id = door.start()
        assert door.ask("DELETE", f"{RUNS}/{run_id}", **more)[0] == status
        assert door.studio.host.stopped == []


def test_from_elsewhere_with_the_token_only(door: Door) -> None:
    run_id = door.start()
    door.peer = "192.168.1.77"
    assert door.ask("DELETE", f"{RUNS}/{run_id}")[0] == 403
    door.environment["COURIER_TOKEN"] = TOKEN
    assert door.ask("DELETE", f"{RUNS}/{run_id}")[0] == 401
    assert door.ask("POST", RUNS, {"prompt": PROMPT}, Authorization="Bearer no")[0] == 401
    assert door.ask("DELETE", f"{RUNS}/{run_id}", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert door.ask("GET", f"{RUNS}/{run_id}")[0] == 200  # reading is open


def test_too_many_in_a_short_time_is_429(door: Door, pack: Any) -> None:
    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        body = json.dumps({"prompt": PROMPT})
        return [
            (await client.post(RUNS, data=body, headers=JSON)).status
            for _ in range(pack.module("nodes.http.guards").BURST + 1)
        ]

    statuses = door.talk(conversation)
    assert statuses == [202] * (len(statuses) - 1) + [429]


def test_fields_in_the_address_are_refused(door: Door) -> None:
    assert door.ask("POST", f"{RUNS}?sleep_after=1", {"prompt": PROMPT})[0] == 400


def events_of(text: str) -> list[tuple[int, str, Any]]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] != ":")
        if fields:
            found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found


def test_events_are_sent_until_the_end_and_go_on_from_the_last_id(door: Door) -> None:
    run_id = door.start()
    studio = door.studio

    async def conversation(client: TestClient[Any, Any]) -> Any:
        async with client.get(f"{RUNS}/{run_id}/events") as reply:
            assert reply.headers["Content-Type"] == "text/event-stream"
            first = await reply.content.readuntil(b"\n\n")
            studio.move(run_id, "RUNNING")
            second = await reply.content.readuntil(b"\n\n")
            studio.end(run_id)
            rest = await reply.read()
        headers = {"Last-Event-ID": "2"}
        async with client.get(f"{RUNS}/{run_id}/events", headers=headers) as reply:
            again = await reply.text()
        return (first + second + rest).decode(), again

    told, again = door.talk(conversation)
    events = events_of(told)
    assert [(number, kind) for number, kind, _ in events] == [
        (1, "state"),
        (2, "state"),
        (3, "end"),
    ]
    assert [run["state"] for _, _, run in events] == ["queued", "running", "done"]
    assert events_of(again) == events[2:]


def test_a_silent_stream_is_kept_alive(door: Door, pack: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(pack.module("nodes.http.run_routes"), "KEEP_ALIVE_SECONDS", 0.0)
    run_id = door.start()

    async def conversation(client: TestClient[Any, Any]) -> Any:
        async with client.get(f"{RUNS}/{run_id}/events") as reply:
            await reply.content.readuntil(b"\n\n")
            return await reply.content.readuntil(b"\n\n")

    assert door.talk(conversation) == b": still here\n\n"


@pytest.mark.parametrize("value", ["", "x", "-1", "9" * 40, "\u0663"])
def test_a_last_event_id_that_is_none_begins_at_the_beginning(pack: Any, value: str) -> None:
    assert pack.module("nodes.http.run_routes").last_number({"Last-Event-ID": value}) == 0


def test_a_client_that_goes_away_while_it_asks_leaves_a_run_that_is_followed(door: Door) -> None:
    entered, gone, may_go, queued = (asyncio.Event() for _ in range(4))
    submit = door.studio.host.submit

    async def slow(prompt_id: str, order: Any) -> None:
        entered.set()
        await may_go.wait()
        await submit(prompt_id, order)
        asyncio.get_running_loop().call_soon(queued.set)

    door.studio.host.submit = slow  # type: ignore[method-assign]

    @web.middleware
    async def watch(request: web.Request, handler: Any) -> Any:
        try:
            return await handler(request)
        except asyncio.CancelledError:
            gone.set()
            raise

    door.middlewares.append(watch)

    async def conversation(client: TestClient[Any, Any]) -> None:
        body = json.dumps({"prompt": PROMPT})
        asking = asyncio.create_task(client.post(RUNS, data=body, headers=JSON))
        await entered.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await gone.wait()
        may_go.set()
        await queued.wait()

    door.talk(conversation)
    assert len(door.studio.service.records()) == 1


def test_so_many_listeners_and_no_more(door: Door, pack: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(pack.module("nodes.http.run_routes"), "MOST_LISTENERS", 1)
    run_id = door.start()

    async def conversation(client: TestClient[Any, Any]) -> Any:
        async with client.get(f"{RUNS}/{run_id}/events") as reply:
            await reply.content.readuntil(b"\n\n")
            async with client.get(f"{RUNS}/{run_id}/events") as other:
                return other.status, other.headers["Retry-After"]

    assert door.talk(conversation) == (503, "5")


def test_a_client_that_does_not_read_is_not_waited_for(pack: Any, monkeypatch: Any) -> None:
    module = pack.module("nodes.http.run_routes")
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.05)

    class Stuck:
        async def write(self, _: bytes) -> None:
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(module._write(Stuck(), b"x"))


def large(count: int) -> bytes:
    """A workflow of more than a small body's length."""
    return json.dumps({"prompt": PROMPT, "workflow": {"a": ["x" * 20] * count}}).encode()


class Parser:
    """The parser, with a gate: how many bodies are in it, and in which threads."""

    def __init__(self, pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        module = pack.module("nodes.http.large_bodies")
        self._parse = module.parse_object
        self.may_parse = threading.Event()
        self.entered = threading.Semaphore(0)
        self.inside = self.most_inside = 0
        self.threads: set[str] = set()
        monkeypatch.setattr(module, "parse_object", self)

    def __call__(self, body: bytes, decoder: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.entered.release()
        assert self.may_parse.wait(30)
        self.inside -= 1
        return self._parse(body, decoder)


def test_large_bodies_are_parsed_one_by_one_beside_the_loop_and_others_are_answered(
    door: Door, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = Parser(pack, monkeypatch)

    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        async def post() -> int:
            async with client.post(RUNS, data=io.BytesIO(large(1000)), headers=JSON) as reply:
                return reply.status

        tasks = [asyncio.create_task(post()) for _ in range(8)]
        assert await asyncio.to_thread(parser.entered.acquire, True, 20)
        async with client.get(RUNS) as reply:
            assert reply.status == 200, "while one body stands in the parser"
        assert await post() == 429, "more than so many are not held"
        parser.may_parse.set()
        return [await task for task in tasks]

    try:
        assert door.talk(conversation) == [202] * 8
    finally:
        parser.may_parse.set()
    assert parser.most_inside == 1
    assert parser.threads == {"courier-body"}
    assert len(door.studio.service.records()) == 8


def test_a_body_of_more_lists_than_the_collector_can_look_at_is_refused(door: Door) -> None:
    body = b'{"prompt": {"a": [' + b"[]," * 100_000 + b"1]}}"
    status, _, answer = door.ask("POST", RUNS, body)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert "100,000 lists and objects" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"a": NaN}', "invalid_json"),
        ('{"a": 1, "a": 2}', "invalid_json"),
        ('{"a": 1e999}', "invalid_json"),
        ('{"a": [1, 2}', "invalid_json"),
        ('{"a": ' + "[" * 20_000, "invalid_json"),
        ('{"a": 1}', "unknown_field"),
        ('["a"]', "invalid_json"),
    ],
)
def test_a_large_body_is_refused_as_a_small_one_is(door: Door, text: str, code: str) -> None:
    answers = [door.ask("POST", RUNS, (text + " " * more).encode()) for more in (0, 40_000)]
    small, big = [(status, answer["error"]) for status, _, answer in answers]
    assert small == big
    assert (small[0], small[1]["code"]) == (400, code)


def test_a_body_that_stops_coming_is_ended(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door.pack.module("nodes.http.bodies"), "SILENCE_SECONDS", 0.05)

    async def conversation(client: TestClient[Any, Any]) -> bytes:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        head = f"POST {RUNS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50000\r\n"
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n{")
        answer = await reader.readuntil(b"}}")
        writer.close()
        return answer

    answer = door.talk(conversation)
    assert b"400" in answer
    assert b"body_broken" in answer
