"""The HTTP door. Nothing is registered at import, only by ``register_routes``."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from aiohttp import web

from ..models.events import CLIENT_HEADER
from ..models.registry import VERSION, CourierService
from ..models.status_json import status_json
from ..requests.records import BudgetControl, ModelControl, NotWithThisComfyError
from ..runs.follower import RunFollower
from ..runs.service import RunService
from .answers import error_answer, json_answer, method_answer
from .guards import Guards, peer_of
from .openapi import document
from .request_routes import OrderRoute, budget_routes, order_routes
from .run_routes import RunDoor, RunPath
from .table import MODELS, OPENAPI, PREFIX, ROUTES, STATUS, RouteSpec

logger = logging.getLogger("courier")

Listen = Callable[[str, "str | None"], None]


def _nobody_listens(client_id: str, address: str | None) -> None:
    """There are no events."""


class ReadRoute:
    """Answers for one path that only reads, always in JSON. What it tells has no paths.

    Threads: the server's event loop.
    """

    def __init__(
        self,
        spec: RouteSpec,
        read: Callable[[], Any],
        listen: Listen = _nobody_listens,
    ) -> None:
        """
        Args:
            read: gives the body, ready for JSON; it may block.
            listen: called with the id and the address of a client that asks for events.
        """
        self.spec = spec
        self._read = read
        self._listen = listen

    async def handle(self, request: web.Request) -> web.Response:
        """GET: what there is. Any other method: 405, with a sentence."""
        what, name = self.spec.what, self.spec.name
        if request.method not in self.spec.methods:
            return method_answer(request.method, self.spec.methods, f"{what} is read with GET")
        client_id = request.headers.get(CLIENT_HEADER)
        if client_id is not None:
            self._listen(client_id, peer_of(request))
        try:
            # Reading the limits of the host and the driver's memory may block.
            body = await asyncio.to_thread(self._body)
        except NotWithThisComfyError as error:
            return error_answer(501, "not_with_this_comfyui", str(error))
        except Exception as error:
            # The text of a foreign error may hold a path, so it stays in the log.
            logger.exception("Courier: %s could not be read", what)
            kind = type(error).__name__
            text = f"{what} could not be read ({kind}); ComfyUI's log has the details"
            return error_answer(500, f"{name}_failed", text)
        return json_answer(200, None, text=body)

    def _body(self) -> str:
        return json.dumps(self._read(), allow_nan=False)


def register_routes(
    routes: web.RouteTableDef | web.UrlDispatcher,
    service: CourierService,
    control: ModelControl | None = None,
    guards: Guards | None = None,
    budgets: BudgetControl | None = None,
    listen: Listen = _nobody_listens,
    runs: RunService | None = None,
) -> bool:
    """Add our routes to ``routes``, unless they are there.

    Where somebody else has one of our paths, ComfyUI's server would not start with a second one:
    then a warning names who has it, and nothing is registered. A name that is not ours alone (those
    outside PREFIX) is left to whoever has it, and the others are registered.

    Args:
        routes: ComfyUI's route table, before the server takes it; or a router of aiohttp.
        control: without one, only the status is registered.
        guards: who may change a state; by default as the environment says.
        budgets: without them, no route asks for a plan or sets a budget.
        listen: called with the id and the address of a client that asks for events.
        runs: without it, no workflow is run.
    Returns: whether this copy of the pack answers.
    """
    ours = _routes(service, control, guards or Guards(os.environ), budgets, listen, runs)
    taken = {route.spec.path: _taken_by(routes, route.spec.path) for route in ours}
    strangers = {path: who for path, who in taken.items() if who not in (None, _US)}
    for path, stranger in strangers.items():
        if path.startswith(PREFIX):
            logger.warning(
                "Courier: %s is registered already by %s; is the pack installed twice? "
                "This copy (%s) adds no routes.",
                path,
                stranger,
                __file__,
            )
            return False
    for path, stranger in strangers.items():
        logger.warning("Courier: %s is left to %s, which has it already", path, stranger)
    for route in ours:
        if taken[route.spec.path] is None:
            _add(routes, route)
    return True


# Says of a path that this copy of the pack answers there.
_US = "us"


OurRoute = ReadRoute | OrderRoute | RunPath


def _routes(
    service: CourierService,
    control: ModelControl | None,
    guards: Guards,
    budgets: BudgetControl | None,
    listen: Listen,
    runs: RunService | None,
) -> list[OurRoute]:
    """What this copy answers, in the order of the table: the status is the first one looked for."""
    made: list[OurRoute] = [ReadRoute(STATUS, lambda: status_json(service.status()), listen)]
    if control is not None:
        made += [
            ReadRoute(MODELS, lambda: models_json(control), listen),
            ReadRoute(OPENAPI, lambda: document(VERSION, _in_order(made))),
            *order_routes(control, guards),
        ]
    if budgets is not None:
        made += budget_routes(budgets, guards)
    if runs is not None:
        made += RunDoor(runs, guards, RunFollower(runs).wake).paths()
    return made


def models_json(control: ModelControl) -> dict[str, Any]:
    """The body of ``GET /courier/v1/models``."""
    return {
        "models": list(control.models()),
        "last_order": control.last_order,
        "orders": control.under_way.listed(),
        "busy": control.is_busy(),
    }


def _in_order(made: Sequence[OurRoute]) -> list[RouteSpec]:
    """Those of runs come last."""
    specs = [route.spec for route in made if not isinstance(route, RunPath)]
    of_runs = [spec for route in made if isinstance(route, RunPath) for spec in route.specs]
    return [*sorted(specs, key=ROUTES.index), *of_runs]


def _add(routes: web.RouteTableDef | web.UrlDispatcher, route: OurRoute) -> None:
    # "*": other methods are refused by us, in JSON, and HEAD cannot be registered a second time.
    if isinstance(routes, web.UrlDispatcher):
        routes.add_route("*", route.spec.path, route.handle)
    else:
        routes.route("*", route.spec.path)(route.handle)


def _taken_by(routes: web.RouteTableDef | web.UrlDispatcher, path: str) -> str | None:
    """Who answers at ``path``: nobody, _US, or where a stranger's handler was written."""
    for handler in _handlers(routes, path):
        # A second copy of the pack has classes of its own, so it is a stranger.
        if isinstance(getattr(handler, "__self__", None), (ReadRoute, OrderRoute, RunPath)):
            return _US
        return _place(handler)
    return None


def _handlers(routes: web.RouteTableDef | web.UrlDispatcher, path: str) -> Iterator[Any]:
    if isinstance(routes, web.UrlDispatcher):
        for added in routes.routes():
            if added.resource is not None and added.resource.canonical == path:
                yield added.handler
        return
    for route in routes:
        if isinstance(route, web.RouteDef) and route.path == path:
            yield route.handler


def _place(handler: Any) -> str:
    """Where a handler was written: its file, or else what it calls itself."""
    code = getattr(handler, "__code__", None)
    return str(code.co_filename) if code is not None else repr(handler)
