"""What nodes, routes and headless runs may ask of the models: to sleep and to wake.

The words that the HTTP door and the nodes share; ``CourierService`` answers them. A request names
models by the ids of the status; None stands for all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class When(enum.Enum):
    """What to do while a prompt runs or waits."""

    NOW = "now"
    """Refuse at once, with nothing changed."""
    IDLE = "idle"
    """Wait until the queue is empty."""


class OnUse(enum.Enum):
    """What a prompt that needs a sleeping model finds."""

    REFUSE = "refuse"
    """An error that says which model sleeps and how to wake it."""
    WAKE = "wake"
    """The model, woken first."""


@dataclass(frozen=True)
class SleepOrder:
    """Put models to sleep. ``level`` 1 keeps what they hold on the host, 2 gives it back too."""

    models: tuple[str, ...] | None = None
    level: int = 1
    when: When = When.NOW
    on_use: OnUse = OnUse.REFUSE


@dataclass(frozen=True)
class WakeOrder:
    """Wake models; None: those that an earlier order put to sleep."""

    models: tuple[str, ...] | None = None
    when: When = When.NOW


class ControlError(Exception):
    """An order was not carried out; the text says why, and what to do. Nothing has changed."""


class UnknownModelError(ControlError):
    """No model has this id, or it is gone."""


class BusyError(ControlError):
    """A prompt runs or waits, or other orders are being carried out."""


class OrderFailedError(ControlError):
    """Something went wrong half-way. All that could be was put back; ``receipt`` (JSON-ready) says
    what is where."""

    def __init__(self, message: str, receipt: dict[str, Any]) -> None:
        super().__init__(message)
        self.receipt = receipt


class ModelControl(Protocol):
    """Threads: any. ``sleep`` and ``wake`` block until all is done, or refused.

    Each gives the receipt, ready for JSON (no NaN, no path): ``{"ok": bool, "action": "sleep",
    "message": "a sentence", "seconds": 0.1, "models": [...], ...}``. ``ok`` is false where nothing
    was freed although something was held.

    Raises: UnknownModelError, BusyError, OrderFailedError.
    """

    last_order: dict[str, Any] | None
    """The receipt of the last order, whoever gave it; None before the first."""

    def models(self) -> Sequence[dict[str, Any]]:
        """Every model, ours and ComfyUI's: ``{"id", "name", "kind", "state", ...}``."""

    def sleep(self, order: SleepOrder) -> dict[str, Any]:
        """Carry out the order."""

    def wake(self, order: WakeOrder) -> dict[str, Any]:
        """Carry out the order."""
