"""The OpenAPI 3.1 document of a table of routes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..runs.records import RunState
from .table import Answer, RouteSpec

_JSON = "application/json"
_TEXT = {"type": "string"}
_BOOL = {"type": "boolean"}
_ERROR = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {
        "code": {"type": "string", "description": "For programs; it stays as it is."},
        "message": {"type": "string", "description": "For people: what to do."},
    },
}
_MODEL = {
    "type": "object",
    "required": ["id", "name", "kind", "state"],
    "properties": {"id": _TEXT, "name": _TEXT, "kind": _TEXT, "state": _TEXT},
}
_RECEIPT_PROPERTIES = {
    "ok": {"type": "boolean", "description": "False: nothing was freed although it was held."},
    "action": _TEXT,
    "message": _TEXT,
    "seconds": {"type": "number", "minimum": 0},
    "models": {"type": "array", "items": {"type": "object"}},
}
_FIGURES = {
    "type": "object",
    "required": ["device_bytes", "host_bytes"],
    "properties": {name: {"type": ["integer", "null"]} for name in ("device_bytes", "host_bytes")},
}
_PLAN_PROPERTIES: dict[str, Any] = {
    "model": _TEXT,
    "fits": {"type": "boolean", "description": "False: the budget is too small; see `message`."},
    "message": _TEXT,
    "asked": _FIGURES,
    "smallest": {**_FIGURES, "description": "The smallest figures that work; null: not known."},
    "planned": {"type": ["object", "null"], "description": "Bytes by what they are for."},
    "counts": {"type": ["object", "null"]},
    "bytes": {"type": ["object", "null"]},
    "changes": {"type": "integer", "minimum": 0, "description": "Layers that are elsewhere now."},
    "layers": {"type": "array", "items": {"type": "object"}},
}
_OCCUPATION_PROPERTIES = {
    "success": _BOOL,
    "sleeping": {"type": "array", "items": _TEXT, "description": "Ids of models asleep now."},
    "message": _TEXT,
}


def _object(required: Iterable[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


_SCHEMAS: dict[str, Any] = {
    "Error": _object(["error"], {"error": _ERROR}),
    "OrderFailed": _object(["error", "receipt"], {"error": _ERROR, "receipt": {"type": "object"}}),
    "Receipt": _object(_RECEIPT_PROPERTIES, _RECEIPT_PROPERTIES),
    "Models": _object(
        ["models", "last_order", "orders", "busy"],
        {
            "models": {"type": "array", "items": _MODEL},
            "last_order": {
                "type": ["object", "null"],
                "description": "The receipt of the last order, whoever gave it.",
            },
            "orders": {
                "type": "array",
                "items": {"type": "object"},
                "description": "Those that wait or are being carried out.",
            },
            "busy": {"type": "boolean", "description": "A prompt runs or waits."},
        },
    ),
    "Cancelled": _object(
        ["cancelled", "message"],
        {"cancelled": {"type": "integer", "minimum": 0}, "message": _TEXT},
    ),
    "Plan": _object(_PLAN_PROPERTIES, _PLAN_PROPERTIES),
    "BudgetSet": _object(
        [*_PLAN_PROPERTIES, "applied"],
        {**_PLAN_PROPERTIES, "applied": {"type": "string", "enum": ["now", "next_run"]}},
    ),
    "Occupation": _object(_OCCUPATION_PROPERTIES, _OCCUPATION_PROPERTIES),
    "OccupationFailed": _object(
        ["error", "success", "message"],
        {"error": _ERROR, "success": _BOOL, "message": _TEXT, "receipt": {"type": "object"}},
    ),
    "Status": _object(
        ["version", "boot_id", "models", "notes"],
        {
            "version": _TEXT,
            "boot_id": _TEXT,
            "models": {"type": "array", "items": {"type": "object"}},
            "notes": {"type": "array", "items": _TEXT},
        },
    ),
    "Document": {"type": "object"},
    "Text": _TEXT,
    "Run": _object(
        ["id", "state"],
        {
            "id": _TEXT,
            "state": {"enum": [state.value for state in RunState]},
            "ahead": {"type": ["integer", "null"], "description": "Prompts before it."},
            "node": {"type": ["object", "null"], "description": "The node that runs."},
            "outputs": {"type": "object", "description": "What each node showed, by its id."},
            "error": {"type": ["object", "null"]},
        },
    ),
    "Runs": _object(["runs"], {"runs": {"type": "array", "items": {"type": "object"}}}),
    "PromptRefused": _object(
        ["error", "node_errors"], {"error": _ERROR, "node_errors": {"type": "object"}}
    ),
}


def document(version: str, routes: Iterable[RouteSpec]) -> dict[str, Any]:
    """The document as a JSON-ready value."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ComfyUI-Courier",
            "version": version,
            "description": "Run workflows on a ComfyUI, put its models to sleep, wake them, and "
            "change their budgets.",
        },
        "servers": [{"url": "/"}],
        "paths": _paths(routes),
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Needed by requests that are not from this machine: the value "
                    "of COURIER_TOKEN, or the content of COURIER_TOKEN_FILE.",
                }
            },
        },
    }


def _paths(routes: Iterable[RouteSpec]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return paths


def _operation(route: RouteSpec) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.doc,
        "responses": {str(answer.status): _response(answer) for answer in route.answers},
    }
    if route.parameters:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT, "description": doc}
            for name, doc in route.parameters
        ]
    if route.changes_state:
        operation["security"] = [{}, {"token": []}]
    if route.fields is None:
        return operation
    size = f"At most {route.body_limit_bytes} bytes of UTF-8."
    operation["requestBody"] = {
        # Also where it may be empty: without a body most programs send no Content-Type.
        "required": True,
        "description": f"{size} It may be empty." if route.any_body else size,
        "content": {_JSON: {"schema": _body(route), "examples": _examples(route)}},
    }
    return operation


def _body(route: RouteSpec) -> dict[str, Any]:
    properties = {field.name: field.schema() for field in route.fields or ()}
    return {
        "type": "object",
        "properties": properties,
        "required": [field.name for field in route.fields or () if field.required],
        "additionalProperties": route.any_body,
    }


def _examples(route: RouteSpec) -> dict[str, Any]:
    return {
        f"{route.name}_{number}": {"value": value}
        for number, value in enumerate(route.examples, start=1)
    }


def _response(answer: Answer) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{answer.schema}"}}
    if answer.example is not None:
        content["example"] = answer.example
    response: dict[str, Any] = {"description": answer.doc, "content": {answer.media: content}}
    if answer.header is not None:
        response["headers"] = {answer.header: {"required": True, "schema": _TEXT}}
    return response
