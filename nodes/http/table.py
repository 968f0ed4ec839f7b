"""Every route as data: what it takes, what it answers. The routes and the OpenAPI document are made
of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..requests.records import OnUse, SleepOrder, When
from .bodies import BODY_LIMIT_BYTES, Choice, Field, GibOrNone, ModelId, ModelIds

PREFIX = "/courier/v1/"

# The defaults are those of an order: left out here is left out there.
_MODELS_OF_SLEEP = ModelIds("models", 'Ids from the list of models, or "all".')
_MODELS_OF_WAKE = ModelIds(
    "models", 'Ids from the list of models, or "all" that were put to sleep.'
)
_LEVEL = Choice(
    "level",
    (1, 2),
    SleepOrder.level,
    "1 gives the card's memory back and keeps what the host holds; 2 gives that back too.",
)
_WHEN = Choice(
    "when",
    tuple(when.value for when in When),
    SleepOrder.when.value,
    'While a prompt runs or waits: "now" is refused at once (409), "idle" waits until the queue is '
    "empty.",
)
_ON_USE = Choice(
    "on_use",
    tuple(use.value for use in OnUse),
    SleepOrder.on_use.value,
    'A prompt that needs a sleeping model: "refuse" ends it with an error that says how to wake '
    'the model, "wake" wakes it first.',
)

_MODEL = ModelId("model", "The id of a model of Courier's, as the status gives it.")
_DEVICE_GIB = GibOrNone(
    "device_gib",
    1024,
    "GiB of the card for weights, buffers and activations; null leaves it to ComfyUI. Left out: as "
    "it is.",
    "is 0, under which nothing runs; null leaves the card to ComfyUI",
)
_HOST_GIB = GibOrNone(
    "host_gib",
    4096,
    "GiB of RAM that may be page-locked or copied; 0 locks nothing, null is automatic. Left out: "
    "as it is.",
    "",
)


@dataclass(frozen=True)
class Answer:
    """One status code of a route. ``schema`` is a name in the document's components."""

    status: int
    doc: str
    schema: str = "Error"
    example: Any = None
    header: str | None = None
    media: str = "application/json"


@dataclass(frozen=True)
class RouteSpec:
    """One path. ``what`` is for sentences: "the status" (is read), "models are woken" (with POST).

    ``fields`` is None where there is no body; with ``any_body`` it may have any, or be empty.
    ``verb`` is there where the path has several: then each is a route of its own. ``parameters``
    are the names in braces in ``path``, with what they mean.
    """

    path: str
    name: str
    what: str
    doc: str
    answers: tuple[Answer, ...]
    fields: tuple[Field, ...] | None = None
    any_body: bool = False
    examples: tuple[dict[str, Any], ...] = ()
    verb: str | None = None
    parameters: tuple[tuple[str, str], ...] = ()
    body_limit_bytes: int = BODY_LIMIT_BYTES

    @property
    def changes_state(self) -> bool:
        """Whether the guards stand before it."""
        return self.method != "GET"

    @property
    def method(self) -> str:
        """What the document calls it."""
        return self.verb or ("GET" if self.fields is None else "POST")

    @property
    def methods(self) -> tuple[str, ...]:
        """As the header ``Allow`` names them."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


def error_example(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


def _alias_example(code: str, message: str) -> dict[str, Any]:
    return {**error_example(code, message), "success": False, "message": message}


WRONG_METHOD = Answer(405, "Another method; `Allow` names those there are.", header="Allow")
READ_FAILED = Answer(500, "It could not be read; ComfyUI's log has the details.")
NOT_WELL_FORMED = Answer(
    400,
    "The body, or a field of it, is not as described; or a header is there twice.",
    example=error_example("invalid_field", 'level has to be 1 or 2, not the string "2"'),
)
_RECEIPT: dict[str, Any] = {
    "ok": True,
    "action": "sleep",
    "message": "1 model sleeps; 11.2 GiB of the card were given back",
    "seconds": 0.21,
    "models": [],
}


def _order_answers(
    success: Answer,
    error: str,
    failed: str,
    example: Callable[[str, str], dict[str, Any]],
    conflict: str = "A prompt runs or waits, or another order. Nothing has changed.",
) -> tuple[Answer, ...]:
    """Every code that an order may end with.

    Args:
        error, failed: schemas of the ends that come after the guards; ``example`` makes them.
    """
    unknown = example("unknown_model", 'no model has the id "wan-9"')
    busy = example("busy", "a prompt runs; try again when the queue is empty")
    return (
        success,
        NOT_WELL_FORMED,
        Answer(401, "From elsewhere, without the right token.", header="WWW-Authenticate"),
        Answer(403, "From a page of another origin; or from elsewhere, and no token is set."),
        Answer(404, "No model has this id.", error, unknown),
        WRONG_METHOD,
        Answer(409, conflict, error, busy),
        Answer(413, f"The body is longer than {BODY_LIMIT_BYTES} bytes."),
        Answer(415, "The Content-Type is not application/json, or the body is compressed."),
        Answer(429, "Too many orders in a short time.", header="Retry-After"),
        Answer(500, "An error of ours; ComfyUI's log has the details.", error),
        Answer(503, "It failed half-way; all that could be was put back.", failed),
    )


_ORDER_ANSWERS = _order_answers(
    Answer(200, "Carried out: the receipt.", "Receipt", _RECEIPT),
    "Error",
    "OrderFailed",
    error_example,
)


def _alias_answers(sleeping: list[str], message: str) -> tuple[Answer, ...]:
    example = {"success": True, "sleeping": sleeping, "message": message}
    success = Answer(200, "Carried out.", "Occupation", example)
    return _order_answers(success, "OccupationFailed", "OccupationFailed", _alias_example)


_PLAN: dict[str, Any] = {
    "model": "wan-1",
    "fits": True,
    "message": "10.30 GiB of weights and buffers on the card, 12 of 40 layers stay there whole, "
    "16.1 GiB stream in each pass",
    "asked": {"device_bytes": 12079595520, "host_bytes": None},
    "smallest": {"device_bytes": 2147483648, "host_bytes": None},
    "planned": {"device_bytes": 11059344179},
    "counts": {"resident": 13, "pinned": 28, "mapped": 0, "pageable": 0},
    "bytes": {"resident": 11059344179, "pinned": 17287212565, "mapped": 0, "pageable": 0},
    "changes": 9,
    "layers": [],
}


def _without(answers: tuple[Answer, ...], status: int) -> tuple[Answer, ...]:
    return tuple(answer for answer in answers if answer.status != status)


STATUS = RouteSpec(
    PREFIX + "status",
    "status",
    "the status",
    "Every model, where its layers are, budgets and measured memory. See docs/status.md.",
    (Answer(200, "The status.", "Status"), WRONG_METHOD, READ_FAILED),
)
MODELS = RouteSpec(
    PREFIX + "models",
    "models",
    "the list of models",
    "Every model, Courier's and ComfyUI's own, with the ids that sleep and wake take.",
    (
        Answer(
            200,
            "The models.",
            "Models",
            {
                "models": [
                    {"id": "wan-1", "name": "wan", "kind": "diffusion model", "state": "awake"}
                ],
                "last_order": None,
                "orders": [],
                "busy": False,
            },
        ),
        WRONG_METHOD,
        READ_FAILED,
    ),
)
SLEEP = RouteSpec(
    PREFIX + "sleep",
    "sleep",
    "models are put to sleep",
    "Put models to sleep: they give the card's memory back until they are woken.",
    _ORDER_ANSWERS,
    (_MODELS_OF_SLEEP, _LEVEL, _WHEN, _ON_USE),
    examples=({}, {"models": ["wan-1"], "level": 2, "when": "idle", "on_use": "wake"}),
)
WAKE = RouteSpec(
    PREFIX + "wake",
    "wake",
    "models are woken",
    "Wake models that sleep.",
    _ORDER_ANSWERS,
    (_MODELS_OF_WAKE, _WHEN),
    examples=({}, {"models": ["wan-1"], "when": "idle"}),
)
CANCEL = RouteSpec(
    PREFIX + "cancel",
    "cancel",
    "orders are cancelled",
    "Cancel the orders that wait or are being carried out; each ends with 409 and is undone.",
    _order_answers(
        Answer(
            200,
            "How many were told to stop.",
            "Cancelled",
            {"cancelled": 1, "message": "1 order is told to stop."},
        ),
        "Error",
        "OrderFailed",
        error_example,
    ),
    (),
    examples=({},),
)
PLAN = RouteSpec(
    PREFIX + "plan",
    "plan",
    "a budget is tried",
    "Where every layer would be under another budget. Changes nothing, also while a prompt runs.",
    _without(
        _order_answers(
            Answer(200, "The plan; or `fits` is false and `message` says why.", "Plan", _PLAN),
            "Error",
            "Error",
            error_example,
            "Too many such questions at the same time.",
        ),
        503,
    ),
    (_MODEL, _DEVICE_GIB, _HOST_GIB),
    examples=({"model": "wan-1"}, {"model": "wan-1", "device_gib": 11.25, "host_gib": None}),
)
BUDGET = RouteSpec(
    PREFIX + "budget",
    "budget",
    "a budget is set",
    "Give a model another budget, at once or with its next run. It stays until the loader of the "
    "model runs again.",
    _order_answers(
        Answer(
            200,
            "Set: the plan, and when it is applied.",
            "BudgetSet",
            {**_PLAN, "applied": "now"},
        ),
        "Error",
        "OrderFailed",
        error_example,
        "A prompt runs or waits, or another order; or the budget is too small, and the message "
        "names the smallest that works. Nothing has changed.",
    ),
    (_MODEL, _DEVICE_GIB, _HOST_GIB, _WHEN),
    examples=(
        {"model": "wan-1", "device_gib": 11.25, "host_gib": None},
        {"model": "wan-1", "host_gib": 0, "when": "idle"},
    ),
)
RELEASE = RouteSpec(
    "/release_memory_occupation",
    "release_memory_occupation",
    "models are put to sleep",
    "Put all models to sleep, level 1, now. For tools that know this name; fields are ignored.",
    _alias_answers(["wan-1"], "1 model sleeps. Ignored: 'tags'."),
    (),
    any_body=True,
    examples=({}, {"tags": ["weights"]}),
)
RESUME = RouteSpec(
    "/resume_memory_occupation",
    "resume_memory_occupation",
    "models are woken",
    "Wake all models that sleep, now. For tools that know this name; fields are ignored.",
    _alias_answers([], "1 model is awake"),
    (),
    any_body=True,
    examples=({}, {"tags": ["weights"]}),
)
OPENAPI = RouteSpec(
    PREFIX + "openapi.json",
    "openapi",
    "this document",
    "This document.",
    (Answer(200, "OpenAPI 3.1.", "Document"), WRONG_METHOD, READ_FAILED),
)
ROUTES = (STATUS, MODELS, SLEEP, WAKE, CANCEL, PLAN, BUDGET, RELEASE, RESUME, OPENAPI)
