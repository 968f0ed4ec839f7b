"""Our extension object, and the routes, made when ComfyUI asks for them."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .comfyui.budgets import get_budgets
from .comfyui.events import listen
from .comfyui.host import announce_prompts, device_memory, server_routes
from .comfyui.orders import get_orders
from .comfyui.prompts import on_prompt
from .comfyui.queue import ComfyQueue, look_at_models
from .graph import budget as budget_nodes
from .graph import checkpoints as checkpoint_nodes
from .graph import encoders as encoder_nodes
from .graph import loaders as loader_nodes
from .graph import sleep as sleep_nodes
from .graph import status as status_nodes
from .graph import vaes as vae_nodes
from .http.register import register_routes
from .models.registry import get_service
from .runs.service import RunService

ALL_NODES: list[type[io.ComfyNode]] = [
    *budget_nodes.NODES,
    *loader_nodes.NODES,
    *encoder_nodes.NODES,
    *vae_nodes.NODES,
    *checkpoint_nodes.NODES,
    *sleep_nodes.NODES,
    *status_nodes.NODES,
]


class CourierExtension(ComfyExtension):
    """Lists the nodes it was given."""

    def __init__(self, nodes: list[type[io.ComfyNode]]) -> None:
        super().__init__()
        self._nodes = nodes

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The nodes of this copy of the pack."""
        return self._nodes


def make_extension() -> CourierExtension:
    """Register the routes (once, and only where there is a server) and give the extension."""
    service = get_service()
    service.use_device_probe(device_memory)
    routes = server_routes()
    runs = RunService(ComfyQueue(), get_orders(), look_at_models)
    if routes is not None and not register_routes(
        routes, service, get_orders(), budgets=get_budgets(), listen=listen, runs=runs
    ):
        # Another copy of the pack answers: nodes of ours would fill a status nobody sees.
        return CourierExtension([])
    announce_prompts(on_prompt)
    return CourierExtension(ALL_NODES)
