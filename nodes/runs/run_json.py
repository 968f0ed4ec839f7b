"""Runs as JSON-ready values. Pure."""

from __future__ import annotations

import math
from typing import Any

from .records import NodeStep, RunError, RunRecord


def brief_json(record: RunRecord) -> dict[str, Any]:
    """What changes while it runs: the data of most events."""
    return {
        "id": record.id,
        "name": record.order.name,
        "state": record.state.value,
        "ahead": record.ahead,
        "node": _node_json(record.node),
        "nodes_done": record.nodes_done,
        "nodes": record.nodes,
        "seconds": {
            "queued": round(record.queued_seconds, 3),
            "running": round(record.running_seconds, 3),
        },
        "error": _error_json(record.error),
    }


def run_json(record: RunRecord) -> dict[str, Any]:
    """Everything: ``GET /courier/v1/runs/{id}``."""
    order = record.order
    return {
        **brief_json(record),
        "created_at": round(record.created_at, 3),
        "wake_before": order.wake_before,
        "time_limit_seconds": order.time_limit_seconds,
        "sleep_after": {
            "level": order.sleep_after,
            "state": record.sleep.value,
            "receipt": record.receipt,
            "problem": record.sleep_problem,
        },
        "models": list(record.models),
        "device_peak_bytes": record.device_peak_bytes,
        "outputs": record.outputs,
    }


def plain(value: Any) -> Any:
    """``value`` as JSON takes it: what a node showed may be anything. A NaN becomes null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    # A string may hold half a character, which no answer can write.
    return str(value).encode("utf-8", "replace").decode()


def model_summary(model: dict[str, Any]) -> dict[str, Any]:
    """Of a model of the status, what a run tells: not every layer."""
    names = ("id", "name", "state", "budgets", "counts", "bytes", "measured", "notes")
    return {name: model[name] for name in names}


def _node_json(node: NodeStep | None) -> dict[str, Any] | None:
    if node is None:
        return None
    return {
        "id": node.id,
        "class_type": node.class_type,
        "title": node.title,
        "step": node.step,
        "steps": node.steps,
    }


def _error_json(error: RunError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "code": error.code,
        "message": error.message,
        "node": error.node_id,
        "class_type": error.class_type,
        "title": error.title,
        "exception": error.exception,
    }
