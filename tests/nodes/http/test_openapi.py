"""The OpenAPI document: it holds what the routes do, and a fuzzer finds no answer beside it."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from aiohttp import web
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from ...serving import serving
from ..runs.test_service import Studio

DOCUMENT = "/courier/v1/openapi.json"
EXAMPLES = 60


@pytest.fixture
def table(pack: Any) -> Any:
    return pack.module("nodes.http.table")


@pytest.fixture
def routes(pack: Any, table: Any) -> Any:
    """All that there may be."""
    return (*table.ROUTES, *pack.module("nodes.http.run_table").RUN_ROUTES)


@pytest.fixture
def document(pack: Any, routes: Any) -> Any:
    return pack.module("nodes.http.openapi").document("1.2.3", routes)


def make_app(
    pack: Any, service: Any, control: Any, budgets: Any, runs: Any = None
) -> web.Application:
    guards = pack.module("nodes.http.guards")
    made = guards.Guards({}, rate=guards.RateLimit(burst=10**9))
    app = web.Application()
    register = pack.module("nodes.http.register").register_routes
    assert register(app.router, service, control, made, budgets, runs=runs) is True
    return app


def schemas(document: Any, name: str) -> Any:
    """A validator of one of the document's schemas."""
    return jsonschema_rs.validator_for(document["components"]["schemas"][name])


def test_every_route_is_in_the_document_with_all_its_codes(document: Any, routes: Any) -> None:
    assert document["openapi"] == "3.1.0"
    assert document["info"]["version"] == "1.2.3"
    assert set(document["paths"]) == {route.path for route in routes}
    codes = {
        path: {code for operation in methods.values() for code in operation["responses"]}
        for path, methods in document["paths"].items()
    }
    orders = {"200", "400", "401", "403", "404", "405", "409", "413", "415", "429", "500", "503"}
    assert codes["/courier/v1/sleep"] == codes["/courier/v1/wake"] == orders
    assert codes["/release_memory_occupation"] == orders
    assert codes["/resume_memory_occupation"] == orders
    assert codes["/courier/v1/cancel"] == codes["/courier/v1/budget"] == orders
    assert codes["/courier/v1/plan"] == orders - {"503"}
    assert codes["/courier/v1/models"] == {"200", "405", "500"}
    runs = document["paths"]["/courier/v1/runs"]
    assert set(runs) == {"get", "post"}
    assert set(runs["post"]["responses"]) == (orders - {"200", "404", "503"}) | {"202", "422"}
    run = document["paths"]["/courier/v1/runs/{id}"]
    assert set(run) == {"get", "delete"}
    assert run["delete"]["security"] == [{}, {"token": []}]
    assert "requestBody" not in run["delete"]
    assert [p["name"] for p in run["get"]["parameters"]] == ["id"]


def test_fields_and_defaults_are_those_of_the_orders(document: Any) -> None:
    body = document["paths"]["/courier/v1/sleep"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert {name: properties[name]["default"] for name in properties} == {
        "models": "all",
        "level": 1,
        "when": "now",
        "on_use": "refuse",
    }
    assert properties["level"]["enum"] == [1, 2]
    assert properties["when"]["enum"] == ["now", "idle"]
    assert properties["on_use"]["enum"] == ["refuse", "wake"]


def test_the_document_has_those_routes_that_there_are(
    pack: Any, service: Any, control: Any
) -> None:
    """Without budgets nobody answers there, so nobody is told so."""
    app = make_app(pack, service, control, None)
    paths = {resource.canonical for resource in app.router.resources()}
    with serving(app) as address, urllib.request.urlopen(address + DOCUMENT) as answer:
        assert set(json.load(answer)["paths"]) == paths
    assert "/courier/v1/plan" not in paths


def test_examples_fit_their_schemas(document: Any) -> None:
    seen = 0
    for methods in document["paths"].values():
        for operation in methods.values():
            body = operation.get("requestBody", {"content": {}})["content"]
            for content in body.values():
                for example in content["examples"].values():
                    jsonschema_rs.validator_for(content["schema"]).validate(example["value"])
                    seen += 1
            for response in operation["responses"].values():
                content = response["content"].get("application/json", {})
                if "example" in content:
                    name = content["schema"]["$ref"].rpartition("/")[2]
                    schemas(document, name).validate(content["example"])
                    seen += 1
    assert seen > 10


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_fuzzer_finds_no_answer_beside_the_document(
    pack: Any, service: Any, control: Any, budgets: Any, mode: GenerationMode
) -> None:
    """Bodies that fit the document and bodies that do not: each answer is one that it names."""
    tried: dict[str, set[int]] = {}
    studio = Studio(pack, control)
    with serving(make_app(pack, service, control, budgets, studio.service)) as address:
        schema = schemathesis.openapi.from_url(address + DOCUMENT)
        for found in schema.get_all_operations():
            operation = found.ok()
            statuses = tried.setdefault(operation.label, set())
            if mode is GenerationMode.NEGATIVE and operation.method in ("get", "delete"):
                continue  # there is nothing in them to get wrong
            fuzz(operation, mode, statuses)
    studio.host.places.clear()  # ComfyUI has none of the runs any more, so nobody follows them
    assert all(500 not in statuses for statuses in tried.values())
    if mode is GenerationMode.POSITIVE:
        assert tried["POST /courier/v1/sleep"] <= {200, 404}
        assert tried["POST /courier/v1/sleep"] >= {200}
        assert tried["GET /courier/v1/status"] == {200}
        assert tried["POST /courier/v1/plan"] == tried["POST /courier/v1/budget"] == {200, 404}
        assert tried["POST /courier/v1/cancel"] == {200}
        # 409 once so many are unfinished as there may be: nobody runs them here.
        assert tried["POST /courier/v1/runs"] == {202, 409}
        assert tried["DELETE /courier/v1/runs/{id}"] == {404}
        assert tried["GET /courier/v1/runs/{id}/events"] == {404}
    else:
        for name in ("sleep", "wake", "cancel", "plan", "budget"):
            assert 400 in tried[f"POST /courier/v1/{name}"]
        assert 400 in tried["POST /courier/v1/runs"]


def fuzz(operation: Any, mode: GenerationMode, statuses: set[int]) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        response = case.call_and_validate()
        response.json()
        statuses.add(response.status_code)

    run()
