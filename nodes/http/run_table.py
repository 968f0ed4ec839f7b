"""The routes of runs as data; see ``table``."""

from __future__ import annotations

from ..requests.records import OnUse
from ..runs.records import RunOrder
from .bodies import Choice
from .run_fields import Document, Flag, Name, Seconds
from .table import (
    NOT_WELL_FORMED,
    PREFIX,
    READ_FAILED,
    WRONG_METHOD,
    Answer,
    RouteSpec,
    error_example,
)

RUN_BODY_LIMIT_BYTES = 8 << 20
"""At least; more where ComfyUI itself takes more."""
_LONGEST_NAME = 200
_LONGEST_SECONDS = 7 * 24 * 3600.0
_ID = (("id", "The id that POST /courier/v1/runs gave."),)
_RUN_EXAMPLE = {"id": "5b0c2c1e-8a59-4f0c-9d8c-0f7a41f7d6a1", "state": "queued", "ahead": 0}
_NO_RUN = Answer(
    404,
    "No run has this id, or it is forgotten.",
    example=error_example("unknown_run", "no run has this id"),
)
_SENDER = (
    Answer(401, "From elsewhere, without the right token.", header="WWW-Authenticate"),
    Answer(403, "From a page of another origin; or from elsewhere, and no token is set."),
)
_TOO_MANY = Answer(429, "Too many changes in a short time.", header="Retry-After")
_FAILED = Answer(500, "An error of ours; ComfyUI's log has the details.")

RUN_FIELDS = (
    Document("prompt", "The workflow in API form: each node by its id.", required=True),
    Name("name", _LONGEST_NAME, "What people call it; shown, and nothing else."),
    Document(
        "workflow",
        "The workflow as ComfyUI's page saves it, to be written into pictures.",
    ),
    Flag("wake_before", RunOrder.wake_before, "Wake all models that sleep, as its first step."),
    Choice(
        "sleep_after",
        (0, 1, 2),
        RunOrder.sleep_after,
        "The level at which all models go to sleep when it has ended, however it ended, and the "
        "queue is empty. 0: they stay awake.",
    ),
    Choice(
        "on_use",
        tuple(use.value for use in OnUse),
        RunOrder.on_use.value,
        'After sleep_after, what a prompt finds that needs a sleeping model: "wake" wakes it '
        'first, "refuse" ends the prompt with an error.',
    ),
    Seconds(
        "time_limit_seconds",
        _LONGEST_SECONDS,
        "Stop it when it has run so long. Waiting in the queue does not count.",
    ),
)

START_RUN = RouteSpec(
    PREFIX + "runs",
    "start_run",
    "a workflow is run",
    "Check a workflow and queue it. It runs to its end also when nobody looks.",
    (
        Answer(202, "Queued: the run.", "Run", _RUN_EXAMPLE, header="Location"),
        NOT_WELL_FORMED,
        *_SENDER,
        WRONG_METHOD,
        Answer(
            409,
            "So many runs are unfinished. Nothing was queued.",
            example=error_example("queue_full", "50 runs are unfinished"),
        ),
        Answer(413, "The body is longer than ComfyUI takes (--max-upload-size)."),
        Answer(415, "The Content-Type is not application/json, or the body is compressed."),
        Answer(
            422,
            "ComfyUI does not take this workflow. Nothing was queued; `node_errors` is its own "
            "account.",
            "PromptRefused",
            {**error_example("prompt_refused", "node 4 (KSampler): ..."), "node_errors": {}},
        ),
        _TOO_MANY,
        _FAILED,
    ),
    RUN_FIELDS,
    examples=(
        {"prompt": {"1": {"class_type": "CourierWakeModel", "inputs": {}}}},
        {
            "prompt": {"1": {"class_type": "CourierWakeModel", "inputs": {}}},
            "name": "morning",
            "wake_before": True,
            "sleep_after": 1,
            "on_use": "refuse",
            "time_limit_seconds": 600,
        },
    ),
    verb="POST",
    body_limit_bytes=RUN_BODY_LIMIT_BYTES,
)
LIST_RUNS = RouteSpec(
    PREFIX + "runs",
    "runs",
    "the list of runs",
    "Every run that is remembered, the youngest first.",
    (Answer(200, "The runs.", "Runs"), WRONG_METHOD, READ_FAILED),
    verb="GET",
)
READ_RUN = RouteSpec(
    PREFIX + "runs/{id}",
    "run",
    "a run",
    "A run: its state, the node that runs, what the models hold, outputs or an error.",
    (Answer(200, "The run.", "Run", _RUN_EXAMPLE), _NO_RUN, WRONG_METHOD, READ_FAILED),
    verb="GET",
    parameters=_ID,
)
CANCEL_RUN = RouteSpec(
    PREFIX + "runs/{id}",
    "cancel_run",
    "a run is cancelled",
    "Take it off the queue, or stop it. Of a run that has ended, nothing changes.",
    (
        Answer(200, "The run. It stops at the next step of its node.", "Run", _RUN_EXAMPLE),
        Answer(400, "A header is there twice."),
        *_SENDER,
        _NO_RUN,
        WRONG_METHOD,
        _TOO_MANY,
        _FAILED,
    ),
    verb="DELETE",
    parameters=_ID,
)
RUN_EVENTS = RouteSpec(
    PREFIX + "runs/{id}/events",
    "run_events",
    "what happens to a run",
    "Server-sent events: state, progress, and at last end. Last-Event-ID goes on from there.",
    (
        Answer(200, "Events until the end.", "Text", media="text/event-stream"),
        _NO_RUN,
        WRONG_METHOD,
        Answer(503, "So many listen already.", header="Retry-After"),
    ),
    verb="GET",
    parameters=_ID,
)
RUN_ROUTES = (START_RUN, LIST_RUNS, READ_RUN, CANCEL_RUN, RUN_EVENTS)
