"""Puts an engine together from a module, a device and the files that its weights lie on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..device import DeviceBackend
from ..host import FileMapping, HostLedger, PageLocker
from ..plan import find_block_lists
from ..values import Budget, EngineConfig
from .courier import Courier
from .engine import LayerEngine
from .parts import NO_LIMIT_BYTES, EngineParts
from .patches import Patches
from .source import LayerSource
from .stream import LayerStream
from .weights import take_inventory


def attach(
    root: nn.Module,
    backend: DeviceBackend,
    mappings: Sequence[FileMapping] = (),
    config: EngineConfig | None = None,
    name: str = "model",
    notes: Sequence[str] = (),
    budget: Budget | None = None,
    device_dtypes: Mapping[str, torch.dtype] | None = None,
) -> LayerEngine:
    """An engine over ``root``; its layers are found, nothing is moved.

    Args:
        root: any module whose weights are on the CPU. Its parameters need no gradient.
        mappings: the checkpoint mappings that some of the weights are views on.
        name: for the courier thread and for messages.
        notes: what the status has to say about this model from the start.
        budget: what the status shows until the first load.
        device_dtypes: by a weight's name, what to round it to on the device; heeded where it is
            floating and as wide as what the weight is stored in.
    Raises: ConfigError if a weight has no data or is on another device already.
    """
    config = config or EngineConfig()
    block_lists = find_block_lists(root)
    inventory = take_inventory(root, block_lists, mappings, device_dtypes)
    ledger = HostLedger(NO_LIMIT_BYTES)
    locker = PageLocker(backend.page_locker(), ledger)
    sources = tuple(LayerSource(group, locker) for group in inventory.layers)
    courier = Courier(backend, name, config.switches.courier, config.patience_seconds)
    patches = Patches(backend)
    stream = LayerStream(
        len(inventory.layers),
        sources,
        backend,
        courier,
        config,
        patches,
    )
    parts = EngineParts(
        inventory=inventory,
        block_lists=block_lists,
        mappings=tuple(mappings),
        backend=backend,
        ledger=ledger,
        sources=sources,
        base_source=LayerSource(inventory.base, locker),
        courier=courier,
        stream=stream,
        patches=patches,
        config=config,
        lock_refusal=_lock_refusal(backend, mappings, config),
        notes=(*config.switches.notes, *notes),
        budget=budget or Budget(),
    )
    engine = LayerEngine(root, parts)
    engine.hook_layers()
    return engine


def _lock_refusal(
    backend: DeviceBackend, mappings: Sequence[FileMapping], config: EngineConfig
) -> str | None:
    if not config.switches.in_place:
        return "switched off"
    if backend.lock_refusal is not None:
        return backend.lock_refusal
    reasons = (backend.probe_locks(mapping) for mapping in mappings)
    return next((reason for reason in reasons if reason is not None), None)
