"""The door to budgets: what arrives, what is refused, and who may."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

PLAN, BUDGET = "/courier/v1/plan", "/courier/v1/budget"
BOTH = [PLAN, BUDGET]
JSON = {"Content-Type": "application/json"}
GIB = 2**30


@pytest.fixture
def ask(pack: Any, service: Any, control: Any, budgets: Any) -> Any:
    """``ask(path, body, headers={}, times=1)``: (status, JSON) of the last of so many requests."""

    async def talk(path: str, body: Any, headers: dict[str, str], times: int) -> tuple[int, Any]:
        guards = pack.module("nodes.http.guards")
        app = web.Application()
        made = guards.Guards({}, rate=guards.RateLimit(clock=lambda: 0.0))
        register = pack.module("nodes.http.register").register_routes
        assert register(app.router, service, control, made, budgets) is True
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with TestClient(TestServer(app)) as client:
            for _ in range(times):
                answer = await client.post(path, data=data, headers={**JSON, **headers})
            return answer.status, await answer.json()

    def run(
        path: str, body: Any, headers: dict[str, str] | None = None, times: int = 1
    ) -> tuple[int, Any]:
        return asyncio.run(talk(path, body, headers or {}, times))

    return run


@pytest.fixture
def words(pack: Any) -> Any:
    return pack.module("nodes.requests.records")


@pytest.mark.parametrize(
    ("body", "device", "host"),
    [
        ({}, "keep", "keep"),
        ({"device_gib": None, "host_gib": None}, None, None),
        ({"device_gib": 11.25}, 11.25 * GIB, "keep"),
        ({"device_gib": 1024, "host_gib": 0}, 1024 * GIB, 0),
        ({"device_gib": 1e-12, "host_gib": 1e-300}, 1, 1),
        ({"host_gib": 4096}, "keep", 4096 * GIB),
    ],
)
@pytest.mark.parametrize("path", BOTH)
def test_figures_arrive_as_bytes_and_what_is_left_out_is_kept(
    ask: Any, budgets: Any, words: Any, path: str, body: Any, device: Any, host: Any
) -> None:
    status, answer = ask(path, {"model": "wan-1", **body})
    assert status == 200, answer
    ((name, order),) = budgets.asked
    assert name == path.rpartition("/")[2]
    keep = {"keep": words.KEEP}
    assert order.device_bytes == keep.get(device, device)
    assert order.host_bytes == keep.get(host, host)
    assert order.when is words.When.NOW


def test_a_budget_may_wait_for_the_queue_and_a_plan_has_no_need_to(
    ask: Any, budgets: Any, words: Any
) -> None:
    assert ask(BUDGET, {"model": "wan-1", "when": "idle"})[0] == 200
    assert budgets.asked[0][1].when is words.When.IDLE
    status, answer = ask(PLAN, {"model": "wan-1", "when": "idle"})
    assert (status, answer["error"]["code"]) == (400, "unknown_field")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "model has to be there"),
        ({"model": None}, "model has to be the id of a model, not null"),
        ({"model": ["wan-1"]}, "model has to be the id of a model, not a list"),
        ({"model": ""}, "model is an id that is not 1 to 200 characters"),
        ({"model": "wan-1", "device_gib": 0}, "device_gib is 0, under which nothing runs"),
        ({"model": "wan-1", "device_gib": -1}, "device_gib has to be between 0 and 1024"),
        ({"model": "wan-1", "device_gib": 1025}, "device_gib has to be between 0 and 1024"),
        ({"model": "wan-1", "device_gib": "12"}, "device_gib has to be a number of GiB or null"),
        ({"model": "wan-1", "device_gib": True}, "device_gib has to be a number of GiB or null"),
        ({"model": "wan-1", "host_gib": -1}, "host_gib has to be between 0 and 4096, or null"),
        ({"model": "wan-1", "host_gib": [1]}, "host_gib has to be a number of GiB or null"),
        ({"model": "wan-1", "vram_gib": 1}, "no field is called 'vram_gib'; there are model"),
    ],
)
@pytest.mark.parametrize("path", BOTH)
def test_what_cannot_be_meant_is_refused_and_named(
    ask: Any, budgets: Any, path: str, body: Any, sentence: str
) -> None:
    status, answer = ask(path, body)
    assert status == 400
    assert answer["error"]["message"].startswith(sentence)
    assert budgets.asked == []


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content-Type": "text/plain"}, 415, "wrong_content_type"),
        ({"Origin": "http://evil.example"}, 403, "foreign_origin"),
        ({"Host": "evil.example"}, 403, "not_local"),
    ],
)
def test_strangers_are_refused_as_they_are_for_orders(
    ask: Any, budgets: Any, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    found, answer = ask(path, {"model": "wan-1"}, headers)
    assert (found, answer["error"]["code"]) == (status, code)
    assert budgets.asked == []


@pytest.mark.parametrize("path", BOTH)
def test_too_many_at_once_are_refused(ask: Any, path: str) -> None:
    assert ask(path, {"model": "wan-1"}, times=10)[0] == 200
    status, answer = ask(path, {"model": "wan-1"}, times=11)
    assert (status, answer["error"]["code"]) == (429, "too_many_requests")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        ("BusyError", 409, "busy"),
        ("BudgetTooSmallError", 409, "budget_too_small"),
        ("CancelledError", 409, "cancelled"),
        ("UnknownModelError", 404, "unknown_model"),
    ],
)
def test_what_goes_wrong_has_a_code(
    ask: Any, budgets: Any, words: Any, error: str, status: int, code: str
) -> None:
    budgets.fail_with = getattr(words, error)("a sentence")
    found, answer = ask(BUDGET, {"model": "wan-1"})
    assert (found, answer["error"]["code"]) == (status, code)
    assert answer["error"]["message"] == "a sentence"
