"""Courier Status: where every layer is, as text and as JSON, at its place in the workflow."""

from __future__ import annotations

import json
from typing import Any

from comfy_api.latest import io, ui

from ...offload_core.run import LayerEngine
from ..models.attachment import attachment_of
from ..models.registry import CourierService, StatusRecord, get_service
from ..models.status_json import status_json, status_text
from .every_time import RunsEveryTime


class CourierStatus(RunsEveryTime):
    """Runs in every execution and shows the status of that moment."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CourierStatus",
            display_name="Courier Status",
            category="courier",
            description=(
                "Shows where every layer of the models loaded with Courier is, and what they take "
                "of their budgets. Put it behind the node whose effect you want to see."
            ),
            inputs=[
                io.AnyType.Input(
                    "anything",
                    optional=True,
                    tooltip=(
                        "Connect anything: the status is taken once this has arrived, and it is "
                        "passed on unchanged. A model loaded with Courier is shown first. Without "
                        "a link the status is taken at some point of the run."
                    ),
                ),
            ],
            outputs=[
                # 0.3.75 refuses an output with the id of an input; only the label may be the same.
                io.AnyType.Output(
                    "passed_on", display_name="anything", tooltip="What came in, unchanged."
                ),
                io.String.Output("text", display_name="text", tooltip="The status as a table."),
                io.String.Output(
                    "json",
                    display_name="json",
                    tooltip="The same as JSON, as /courier/v1/status gives it.",
                ),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, anything: Any = None) -> io.NodeOutput:
        record = _status_with_first(get_service(), anything)
        text = status_text(record)
        body = json.dumps(status_json(record), allow_nan=False)
        return io.NodeOutput(anything, text, body, ui=ui.PreviewText(text))


def _status_with_first(service: CourierService, value: Any) -> StatusRecord:
    record = service.status()
    engine = _engine_of(value)
    model = service.status_of_engine(engine) if engine is not None else None
    return record.with_first(model.id) if model is not None else record


def _engine_of(value: Any) -> LayerEngine | None:
    """The engine behind a MODEL of ours, or behind a CLIP or VAE that has such a patcher."""
    for patcher in (value, getattr(value, "patcher", None)):
        attachment = attachment_of(getattr(patcher, "model", None))
        if attachment is not None:
            return attachment.engine
    return None


NODES: list[type[io.ComfyNode]] = [CourierStatus]
