from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

PATH = "/courier/v1/status"


@pytest.fixture
def routes(pack: Any) -> Any:
    return pack.module("nodes.http.register")


def ask(
    table: web.RouteTableDef, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], str]:
    """Start a server with ``table`` and ask it once. Returns: status, headers, body."""

    async def talk() -> tuple[int, dict[str, str], str]:
        app = web.Application()
        app.add_routes(table)
        async with TestClient(TestServer(app)) as client:
            answer = await client.request(method, PATH, headers=headers)
            return answer.status, dict(answer.headers), await answer.text()

    return asyncio.run(talk())


def test_status_is_given_as_json(routes: Any, service: Any) -> None:
    table = web.RouteTableDef()
    assert routes.register_routes(table, service) is True
    status, headers, body = ask(table)
    assert status == 200
    assert headers["Content-Type"] == "application/json; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    assert json.loads(body)["boot_id"] == service.boot_id


def test_registering_twice_is_registering_once(routes: Any, service: Any) -> None:
    table = web.RouteTableDef()
    assert routes.register_routes(table, service) is True
    assert routes.register_routes(table, service) is True
    assert len(table) == 1
    assert ask(table)[0] == 200


def test_second_copy_of_the_pack_warns_once_and_the_server_starts(
    routes: Any, service: Any, other_pack: Any, caplog: pytest.LogCaptureFixture
) -> None:
    table = web.RouteTableDef()
    assert routes.register_routes(table, service) is True
    other_service = other_pack.module("nodes.models.registry").CourierService()
    with caplog.at_level(logging.WARNING):
        assert (
            other_pack.module("nodes.http.register").register_routes(table, other_service) is False
        )
    (record,) = caplog.records
    message = record.getMessage()
    assert f"{PATH} is registered already by {routes.__file__}" in message
    assert "is the pack installed twice?" in message
    assert len(table) == 1
    assert json.loads(ask(table)[2])["boot_id"] == service.boot_id


def test_path_that_a_stranger_took_is_left_to_him(
    routes: Any, service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    table = web.RouteTableDef()

    @table.get(PATH)
    async def stranger(request: web.Request) -> web.Response:
        return web.Response(text="mine")

    with caplog.at_level(logging.WARNING):
        assert routes.register_routes(table, service) is False
    assert __file__ in caplog.text
    assert ask(table)[2] == "mine"


def test_routes_are_added_to_a_router_too(routes: Any, service: Any) -> None:
    app = web.Application()
    assert routes.register_routes(app.router, service) is True
    assert routes.register_routes(app.router, service) is True
    assert [resource.canonical for resource in app.router.resources()] == [PATH]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_other_methods_are_refused_in_json(routes: Any, service: Any, method: str) -> None:
    table = web.RouteTableDef()
    routes.register_routes(table, service)
    status, headers, body = ask(table, method)
    assert status == 405
    assert headers["Allow"] == "GET, HEAD"
    assert json.loads(body)["error"] == {
        "code": "method_not_allowed",
        "message": f"{method} is not possible here; the status is read with GET",
    }


def test_who_reads_with_the_id_of_its_websocket_asks_for_events(routes: Any, service: Any) -> None:
    table, heard = web.RouteTableDef(), []
    routes.register_routes(table, service, listen=lambda *who: heard.append(who))
    assert ask(table, headers={"Courier-Client": "page-1"})[0] == 200
    assert ask(table)[0] == 200
    assert heard == [("page-1", "127.0.0.1")]


def test_head_is_answered(routes: Any, service: Any) -> None:
    table = web.RouteTableDef()
    routes.register_routes(table, service)
    assert ask(table, "HEAD")[0] == 200


class BrokenService:
    def status(self) -> Any:
        raise OSError(5, "input/output error", "/home/me/secret.safetensors")


def test_failure_is_json_without_a_path_and_the_log_has_the_rest(
    routes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    table = web.RouteTableDef()
    routes.register_routes(table, BrokenService())
    status, headers, body = ask(table)
    assert status == 500
    assert headers["Content-Type"].startswith("application/json")
    assert json.loads(body)["error"] == {
        "code": "status_failed",
        "message": "the status could not be read (OSError); ComfyUI's log has the details",
    }
    assert "secret.safetensors" in caplog.text


def test_status_names_no_path(routes: Any, service: Any, backend: Any, make_engine: Any) -> None:
    engine = make_engine()
    service.register(engine, "m", "/home/me/models/m.safetensors", backend)
    table = web.RouteTableDef()
    routes.register_routes(table, service)
    assert "/home" not in ask(table)[2]
