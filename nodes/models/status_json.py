"""Status records as JSON-ready values, and as a table for people. Pure functions, ASCII text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from ...offload_core.values import LayerRecord, MemoryRecord, Placement, TrafficRecord, size_text
from .registry import AskedBudget, DeviceRecord, ModelRecord, StatusRecord

INDENT = "  "


def status_json(record: StatusRecord) -> dict[str, Any]:
    """The body of ``GET /courier/v1/status``. Null stands for "automatic" and for "not known"."""
    return {
        "version": record.version,
        "boot_id": record.boot_id,
        "device": dataclasses.asdict(record.device),
        "host": {
            "total_bytes": record.host.total_bytes,
            "available_bytes": record.host.available_bytes,
            "limit_bytes": record.host.limit_bytes,
            "source": record.host.source,
        },
        "models": [model_json(model) for model in record.models],
        "notes": list(record.notes),
    }


def model_json(model: ModelRecord) -> dict[str, Any]:
    """One entry of "models"."""
    snapshot = model.snapshot
    return {
        "id": model.id,
        "name": model.name,
        "file": model.file,
        "kind": model.origin.kind,
        "loader": {"class": model.origin.loader, "inputs": dict(model.origin.inputs)},
        "state": model.state.value,
        "budgets": {
            "device_bytes": snapshot.budget.device_bytes,
            "host_bytes": snapshot.budget.host_bytes,
        },
        "asked": asked_json(model.asked),
        "measured": measured_json(snapshot.memory),
        "counts": counts_by_placement(snapshot.layers),
        "bytes": bytes_by_placement(snapshot.layers),
        "block_lists": list(snapshot.block_lists),
        "streamable_layers": snapshot.streamable_layers,
        "traffic": traffic_json(snapshot.traffic),
        "notes": list(model.notes),
        "layers": [layer_json(layer) for layer in snapshot.layers],
    }


def measured_json(memory: MemoryRecord) -> dict[str, int | None]:
    """What a model holds and held, in bytes."""
    return {
        "device_bytes": memory.device_bytes,
        "device_peak_bytes": memory.device_peak_bytes,
        "activation_peak_bytes": memory.activation_peak_bytes,
        "host_locked_bytes": memory.locked_bytes,
        "host_copied_bytes": memory.copied_bytes,
        "host_locked_copy_bytes": memory.locked_copy_bytes,
        "host_staging_bytes": memory.staging_bytes,
    }


def traffic_json(traffic: TrafficRecord) -> dict[str, int]:
    """What the courier brought."""
    return dataclasses.asdict(traffic)


def layer_json(layer: LayerRecord) -> dict[str, Any]:
    """One entry of "layers"."""
    return {
        "name": layer.name,
        "bytes": layer.size_bytes,
        "resident_bytes": layer.resident_bytes,
        "locked_bytes": layer.locked_bytes,
        "placement": layer.placement.value,
        "in_place": layer.in_place,
        "reason": layer.reason,
        "state": layer.state.value,
        "dtypes": list(layer.dtypes),
    }


def asked_json(asked: AskedBudget | None) -> dict[str, Any] | None:
    """What the user asked for, or None where nobody said."""
    return (
        None
        if asked is None
        else {**dataclasses.asdict(asked.budget), "by": asked.by.value, "waits": asked.waits}
    )


def counts_by_placement(layers: Iterable[LayerRecord]) -> dict[str, int]:
    """How many layers rest where."""
    counts = {placement.value: 0 for placement in Placement}
    for layer in layers:
        counts[layer.placement.value] += 1
    return counts


def bytes_by_placement(layers: Iterable[LayerRecord]) -> dict[str, int]:
    """Bytes by where they rest: of a layer that streams in part, the other part is resident; of a
    mapped layer that is locked in part, that part is pinned."""
    sums = {placement.value: 0 for placement in Placement}
    for layer in layers:
        pinned = _pinned_bytes(layer)
        sums[Placement.RESIDENT.value] += layer.resident_bytes
        sums[Placement.PINNED.value] += pinned
        sums[layer.placement.value] += layer.size_bytes - layer.resident_bytes - pinned
    return sums


def _pinned_bytes(layer: LayerRecord) -> int:
    """Of a layer that is not called pinned, what of its streaming part is locked all the same."""
    if layer.placement is not Placement.MAPPED:
        return 0
    return min(layer.locked_bytes, layer.size_bytes - layer.resident_bytes)


def status_text(record: StatusRecord) -> str:
    """The status as people read it in a monospaced font: machine, then every model's layers."""
    host = record.host
    lines = [
        f"Courier {record.version}",
        f"device  {_device_text(record.device)}",
        f"host    {size_text(host.available_bytes)} available of {size_text(host.total_bytes)} "
        f"({printable(host.source)})",
        *_notes(record.notes, indent=""),
    ]
    if not record.models:
        lines += ["", "No model is loaded with Courier."]
    for model in record.models:
        lines += ["", *model_lines(model)]
    return "\n".join(lines)


def model_lines(model: ModelRecord) -> list[str]:
    """One model: where its layers are, what it may take against what it took, and the notes."""
    snapshot = model.snapshot
    lists = ", ".join(printable(name) for name in snapshot.block_lists)
    layers = f"{snapshot.streamable_layers} streamable layers{f' in {lists}' if lists else ''}"
    traffic = snapshot.traffic
    lines = [
        f"{printable(model.name)}: {model.state.value}",
        f"{INDENT}file     {printable(model.file)}",
        f"{INDENT}id       {model.id}",
        f"{INDENT}layers   {layers}",
        f"{INDENT}placed   {_placed_text(snapshot.layers)}",
        f"{INDENT}shipped  {traffic.layers_shipped} layers, {size_text(traffic.shipped_bytes)} "
        f"(prefetched in time {traffic.prefetch_hits}, missed {traffic.prefetch_misses}, "
        f"discarded {traffic.prefetches_discarded})",
        *_notes(model.notes, INDENT),
        "",
        *_columns(_memory_rows(model), right_aligned={1, 2, 3}),
    ]
    if snapshot.layers:
        lines += ["", *_columns(_layer_rows(snapshot.layers), right_aligned={1, 2})]
    return lines


def printable(text: str) -> str:
    """``text`` on one line: what would break a line or hide is shown as a question mark."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _device_text(device: DeviceRecord) -> str:
    if device.total_bytes is None or device.free_bytes is None:
        return "not known"
    name = f" ({printable(device.name)})" if device.name else ""
    return f"{size_text(device.free_bytes)} free of {size_text(device.total_bytes)}{name}"


def _placed_text(layers: Sequence[LayerRecord]) -> str:
    counts = counts_by_placement(layers)
    sizes = bytes_by_placement(layers)
    parts = [
        f"{count} {placement} ({size_text(sizes[placement])})"
        for placement, count in counts.items()
        if count
    ]
    in_part = [layer for layer in layers if 0 < layer.resident_bytes < layer.size_bytes]
    if in_part:
        size = size_text(sum(layer.resident_bytes for layer in in_part))
        parts.append(f"{size} of the layers that stream are resident")
    pinned = sum(_pinned_bytes(layer) for layer in layers)
    if pinned:
        parts.append(f"{size_text(pinned)} of the mapped layers are pinned")
    return ", ".join(parts) or "nothing"


def _notes(notes: Iterable[str], indent: str) -> list[str]:
    return [f"{indent}! {printable(note)}" for note in notes]


def _memory_rows(model: ModelRecord) -> list[tuple[str, ...]]:
    budget, memory = model.snapshot.budget, model.snapshot.memory
    activations = memory.activation_peak_bytes
    return [
        ("memory", "budget", "now", "peak"),
        (
            "device: weights, slots",
            _budget_text(budget.device_bytes),
            size_text(memory.device_bytes),
            size_text(memory.device_peak_bytes),
        ),
        (
            "device: activations",
            "",
            "",
            "not measured" if activations is None else size_text(activations),
        ),
        ("host: page-locked", _budget_text(budget.host_bytes), size_text(memory.locked_bytes), ""),
        ("host: copied", "", _copied_text(memory), ""),
        ("host: staging", "", size_text(memory.staging_bytes), ""),
    ]


def _copied_text(memory: MemoryRecord) -> str:
    if not memory.locked_copy_bytes:
        return size_text(memory.copied_bytes)
    return f"{size_text(memory.copied_bytes)} ({size_text(memory.locked_copy_bytes)} locked)"


def _budget_text(budget_bytes: int | None) -> str:
    return "auto" if budget_bytes is None else size_text(budget_bytes)


def _layer_rows(layers: Sequence[LayerRecord]) -> Iterator[tuple[str, ...]]:
    """One row for neighbours that differ in nothing but their name."""
    yield ("layer", "size", "resident", "placement", "why")
    for (size_bytes, resident_bytes, where, reason), group in groupby(layers, _likeness):
        members = list(group)
        size = f"{size_text(size_bytes)} each" if len(members) > 1 else size_text(size_bytes)
        resident = f"{resident_bytes / size_bytes:.0%}" if size_bytes else "-"
        yield (_names_text(members), size, resident, where, printable(reason))


def _names_text(members: Sequence[LayerRecord]) -> str:
    first, last = printable(members[0].name), printable(members[-1].name)
    if len(members) == 1:
        return first
    # "diffusion_model.blocks.0 - 7": twice the whole path would push the rest out of sight.
    path, _, number = last.rpartition(".")
    shared = path == first.rpartition(".")[0]
    return f"{first} - {number if shared else last} ({len(members)} layers)"


def _likeness(layer: LayerRecord) -> tuple[int, int, str, str]:
    return (layer.size_bytes, layer.resident_bytes, _where_text(layer), layer.reason)


def _where_text(layer: LayerRecord) -> str:
    if layer.in_place:
        return f"{layer.placement.value}, in place"
    pinned = _pinned_bytes(layer)
    if not pinned:
        return layer.placement.value
    share = pinned / (layer.size_bytes - layer.resident_bytes)
    return f"{layer.placement.value}, {share:.0%} pinned in place"


def _columns(rows: Iterable[tuple[str, ...]], right_aligned: set[int]) -> list[str]:
    table = list(rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if column in right_aligned else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((INDENT + "  ".join(cells)).rstrip())
    return lines
