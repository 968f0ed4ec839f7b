"""What the running ComfyUI offers: its server's routes, its device."""

from __future__ import annotations

import functools

import comfy.model_management
import torch
from aiohttp import web

from ...offload_core.device import DeviceBackend, DeviceMemory, backend_for


def server_routes() -> web.RouteTableDef | None:
    """The route table of the server, or None where ComfyUI runs without one."""
    try:
        from server import PromptServer
    except ImportError:
        return None
    instance = getattr(PromptServer, "instance", None)
    return None if instance is None else instance.routes


def device_memory() -> DeviceMemory:
    """Memory of the device that ComfyUI computes on, as its driver tells it."""
    return _backend(comfy.model_management.get_torch_device()).memory()


@functools.lru_cache(maxsize=4)
def _backend(device: torch.device) -> DeviceBackend:
    # Kept: a backend has a stream of its own, too much for a question asked every second.
    return backend_for(device)
