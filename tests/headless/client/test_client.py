"""Both clients against Courier's own routes on loopback, and against what is no Courier."""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from ...courier_command import headless_module
from ...nodes.conftest import FakeControl, load_pack
from ...nodes.runs.test_service import PROMPT, Studio
from ...serving import serving
from ..conftest import Headless


class Place:
    """Courier's routes, with a queue that the test moves; and who asked for what."""

    def __init__(self) -> None:
        self.pack = pack = load_pack()
        under_way = pack.module("nodes.requests.pending").OrderList()
        self.control = FakeControl(
            pack.module("nodes.requests.records").UnknownModelError, under_way
        )
        self.studio = Studio(pack, self.control)
        guards = pack.module("nodes.http.guards")
        self.environment: dict[str, str] = {}
        made = guards.Guards(self.environment, rate=guards.RateLimit(burst=10**6))
        service = pack.module("nodes.models.registry").CourierService()
        self.app = web.Application()
        routes = pack.module("nodes.http.register")
        assert routes.register_routes(self.app.router, service, self.control, made)
        door = pack.module("nodes.http.run_routes").RunDoor(self.studio.service, made, lambda: None)
        for path in door.paths():
            self.app.router.add_route("*", path.spec.path, path.handle)


@pytest.fixture(scope="module")
def place() -> Place:
    return Place()


@pytest.fixture(scope="module")
def address(place: Place) -> Iterator[str]:
    with serving(place.app) as address:
        yield address


@pytest.fixture
def client(headless: Headless, address: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("COURIER_TOKEN", raising=False)
    return headless.courier.CourierClient(address)


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, headless: Headless, address: str) -> Callable[..., Any]:
    """``ask("sleep", level=2)``: the method of either client, called to its end."""
    courier = headless.courier

    def call(name: str, *args: Any, **more: Any) -> Any:
        if request.param == "sync":
            return getattr(courier.CourierClient(address), name)(*args, **more)

        async def run() -> Any:
            async with courier.AsyncCourierClient(address) as client:
                return await getattr(client, name)(*args, **more)

        return asyncio.run(run())

    return call


def test_status_and_models(ask: Callable[..., Any]) -> None:
    assert ask("status")["models"] == []
    assert [model["id"] for model in ask("models")] == ["wan-1", "sd3-2"]


def test_sleep_and_wake_send_what_was_meant(ask: Callable[..., Any], place: Place) -> None:
    assert ask("sleep", ["wan-1"], level=2, when="idle", on_use="wake")["action"] == "sleep"
    order = place.control.orders[-1]
    assert (order.models, order.level, order.when.value, order.on_use.value) == (
        ("wan-1",), 2, "idle", "wake",
    )  # fmt: skip
    assert ask("wake")["action"] == "wake"
    assert place.control.orders[-1].models is None
    ask("sleep", "sd3-2")
    assert place.control.orders[-1].models == ("sd3-2",), "a word is no row of letters"
    ask("wake", models="all")
    assert place.control.orders[-1].models is None


def test_a_refusal_has_the_servers_words(ask: Callable[..., Any], headless: Headless) -> None:
    with pytest.raises(headless.courier.RefusedError) as caught:
        ask("sleep", ["nobody"])
    error = caught.value
    assert (error.status, error.code, error.exit_status) == (404, "unknown_model", 8)
    with pytest.raises(headless.courier.RefusedError, match="level has to be 1 or 2"):
        ask("sleep", level=3)
    with pytest.raises(headless.courier.RefusedError) as caught:
        ask("run", "../../x")
    assert caught.value.code == "unknown_run"


def test_a_run_is_begun_read_listed_and_cancelled(
    ask: Callable[..., Any], headless: Headless, place: Place
) -> None:
    options = headless.courier.RunOptions(name="x", sleep_after=2, time_limit_seconds=9)
    run = ask("start", PROMPT, options)
    assert (run.state, run.name, run.nodes, run.has_ended) == ("queued", "x", 2, False)
    order = place.studio.service.record(run.id).order
    assert (order.sleep_after, order.time_limit_seconds, order.on_use.value) == (2, 9.0, "wake")
    read = ask("run", run.id)
    assert (read.id, read.state, read.name, read.nodes) == (run.id, "queued", "x", 2)
    assert ask("runs")[0].id == run.id
    assert ask("cancel", run.id).id == run.id
    place.studio.end(run.id)


def test_a_large_workflow_is_sent(ask: Callable[..., Any], place: Place) -> None:
    run = ask("start", {"1": {"class_type": "X", "inputs": {"text": "x" * (3 << 20)}}})
    assert run.state == "queued"
    place.studio.end(run.id)


def test_waiting_ends_with_the_run(
    ask: Callable[..., Any], headless: Headless, place: Place
) -> None:
    run = ask("start", PROMPT)
    ender = threading.Timer(0.3, lambda: place.studio.end(run.id))
    ender.start()
    found = ask("wait", run.id)
    ender.join()
    assert (found.state, found.is_over) == ("done", True)
    for error, kind in (("node_failed", "RunFailedError"), ("interrupted", "RunCancelledError")):
        run = ask("start", PROMPT)
        place.studio.end(run.id, error, interrupted=error == "interrupted")
        with pytest.raises(getattr(headless.courier, kind), match="because") as caught:
            ask("wait", run.id)
        assert caught.value.run.id == run.id


def test_events_are_followed_and_a_broken_connection_is_taken_up_where_it_was(
    client: Any, place: Place, monkeypatch: pytest.MonkeyPatch, headless: Headless
) -> None:
    module = headless.module("client.blocking")
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
    run = client.start(PROMPT)
    times = 2 * module.TRIES  # each brings something, so none of them is a last one
    for ahead in range(times):
        place.studio.move(run.id, "QUEUED", ahead=ahead + 1)
    place.studio.move(run.id, "RUNNING")
    seen = []
    send, broken = client.send, []

    def breaks(call: Any, *args: Any) -> Any:
        answer = send(call, *args)
        if call.path.endswith("/events") and len(broken) < times:
            broken.append(args[1]["Last-Event-ID"])
            first = [next(iter(answer)) for _ in range(4)]  # one event

            class Broken:
                def __enter__(self) -> Any:
                    return self

                def __exit__(self, *_: object) -> None:
                    answer.close()

                def __iter__(self) -> Iterator[bytes]:
                    yield from first
                    raise ConnectionResetError("gone")

            return Broken()
        return answer

    client.send = breaks
    for event in client.follow(run.id):
        seen.append((event.number, event.run.state))
        if event.run.state == "running":
            place.studio.end(run.id)
    states = ["queued"] * (times + 1) + ["running", "done"]
    assert seen == list(enumerate(states, start=1))
    assert broken == [str(number) for number in range(times)]


def test_where_no_more_may_listen_the_run_itself_is_asked(
    ask: Callable[..., Any], headless: Headless, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that answers is not lost, however often it has no place."""
    for name in ("blocking", "async_client"):
        monkeypatch.setattr(headless.module(f"client.{name}"), "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(place.pack.module("nodes.http.run_routes"), "MOST_LISTENERS", 0)
    run = ask("start", PROMPT)
    # By then it has been refused a place far more often than a lost server is tried.
    ender = threading.Timer(1.0, lambda: place.studio.end(run.id))
    ender.start()
    assert ask("wait", run.id).state == "done"
    ender.join()


def test_nobody_there_is_one_sentence(headless: Headless) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    courier = headless.courier
    with pytest.raises(courier.ConnectionLostError, match="is ComfyUI running there") as caught:
        courier.CourierClient(nobody).status()
    assert caught.value.exit_status == 5

    async def run() -> Any:
        async with courier.AsyncCourierClient(nobody) as client:
            await client.status()

    with pytest.raises(courier.ConnectionLostError, match="is ComfyUI running there"):
        asyncio.run(run())


def test_a_server_that_ends_in_a_run_is_told_as_lost(
    headless: Headless, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("blocking", "async_client"):
        monkeypatch.setattr(headless.module(f"client.{name}"), "FIRST_PAUSE_SECONDS", 0.01)
    place = Place()
    with serving(place.app) as address:
        client = headless.courier.CourierClient(address)
        run = client.start(PROMPT)
        events = client.follow(run.id)
        next(events)
    with pytest.raises(headless.courier.ConnectionLostError, match="does not answer any more"):
        list(events)


def test_what_is_no_courier_is_said(headless: Headless) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>", status=200 if request.path.endswith("models") else 404)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", page)
    with serving(app) as address:
        client = headless.courier.CourierClient(address)
        with pytest.raises(headless.courier.RefusedError, match="no Courier answers there"):
            client.status()
        with pytest.raises(headless.courier.RefusedError, match="no JSON object"):
            client.models()


NOT_OURS = [
    [],
    7,
    "x",
    {},
    {"models": 7, "runs": {}},
    {"id": "x"},
    {"runs": [7]},
    {"id": "x", "state": "done", "outputs": []},
    {"id": "x", "state": "running", "nodes": "many"},
    {"id": "x", "state": "running", "nodes": float("inf")},
]


@pytest.mark.parametrize("answer", NOT_OURS)
@pytest.mark.parametrize(("name", "arguments"), [("run", ("x",)), ("runs", ()), ("models", ())])
@pytest.mark.parametrize("kind", ["CourierClient", "AsyncCourierClient"])
def test_answers_of_another_form_are_refused(
    headless: Headless, kind: str, name: str, arguments: tuple[str, ...], answer: Any
) -> None:
    calls, courier = headless.module("client.calls"), headless.courier
    client = getattr(courier, kind)("http://127.0.0.1:9")
    is_async = kind == "AsyncCourierClient"
    data = json.dumps(answer).encode()

    def now(call: Any) -> Any:
        return calls.read_answer(call, 200, data)

    async def later(call: Any) -> Any:
        return now(call)

    def ask() -> None:
        found = getattr(client, name)(*arguments)
        if is_async:
            asyncio.run(found)

    client.call = later if is_async else now
    with pytest.raises(courier.RefusedError, match=r"as new as this client|no JSON object"):
        ask()


def test_numbers_of_events_and_depth_have_an_end(headless: Headless) -> None:
    calls, refused = headless.module("client.calls"), headless.courier.RefusedError
    reader = calls.EventReader()
    list(reader.feed(b"id: " + b"9" * 5000))
    assert reader.last_number == 0
    with pytest.raises(refused, match="no JSON object"):
        calls.read_answer(calls.status(), 200, b'{"a":' + b"[" * 100_000)


@pytest.mark.parametrize("data", ["{", "[]", "7", '{"id": "x"}'])
def test_an_event_of_another_form_is_refused(headless: Headless, data: str) -> None:
    reader = headless.module("client.calls").EventReader()
    assert list(reader.feed(f"data: {data}".encode())) == []
    with pytest.raises(headless.courier.RefusedError, match="something that is no run"):
        list(reader.feed(b""))


@pytest.mark.parametrize(("given", "address"), [
    ("127.0.0.1:8188", "http://127.0.0.1:8188"),
    ("http://host/", "http://host"),
    ("https://host:1/prefix/", "https://host:1/prefix"),
    ("http://[::1]:8188", "http://[::1]:8188"),
])  # fmt: skip
def test_addresses_as_people_write_them(headless: Headless, given: str, address: str) -> None:
    assert headless.courier.CourierClient(given).address == address


@pytest.mark.parametrize("given", ["ftp://x", "http://", "http://x:port", "http://x:99999", "://"])
def test_what_is_no_address_is_refused(headless: Headless, given: str) -> None:
    with pytest.raises(headless.courier.UsageError, match="is no address of a server"):
        headless.courier.CourierClient(given)


def test_the_default_address_and_the_token_come_from_the_environment(
    headless: Headless, place: Place, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COURIER_SERVER", raising=False)
    assert headless.courier.CourierClient().address == "http://127.0.0.1:8188"
    monkeypatch.setenv("COURIER_SERVER", address)
    monkeypatch.setenv("COURIER_TOKEN", "secret")
    calls = headless.module("client.calls")
    assert calls.headers_of(calls.status(), None)["Authorization"] == "Bearer secret"
    assert calls.headers_of(calls.status(), "other")["Authorization"] == "Bearer other"
    assert headless.courier.CourierClient().status()["models"] == []


def test_figures_that_stay_as_they_are_are_not_sent(headless: Headless) -> None:
    calls, keep = headless.module("client.calls"), headless.courier.KEEP
    assert calls.plan("m", keep, keep).body == {"model": "m"}
    assert calls.plan("m", 3.5, None).body == {"model": "m", "device_gib": 3.5, "host_gib": None}
    assert calls.budget("m", keep, 0, "idle").body == {"model": "m", "host_gib": 0, "when": "idle"}


def test_a_body_that_is_no_json_is_refused_before_it_is_sent(
    client: Any, headless: Headless
) -> None:
    for value in (float("nan"), object()):
        with pytest.raises(headless.courier.UsageError, match="cannot be written as JSON"):
            client.start({"1": {"class_type": "X", "inputs": {"x": value}}})


def test_files_of_a_run(headless: Headless) -> None:
    run = headless.courier.Run.from_json({
        "id": "x", "state": "done", "outputs": {
            "9": {"images": [{"filename": "a.png", "subfolder": "s", "type": "temp"}, {"x": 1}, 7]},
            "8": {"text": ["hello"], "gifs": [{"filename": "b.mp4"}], "odd": None}, "7": None,
        },
    })  # fmt: skip
    files = [(f.node_id, f.filename, f.subfolder, f.type) for f in run.files()]
    assert files == [("9", "a.png", "s", "temp"), ("8", "b.mp4", "", "output")]


def test_events_are_read_however_they_are_written(headless: Headless) -> None:
    reader = headless.module("client.calls").EventReader()
    data = json.dumps({"id": "x", "state": "running"})
    lines = [": still here", "", "id: 4", "event: progress", f"data: {data}", "", "", "id: x", ""]
    events = [event for line in lines for event in reader.feed(f"{line}\r\n".encode())]
    assert [(e.number, e.kind, e.run.state) for e in events] == [(4, "progress", "running")]
    assert reader.last_number == 4


@pytest.mark.parametrize("token", ["s3cret-part1\nX", "s3cret\u4e16", "s3cret\x00", "s3cret\xe9"])
def test_a_token_that_no_header_can_hold_is_refused_without_a_word_of_it(
    headless: Headless, token: str
) -> None:
    with pytest.raises(headless.courier.UsageError) as caught:
        headless.courier.CourierClient("127.0.0.1:1", token=token).status()
    assert "the token has characters" in str(caught.value)
    assert "cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("name", ["status", "models", "sleep", "download", "follow"])
@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_and_takes_the_token_nowhere(
    headless: Headless, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    monkeypatch.setenv("COURIER_TOKEN", "a-secret")
    records = headless_module("client.records")
    seen: list[Any] = []

    async def elsewhere(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({})

    stranger, server = web.Application(), web.Application()
    stranger.router.add_route("*", "/{path:.*}", elsewhere)
    with serving(stranger) as other:

        async def send_on(request: web.Request) -> web.Response:
            return web.Response(status=code, headers={"Location": other + request.path})

        server.router.add_route("*", "/{path:.*}", send_on)
        with serving(server) as address:
            args = {
                "download": [records.OutputFile("a.png", "", "output")],
                "follow": ["x"],
            }.get(name, [])

            def now() -> None:
                answer = getattr(headless.courier.CourierClient(address), name)(*args)
                if name == "follow":
                    next(answer)

            async def later() -> None:
                async with headless.courier.AsyncCourierClient(address) as client:
                    answer = getattr(client, name)(*args)
                    await (anext(answer) if name == "follow" else answer)

            for call in (now, lambda: asyncio.run(later())):
                with pytest.raises(headless.courier.RefusedError, match="another address") as got:
                    call()
                assert got.value.code == "redirected"
                assert "a-secret" not in str(got.value)
    assert seen == []


def test_the_token_comes_from_a_file_that_the_environment_names(
    headless: Headless, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    calls = headless_module("client.calls")
    monkeypatch.delenv("COURIER_TOKEN", raising=False)
    file = tmp_path / "token"
    monkeypatch.setenv("COURIER_TOKEN_FILE", str(file))
    with pytest.raises(headless.courier.UsageError, match=r"cannot be read .*token"):
        calls.headers_of(calls.status(), None)
    file.write_text(" \n")
    with pytest.raises(headless.courier.UsageError, match="is empty"):
        calls.headers_of(calls.status(), None)
    file.write_text("\ufeffa-token\r\n", encoding="utf-8")
    assert calls.headers_of(calls.status(), None)["Authorization"] == "Bearer a-token"
    monkeypatch.setenv("COURIER_TOKEN", "first")
    assert calls.headers_of(calls.status(), None)["Authorization"] == "Bearer first"
