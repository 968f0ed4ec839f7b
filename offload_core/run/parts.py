"""What one engine is made of, put together by ``attach``."""

from __future__ import annotations

from dataclasses import dataclass

from ..device import DeviceBackend
from ..host import FileMapping, HostLedger
from ..plan import BlockList
from ..values import Budget, EngineConfig
from .courier import Courier
from .patches import Patches
from .source import LayerSource
from .stream import LayerStream
from .weights import Inventory

NO_LIMIT_BYTES = 1 << 62
"""What a ledger takes for a budget without a limit."""


@dataclass(frozen=True)
class EngineParts:
    """What one engine is made of; each part is useful, and tested, alone."""

    inventory: Inventory
    block_lists: tuple[BlockList, ...]
    mappings: tuple[FileMapping, ...]
    backend: DeviceBackend
    ledger: HostLedger
    sources: tuple[LayerSource, ...]
    base_source: LayerSource
    courier: Courier
    stream: LayerStream
    patches: Patches
    config: EngineConfig
    lock_refusal: str | None
    """Why no page of these mappings is locked, or None."""
    notes: tuple[str, ...]
    budget: Budget
