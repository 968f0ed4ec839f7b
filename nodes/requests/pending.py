"""The orders that wait or are being carried out outside of prompts: shown, and cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .records import CancelledError

_CANCELLED_TEXT = "the order was cancelled; what it had done was undone"
_WITHDRAWN_TEXT = "the order was cancelled while it waited; nothing was done"


class UnderWay:
    """One order. Its own thread writes it, any may read it and cancel it."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.waits = True
        self.done = 0
        self.total = 0
        self.name = ""
        self.cancelled = False

    def check(self) -> None:
        """Asked again and again while the order waits for its turn. Raises: CancelledError."""
        if self.cancelled:
            raise CancelledError(_WITHDRAWN_TEXT if self.waits else _CANCELLED_TEXT)

    def step(self, done: int, total: int, name: str) -> None:
        """Before each model; see ``offload_core.sleep.Progress``. Raises: CancelledError."""
        self.check()
        self.waits, self.done, self.total, self.name = False, done, total, name


class OrderList:
    """See ``control.OrdersUnderWay``.

    Threads: any. A list of Python's own: to append, to remove and to copy it is one step each.
    """

    def __init__(self) -> None:
        self._orders: list[UnderWay] = []

    @contextmanager
    def entered(self, action: str) -> Iterator[UnderWay]:
        """An order is under way while this is entered."""
        order = UnderWay(action)
        self._orders.append(order)
        try:
            yield order
        finally:
            self._orders.remove(order)

    def listed(self) -> list[dict[str, Any]]:
        """See ``control.OrdersUnderWay``."""
        return [dict(vars(order)) for order in list(self._orders)]

    def cancel(self) -> dict[str, Any]:
        """See ``control.OrdersUnderWay``."""
        orders = [order for order in list(self._orders) if not order.cancelled]
        for order in orders:
            order.cancelled = True
        if not orders:
            return {"cancelled": 0, "message": "No order waits or is being carried out."}
        count = "1 order is" if len(orders) == 1 else f"{len(orders)} orders are"
        return {"cancelled": len(orders), "message": f"{count} told to stop."}
