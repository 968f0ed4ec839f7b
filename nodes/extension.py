"""Our extension object, and the routes, made when ComfyUI asks for them."""

from __future__ import annotations

import importlib
import logging

from comfy_api.latest import ComfyExtension, io

from .comfyui.compat import has, tell
from .comfyui.symbols import Part
from .graph.stand_ins import stand_ins

_MODULES = ("budget", "loaders", "encoders", "vaes", "checkpoints", "sleep", "status")

logger = logging.getLogger("courier")


class CourierExtension(ComfyExtension):
    """Lists the nodes it was given."""

    def __init__(self, nodes: list[type[io.ComfyNode]]) -> None:
        super().__init__()
        self._nodes = nodes

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The nodes of this copy of the pack."""
        return self._nodes


def make_extension() -> CourierExtension:
    """Register the routes (once, and only where there is a server) and give the extension.

    In a ComfyUI that lacks something that the pack uses, what can work does, and the rest says why
    when it is used.
    """
    is_whole = tell()
    try:
        if (is_whole or has(Part.PAGE)) and not _open_door():
            # Another copy of the pack answers: nodes of ours would fill a status nobody sees.
            return CourierExtension([])
    except Exception:
        if is_whole:
            raise
        logger.debug("Courier: no routes in this ComfyUI", exc_info=True)
    return CourierExtension([node for name in _MODULES for node in _nodes_of(name, is_whole)])


def _nodes_of(name: str, is_whole: bool) -> list[type[io.ComfyNode]]:
    try:
        return list(importlib.import_module(f".graph.{name}", __package__).NODES)
    except Exception:
        if is_whole:
            raise
        logger.debug("Courier: %s cannot be loaded in this ComfyUI", name, exc_info=True)
        return stand_ins(name)


def _open_door() -> bool:
    """Whether this copy of the pack is the one that answers."""
    # Not at the head of this file: one of them may fail where ComfyUI lacks something.
    from .comfyui.budgets import get_budgets
    from .comfyui.events import listen
    from .comfyui.host import announce_prompts, device_memory, server_routes
    from .comfyui.orders import get_orders
    from .comfyui.prompts import on_prompt
    from .comfyui.queue import ComfyQueue, look_at_models
    from .http.register import register_routes
    from .models.registry import get_service
    from .runs.service import RunService

    service = get_service()
    service.use_device_probe(device_memory)
    routes = server_routes()
    runs = RunService(ComfyQueue(), get_orders(), look_at_models)
    if routes is not None and not register_routes(
        routes, service, get_orders(), budgets=get_budgets(), listen=listen, runs=runs
    ):
        return False
    announce_prompts(on_prompt)
    return True
