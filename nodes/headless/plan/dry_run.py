"""What would be resident, pinned and mapped: of a file, without ComfyUI. Needs torch.

Only headers are read, no weight. What is not known without the model is assumed and said:
activations, and buffers that are in no file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....offload_core.device import (
    backend_for,
    cuda_is_available,
    cuda_link_bytes_per_second,
    cuda_traits,
)
from ....offload_core.host import (
    PAGE_BYTES,
    CheckpointHeader,
    TensorEntry,
    host_limits,
    read_header,
    resolve_shards,
)
from ....offload_core.plan import (
    ALIGNMENT,
    Extent,
    LayerCost,
    LayerPlan,
    Plan,
    PlanRequest,
    make_plan,
    smallest_device_bytes,
)
from ....offload_core.values import (
    GIB,
    BudgetError,
    CheckpointError,
    ConfigError,
    DeviceBudgetError,
    EngineConfig,
    Placement,
    align_up,
    gib_text,
    gib_to_bytes,
    size_text,
)
from ...default_budget import AUTOMATIC_HOST_SHARE, CARD_HEADROOM_GIB
from ..errors import UsageError, WorkflowFileError
from .names import BASE, layers_of, without_marks, without_other_models
from .usable import copied_text, lies_well

ASSUMED_LINK_GB_PER_SECOND = 25.0
"""PCIe 4 x16, page-locked. PCIe 5 has about 55, PCIe 3 about 12."""
ASSUMED_ACTIVATION_GIB = 1.0
_CARD_HEADROOM_BYTES = int(CARD_HEADROOM_GIB * GIB)
_GB = 10**9
_COPIES_FROM = 1 << 46


@dataclass(frozen=True)
class DryRun:
    """What to plan. GiB of None: of this machine.

    Attributes:
        card_gib: the size a card is sold by; some of it is never to be had.
        vram_gib: a budget in its place, as Courier Budget takes it.
        activation_gib: what a run needs beside; None: assumed.
        link_gb_per_second: to the card; None: assumed, or measured.
    """

    file: str
    card_gib: float | None = None
    vram_gib: float | None = None
    host_gib: float | None = None
    activation_gib: float | None = None
    link_gb_per_second: float | None = None
    measure_link: bool = False


def dry_run(asked: DryRun) -> dict[str, Any]:
    """The plan, ready for JSON: docs/headless.md.

    Raises: WorkflowFileError for a file that is no checkpoint, UsageError for figures that cannot
        be meant, or for a card that is not there.
    """
    try:
        entries = _entries([read_header(path) for path in resolve_shards(asked.file)])
        device_bytes, device_source = _device(asked)
        host_bytes, host_source = _host(asked)
        activation_bytes, activation_source = _activations(asked)
        link, link_source = _link(asked)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    except CheckpointError as error:
        raise WorkflowFileError(str(error)) from None
    request = _request(entries, device_bytes, host_bytes, activation_bytes)
    answer: dict[str, Any] = {
        "file": os.path.basename(os.fsencode(asked.file)).decode("utf-8", "replace"),
        "bytes": sum(entry.size_bytes for entry in entries.values()),
        "asked": {"device_bytes": device_bytes, "host_bytes": host_bytes},
        "assumed": {
            "device": device_source,
            "host": host_source,
            "activation_bytes": activation_bytes,
            "activations": activation_source,
            "link_bytes_per_second": link,
            "link": link_source,
        },
        "smallest": {"device_bytes": smallest_device_bytes(request)},
    }
    try:
        plan = make_plan(request)
    except BudgetError as error:
        message = f"{error}{_as_card(asked, error)}{copied_text(entries.values())}"
        return {**answer, "fits": False, "message": message, "layers": [], "step": None}
    found = _answer(request, plan, link)
    return {**answer, **found, "message": found["message"] + copied_text(entries.values())}


def _entries(headers: Sequence[CheckpointHeader]) -> dict[str, TensorEntry]:
    entries = {name: entry for header in headers for name, entry in header.entries.items()}
    inside = without_other_models(without_marks(entries))
    return {inner: entries[name] for name, inner in inside.items()}


def _request(
    entries: Mapping[str, TensorEntry], device: int | None, host: int | None, activation: int
) -> PlanRequest:
    layers = layers_of(entries)
    base = [entries[name] for name in layers.pop(BASE, [])]
    is_locked = sys.platform.startswith("linux")
    card = cuda_traits()
    return PlanRequest(
        layers=tuple(
            _cost(name, [entries[tensor] for tensor in tensors]) for name, tensors in layers.items()
        ),
        base_device_bytes=sum(align_up(entry.size_bytes, ALIGNMENT) for entry in base),
        base_copied_bytes=sum(entry.size_bytes for entry in base if not lies_well(entry)),
        device_budget_bytes=device,
        host_budget_bytes=host,
        activation_bytes=activation,
        slots=EngineConfig().slots,
        staging_bytes=card.staging_bytes,
        lock_refusal=None if is_locked else f"Courier locks none on {sys.platform}",
        staging_unit_bytes=card.staging_unit_bytes,
        page_bytes=PAGE_BYTES,
        footprint=card.footprint,
    )


def _cost(name: str, entries: Sequence[TensorEntry]) -> LayerCost:
    # The file is mapped from a page's beginning, so offsets in it lie as addresses will. A copy is
    # memory of its own, which lies nowhere near the file.
    copies = (entry for entry in entries if not lies_well(entry))
    mapped = (entry for entry in entries if lies_well(entry))
    extents = [Extent(entry.file_offset, entry.size_bytes) for entry in mapped]
    in_file, address = len(extents), _COPIES_FROM
    for entry in copies:
        extents.append(Extent(address, entry.size_bytes))
        address += align_up(entry.size_bytes, PAGE_BYTES) + ALIGNMENT
    extents[:in_file] = sorted(extents[:in_file], key=lambda extent: extent.address)
    return LayerCost(name, tuple(extents), tuple(i < in_file for i in range(len(extents))))


def _device(asked: DryRun) -> tuple[int | None, str]:
    if asked.vram_gib is not None:
        return gib_to_bytes(asked.vram_gib, "--vram"), "the budget that was given"
    if asked.card_gib is not None:
        room = gib_to_bytes(asked.card_gib, "--card") - _CARD_HEADROOM_BYTES
        text = f"a card of {asked.card_gib:g} GiB, of which {CARD_HEADROOM_GIB:g} GiB are not ours"
        return max(0, room), text
    if not cuda_is_available():
        raise UsageError("there is no card here; name one: --card 12 (GiB), or a budget: --vram 11")
    free = backend_for(torch.device("cuda")).memory().free_bytes
    return free, "what is free on this machine's card"


def _activations(asked: DryRun) -> tuple[int, str]:
    if asked.activation_gib is not None:
        return gib_to_bytes(asked.activation_gib, "--activations"), "given"
    size = gib_to_bytes(ASSUMED_ACTIVATION_GIB, "--activations")
    return size, "assumed: give yours with --activations"


def _as_card(asked: DryRun, error: BudgetError) -> str:
    """The smallest budget as what was asked about: a card by its size."""
    if asked.card_gib is None or not isinstance(error, DeviceBudgetError):
        return ""
    return f"; a card has that from {gib_text(error.smallest_bytes + _CARD_HEADROOM_BYTES)} GiB on"


def _host(asked: DryRun) -> tuple[int | None, str]:
    if asked.host_gib is not None:
        return gib_to_bytes(asked.host_gib, "--ram"), "the budget that was given"
    limits = host_limits()
    share = f"{AUTOMATIC_HOST_SHARE:.0%} of what is free here ({limits.source})"
    return int(limits.available_bytes * AUTOMATIC_HOST_SHARE), share


def _link(asked: DryRun) -> tuple[float, str]:
    if asked.link_gb_per_second is not None:
        if not 0 < asked.link_gb_per_second < 10**5:
            raise UsageError("--link has to be a number of GB a second above 0, such as 25")
        return asked.link_gb_per_second * _GB, "given"
    if asked.measure_link:
        return _measured_link(), "measured now"
    text = "assumed: PCIe 4 x16; give yours with --link, or --measure-link where there is a card"
    return ASSUMED_LINK_GB_PER_SECOND * _GB, text


def _answer(request: PlanRequest, plan: Plan, link: float) -> dict[str, Any]:
    layers = [
        _layer_json(cost, layer) for cost, layer in zip(request.layers, plan.layers, strict=True)
    ]
    streamed = sum(layer["streamed_bytes"] for layer in layers)
    counts = {p.value: sum(layer["placement"] == p.value for layer in layers) for p in Placement}
    locked = sum(layer["locked_bytes"] for layer in layers)
    copied = sum(
        cost.extents[i].size_bytes
        for cost, layer in zip(request.layers, plan.layers, strict=True)
        for i in range(layer.streamed.first, layer.streamed.last)
        if not cost.mapped[i]
    )
    return {
        "fits": True,
        "message": f"{size_text(plan.device_bytes)} of weights and buffers on the card, "
        f"{counts['resident']} of {len(layers)} layers stay there whole, "
        f"{size_text(streamed)} stream in each pass",
        "planned": {
            "device_bytes": plan.device_bytes,
            "base_bytes": request.base_device_bytes,
            "slots": plan.slots,
            "slot_bytes": plan.slot_bytes,
            "activation_bytes": plan.activation_bytes,
            "host_locked_bytes": plan.lock_bytes,
            "host_staging_bytes": plan.staging_bytes,
            "host_copied_bytes": plan.copied_bytes,
            "streamed_bytes": streamed,
            "pinned_bytes": min(locked, streamed),
            "mapped_bytes": max(0, streamed - copied - locked),
            "copied_bytes": copied,
        },
        "counts": counts,
        "step": {
            "floor_seconds": streamed / link,
            "note": "of copying alone, one pass a step: a step takes at least this, and at least "
            "what it takes with everything on the card; mapped bytes come slower",
        },
        "layers": layers,
    }


def _layer_json(cost: LayerCost, layer: LayerPlan) -> dict[str, Any]:
    size = sum(extent.size_bytes for extent in cost.extents)
    streams = range(layer.streamed.first, layer.streamed.last)
    streamed = sum(cost.extents[i].size_bytes for i in streams)
    return {
        "name": cost.name,
        "bytes": size,
        "resident_bytes": size - streamed,
        "streamed_bytes": streamed,
        "locked_bytes": min(layer.lock_bytes or 0, streamed),
        "placement": layer.placement.value,
        "reason": layer.reason,
    }


def _measured_link() -> float:
    """Page-locked copies to the card, as a pinned layer's are. Bytes a second."""
    if not cuda_is_available():
        raise UsageError("--measure-link needs a card, and there is none here; give --link")
    return cuda_link_bytes_per_second()
