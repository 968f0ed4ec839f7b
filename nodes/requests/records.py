"""What nodes, routes and headless runs may ask of the models: to sleep, to wake, another budget.

The words that the HTTP door and the nodes share; ``CourierService`` answers them. A request names
models by the ids of the status; None stands for all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias


class Keep(enum.Enum):
    """A figure that an order leaves as it is. Not None: that is "without a figure"."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP
Figure: TypeAlias = "int | Literal[Keep.KEEP] | None"


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


@dataclass(frozen=True)
class BudgetOrder:
    """Another budget for one model of Courier's, in bytes. None is what it is to the node Courier
    Budget: the card is left to ComfyUI, the host budget is automatic."""

    model: str
    device_bytes: Figure = KEEP
    host_bytes: Figure = KEEP
    when: When = When.NOW


class ControlError(Exception):
    """An order was not carried out; the text says why, and what to do. Nothing has changed."""


class UnknownModelError(ControlError):
    """No model has this id, or it is gone."""


class BusyError(ControlError):
    """A prompt runs or waits, or other orders are being carried out."""


class CancelledError(ControlError):
    """Somebody cancelled the order; what it had done was undone."""


class BudgetTooSmallError(ControlError):
    """The model does not run under such a budget; the text names the smallest that works."""


class NotWithThisComfyError(ControlError):
    """This ComfyUI is too old or too new for it; the text names what is missing."""


class OrderFailedError(ControlError):
    """Something went wrong half-way. All that could be was put back; ``receipt`` (JSON-ready) says
    what is where."""

    def __init__(self, message: str, receipt: dict[str, Any]) -> None:
        super().__init__(message)
        self.receipt = receipt


class OrdersUnderWay(Protocol):
    """Threads: any; nothing waits."""

    def listed(self) -> list[dict[str, Any]]:
        """Each order, the oldest first: ``{"action", "waits", "done", "total", "name",
        "cancelled"}``; ``done`` of ``total`` models, ``name`` the one whose turn it is."""

    def cancel(self) -> dict[str, Any]:
        """Cancel them: ``{"cancelled": 1, "message": "a sentence"}``. They end with CancelledError;
        one that is past its last step is carried out all the same."""


class ModelControl(Protocol):
    """Threads: any. ``sleep`` and ``wake`` block until all is done, or refused.

    Each gives the receipt, ready for JSON (no NaN, no path): ``{"ok": bool, "action": "sleep",
    "message": "a sentence", "seconds": 0.1, "models": [...], ...}``. ``ok`` is false where nothing
    was freed although something was held.

    Raises: UnknownModelError, BusyError, CancelledError, OrderFailedError.
    """

    last_order: dict[str, Any] | None
    """The receipt of the last order, whoever gave it; None before the first."""
    under_way: OrdersUnderWay
    """The orders that are being carried out or wait, and how to cancel them."""

    def is_busy(self) -> bool:
        """Whether a prompt runs or waits: an order to be carried out now would be refused."""

    def models(self) -> Sequence[dict[str, Any]]:
        """Every model, ours and ComfyUI's: ``{"id", "name", "kind", "state", ...}``."""

    def sleep(self, order: SleepOrder) -> dict[str, Any]:
        """Carry out the order."""

    def wake(self, order: WakeOrder) -> dict[str, Any]:
        """Carry out the order."""


class BudgetControl(Protocol):
    """Threads: any. ``set_budget`` blocks until all is done, or refused.

    Raises: UnknownModelError; ``set_budget`` also BusyError, BudgetTooSmallError, CancelledError,
        OrderFailedError.
    """

    def plan(self, order: BudgetOrder) -> dict[str, Any]:
        """Where every layer would be under that budget. Changes nothing; JSON-ready (docs/http.md).
        A budget that is too small is an answer with ``"fits": false``."""

    def set_budget(self, order: BudgetOrder) -> dict[str, Any]:
        """The same, and from now on the model has that budget; ``applied`` says since when."""
