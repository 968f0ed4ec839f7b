"""The HTTP door to sleep and wake: parse, call the control once, shape the reply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ..requests.records import (
    BudgetControl,
    BudgetOrder,
    BudgetTooSmallError,
    BusyError,
    CancelledError,
    Figure,
    ModelControl,
    NotWithThisComfyError,
    OnUse,
    OrderFailedError,
    SleepOrder,
    UnknownModelError,
    WakeOrder,
    When,
)
from .answers import error_answer, error_body, json_answer, method_answer
from .bodies import names_text, parse_object, read_body, read_fields
from .guards import Guards, RefusedError
from .own_thread import in_own_thread
from .table import BUDGET, CANCEL, PLAN, RELEASE, RESUME, SLEEP, WAKE, RouteSpec

MOST_ORDERS = 3
ASLEEP = "asleep"

logger = logging.getLogger("courier")

Call = Callable[[], dict[str, Any]]
"""An order with nothing left to decide. Blocks; gives the body of the answer."""


class Orders:
    """The orders that are being carried out, at most MOST_ORDERS.

    Each one is carried out to its end, also when the client goes away meanwhile or the server ends
    the handler: half an order is worse than one whose receipt nobody reads.

    Threads: the server's event loop.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[dict[str, Any]]] = set()

    def check_room(self) -> None:
        """Raises: BusyError where so many are being carried out already."""
        if len(self._running) >= MOST_ORDERS:
            raise BusyError("other orders are still being carried out; ask again later")

    async def carry_out(self, call: Call) -> dict[str, Any]:
        """Run ``call`` in a thread of its own and wait for it. Raises what it raises."""
        task = asyncio.create_task(in_own_thread("courier-order", call))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # shield: cancelling the handler must neither cancel an order that waits for a thread, nor
        # make room for another one while this one runs.
        return await asyncio.shield(task)


class OrderRoute:
    """Answers for one path that changes a state, always in JSON.

    Threads: the server's event loop.
    """

    def __init__(
        self, spec: RouteSpec, guards: Guards, orders: Orders, make_call: Callable[..., Call]
    ) -> None:
        """``make_call`` takes what the body says: every field by name."""
        self.spec = spec
        self._guards = guards
        self._orders = orders
        self._make_call = make_call

    async def handle(self, request: web.Request) -> web.Response:
        """POST: carry the order out. Any other method: 405, with a sentence."""
        if request.method != "POST":
            answer = method_answer(request.method, self.spec.methods, f"{self.spec.what} with POST")
        else:
            answer = await self._answer(request)
        if not request.content.is_eof():
            # Of what is still on its way aiohttp drops some, so that the client can read this
            # answer; it is nobody's next request.
            answer.force_close()
        return answer

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            self._guards.check(request)
            call = self._read(request, await read_body(request))
        except RefusedError as refusal:
            return _refusal_answer(refusal)
        except Exception as error:
            return self._failure(error)
        try:
            self._orders.check_room()
            # Last: whoever is refused above has taken nothing from those who are not.
            self._guards.rate.take()
            return json_answer(200, await self._orders.carry_out(call))
        except RefusedError as refusal:
            return _refusal_answer(refusal)
        except Exception as error:
            return self._failure(error)

    def _read(self, request: web.Request, body: bytes) -> Call:
        """The order that a request is. Raises: RefusedError."""
        if request.query_string:
            # Dropped in silence, ?level=2 would be a sleep at level 1.
            text = "there are no parameters in the address; fields go into the body"
            raise RefusedError(400, "unknown_field", text)
        return self._make_call(**read_fields(parse_object(body), self.spec.fields or ()))

    def _failure(self, error: Exception) -> web.Response:
        status, code, message, more = self._describe(error)
        body = self._failure_body(code, message, more)
        try:
            return json_answer(status, body)
        except (TypeError, ValueError) as fault:
            # A receipt that is no JSON.
            return self._failure(fault)

    def _describe(self, error: Exception) -> tuple[int, str, str, dict[str, Any]]:
        """Status, code, sentence, and what else belongs into the answer."""
        if isinstance(error, UnknownModelError):
            return 404, "unknown_model", str(error), {}
        if isinstance(error, BusyError):
            return 409, "busy", str(error), {}
        if isinstance(error, CancelledError):
            return 409, "cancelled", str(error), {}
        if isinstance(error, BudgetTooSmallError):
            return 409, "budget_too_small", str(error), {}
        if isinstance(error, OrderFailedError):
            return 503, "order_failed", str(error), {"receipt": error.receipt}
        if isinstance(error, NotWithThisComfyError):
            return 501, "not_with_this_comfyui", str(error), {}
        # The text of a foreign error may hold a path, so it stays in the log.
        name, kind = self.spec.name, type(error).__name__
        logger.error("Courier: %s failed", name, exc_info=error)
        return 500, f"{name}_failed", f"{name} failed ({kind}); ComfyUI's log has the details", {}

    def _failure_body(self, code: str, message: str, more: dict[str, Any]) -> dict[str, Any]:
        return {**error_body(code, message), **more}


class AliasRoute(OrderRoute):
    """A path that other servers' tools know: takes whatever they send, answers as they expect."""

    def _read(self, request: web.Request, body: bytes) -> Call:
        fields = parse_object(body) if body.strip() else {}
        return self._make_call(ignored=tuple(fields))

    def _describe(self, error: Exception) -> tuple[int, str, str, dict[str, Any]]:
        status, code, message, more = super()._describe(error)
        if isinstance(error, BusyError):
            message += " (fields are not read here: POST /courier/v1/sleep or /courier/v1/wake)"
        return status, code, message, more

    def _failure_body(self, code: str, message: str, more: dict[str, Any]) -> dict[str, Any]:
        return {**error_body(code, message), "success": False, "message": message, **more}


def order_routes(control: ModelControl, guards: Guards) -> tuple[OrderRoute, ...]:
    """One route for each path that changes a state; they share the guards and the room."""
    orders = Orders()

    def sleep(models: tuple[str, ...] | None, level: int, when: str, on_use: str) -> Call:
        order = SleepOrder(models, level, When(when), OnUse(on_use))
        return lambda: control.sleep(order)

    def wake(models: tuple[str, ...] | None, when: str) -> Call:
        order = WakeOrder(models, When(when))
        return lambda: control.wake(order)

    def release(ignored: tuple[str, ...]) -> Call:
        return lambda: _occupation(control, control.sleep(SleepOrder()), ignored)

    def resume(ignored: tuple[str, ...]) -> Call:
        return lambda: _occupation(control, control.wake(WakeOrder()), ignored)

    return (
        OrderRoute(SLEEP, guards, orders, sleep),
        OrderRoute(WAKE, guards, orders, wake),
        # In room of its own: it has to come through where the others wait.
        OrderRoute(CANCEL, guards, Orders(), lambda: control.under_way.cancel),
        AliasRoute(RELEASE, guards, orders, release),
        AliasRoute(RESUME, guards, orders, resume),
    )


def budget_routes(budgets: BudgetControl, guards: Guards) -> tuple[OrderRoute, ...]:
    """A plan has room of its own: it waits for nothing, and has not to wait for orders that do."""

    def plan(model: str, device_gib: Figure, host_gib: Figure) -> Call:
        order = BudgetOrder(model, device_gib, host_gib)
        return lambda: budgets.plan(order)

    def budget(model: str, device_gib: Figure, host_gib: Figure, when: str) -> Call:
        order = BudgetOrder(model, device_gib, host_gib, When(when))
        return lambda: budgets.set_budget(order)

    return (
        OrderRoute(PLAN, guards, Orders(), plan),
        OrderRoute(BUDGET, guards, Orders(), budget),
    )


def _occupation(
    control: ModelControl, receipt: dict[str, Any], ignored: tuple[str, ...]
) -> dict[str, Any]:
    message = str(receipt["message"])
    if ignored:
        message = f"{message.rstrip('.')}. Ignored: {names_text(ignored)}."
    sleeping = [model["id"] for model in control.models() if model["state"] == ASLEEP]
    return {"success": bool(receipt["ok"]), "sleeping": sleeping, "message": message}


def _refusal_answer(refusal: RefusedError) -> web.Response:
    return error_answer(refusal.status, refusal.code, str(refusal), refusal.headers)
