"""What commands answer in text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ....offload_core.values import size_text
from ..client.records import Run, not_understood
from ..text import one_line, table

T = TypeVar("T")


def told(tell: Callable[..., T], *answers: Any) -> T:
    """What ``tell`` makes of answers. Raises: RefusedError where one is not as this client knows
    it."""
    try:
        return tell(*answers)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
        raise not_understood("JSON that has not the fields it should have") from None


def run_text(run: Run, saved: Sequence[str]) -> str:
    """A run: how long, what the models hold, and what it wrote."""
    seconds = run.raw.get("seconds") or {}
    lines = [
        f"run {run.id}: {run.state}, {float(seconds.get('running') or 0):.1f} s "
        f"(and {float(seconds.get('queued') or 0):.1f} s in the queue)"
    ]
    lines += [f"  {model_line(model)}" for model in run.raw.get("models") or []]
    peak = run.raw.get("device_peak_bytes")
    if peak is not None:
        lines.append(f"  card, by its driver, of everybody: {size_text(peak)} at most")
    lines += [f"  {line}" for line in sleep_lines(run)]
    if saved:
        return "\n".join([*lines, *(f"  {path}" for path in saved)])
    for file in run.files():
        place = f"{file.subfolder}/" if file.subfolder else ""
        lines.append(f"  {one_line(f'{file.type}: {place}{file.filename}')}")
    return "\n".join(lines)


def sleep_lines(run: Run) -> list[str]:
    """What became of ``sleep_after``, where it was asked for."""
    sleep = run.raw.get("sleep_after") or {}
    lines = []
    if sleep.get("receipt"):
        lines.append(f"asleep: {sleep['receipt']['message']}")
    if sleep.get("problem"):
        lines.append(f"not asleep: {sleep['problem']}")
    return lines


def model_line(model: Mapping[str, Any]) -> str:
    """A model of the status: where its bytes are, and the peaks."""
    places = ", ".join(
        f"{size_text(size)} {place}" for place, size in model["bytes"].items() if size
    )
    measured = model["measured"]
    peak = size_text(measured["device_peak_bytes"])
    activations = measured["activation_peak_bytes"]
    beside = "" if activations is None else f", activations {size_text(activations)}"
    return f"{one_line(model['name'])} ({model['state']}): {places}; peak {peak}{beside}"


def runs_text(runs: Sequence[Run]) -> str:
    """Every run in a line."""
    if not runs:
        return "no runs"
    rows = [("id", "state", "name", "")]
    rows += [
        (
            run.id,
            run.state,
            one_line(run.name or ""),
            one_line(str((run.error or {}).get("message", ""))),
        )
        for run in runs
    ]
    return "\n".join(table(rows))


def status_text(status: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> str:
    """Every model: where its layers are, its budgets. Each layer by name is in the JSON."""
    device, host = status["device"], status["host"]
    free = "not known"
    if device.get("free_bytes") is not None:
        free = f"{size_text(device['free_bytes'])} free of {size_text(device['total_bytes'])}"
    available = size_text(host["available_bytes"])
    lines = [
        f"Courier {status['version']}",
        f"device  {free}",
        f"host    {available} available of {size_text(host['total_bytes'])}",
        *(f"! {one_line(note)}" for note in status["notes"]),
    ]
    for model in status["models"]:
        lines += ["", model_line(model), *(f"  {line}" for line in _more_of(model))]
    lines.append("")
    rows = [("id", "kind", "state", "name")]
    rows += [(m["id"], m["kind"], m["state"], one_line(m["name"])) for m in models]
    return "\n".join([*lines, *(table(rows) if len(rows) > 1 else ["no models"])])


def _more_of(model: Mapping[str, Any]) -> list[str]:
    counts = ", ".join(f"{count} {place}" for place, count in model["counts"].items() if count)
    budgets, measured = model["budgets"], model["measured"]
    card, ram = _budget(budgets["device_bytes"]), _budget(budgets["host_bytes"])
    locked = measured["host_locked_bytes"] + measured["host_staging_bytes"]
    copied = measured["host_copied_bytes"]
    return [
        f"layers: {counts or 'none'}",
        f"card: {size_text(measured['device_bytes'])} now, budget {card}",
        f"RAM: {size_text(locked)} locked and {size_text(copied)} copied now, budget {ram}",
        *(f"! {one_line(note)}" for note in model["notes"]),
    ]


def _budget(size_bytes: int | None) -> str:
    return "automatic" if size_bytes is None else size_text(size_bytes)


def plan_text(plan: Mapping[str, Any], with_layers: bool) -> str:
    """A dry run."""
    assumed, asked = plan["assumed"], plan["asked"]
    rate = assumed["link_bytes_per_second"] / 10**9
    rows: list[tuple[str, ...]] = [
        ("file", size_text(plan["bytes"]), one_line(plan["file"])),
        ("card", size_text(asked["device_bytes"]), assumed["device"]),
        ("RAM to lock", size_text(asked["host_bytes"]), assumed["host"]),
        ("activations", size_text(assumed["activation_bytes"]), assumed["activations"]),
    ]
    if not plan["fits"]:
        return "\n".join([*table(rows, frozenset({1})), "", str(plan["message"])])
    planned = plan["planned"]
    counts = ", ".join(f"{count} {place}" for place, count in plan["counts"].items() if count)
    resident = sum(layer["resident_bytes"] for layer in plan["layers"])
    rows += [
        (
            "resident",
            size_text(resident + planned["base_bytes"]),
            f"of {len(plan['layers'])} layers and what is outside them",
        ),
        ("pinned", size_text(planned["pinned_bytes"]), "streams from locked pages of the file"),
        ("mapped", size_text(planned["mapped_bytes"]), "streams from the file through staging"),
        (
            "buffers",
            size_text(planned["slots"] * planned["slot_bytes"]),
            f"{planned['slots']} slots on the card",
        ),
        ("staging", size_text(planned["host_staging_bytes"]), "page-locked"),
    ]
    floor = plan["step"]["floor_seconds"]
    lines = [
        *table(rows, frozenset({1})),
        "",
        f"layers: {counts}",
        f"a step copies {size_text(planned['streamed_bytes'])}: at least {floor:.3f} s at "
        f"{rate:.1f} GB/s ({assumed['link']})",
    ]
    if with_layers:
        head = [("layer", "size", "resident", "placement", "why")]
        head += [
            (
                x["name"],
                size_text(x["bytes"]),
                size_text(x["resident_bytes"]),
                x["placement"],
                x["reason"],
            )
            for x in plan["layers"]
        ]
        lines += ["", *table(head, frozenset({1, 2}))]
    return "\n".join(lines)
