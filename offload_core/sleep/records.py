"""Receipts: what an order did, as measured. Frozen, safe to read from any thread."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SleepState(enum.Enum):
    """Whether a model may be used; between two rests stands a moving state."""

    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"
    """An order failed and undoing it failed too; ``problem`` says what is where."""


@dataclass(frozen=True)
class Held:
    """What one model holds, in bytes, by its own ledgers."""

    device_bytes: int
    locked_bytes: int = 0
    """Page-locked pages of its file."""
    copied_bytes: int = 0
    """Ordinary memory that holds weights."""
    staging_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """All that it holds on the host."""
        return self.locked_bytes + self.copied_bytes + self.staging_bytes


@dataclass(frozen=True)
class MachineRecord:
    """What the machine says, in bytes; None where nobody counts.

    ``device_used_bytes`` is the driver's and counts everybody; ``device_reserved_bytes`` is what
    this process's allocator has from the driver; ``anon_bytes`` and ``locked_bytes`` are the
    kernel's for this process, without what a device driver locked.
    """

    device_total_bytes: int | None = None
    device_used_bytes: int | None = None
    device_reserved_bytes: int | None = None
    anon_bytes: int | None = None
    locked_bytes: int | None = None


@dataclass(frozen=True)
class ModelReceipt:
    """One model of an order. ``changed``: the order did something to it."""

    id: str
    name: str
    kind: str
    state: SleepState
    level: int | None
    changed: bool
    before: Held
    after: Held
    kept: tuple[str, ...]
    """What it still holds and why, for people."""


@dataclass(frozen=True)
class Receipt:
    """What came of an order that was carried out."""

    action: str
    ok: bool
    message: str
    seconds: float
    models: tuple[ModelReceipt, ...]
    before: MachineRecord
    after: MachineRecord
    not_ours: tuple[str, ...] = ()
    """Memory that no order of ours can free, in words."""
