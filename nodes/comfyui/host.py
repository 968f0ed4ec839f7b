"""What the running ComfyUI offers: its server's routes, its settings, its device."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfy.model_management
import comfy.sd
import folder_paths
import torch
from aiohttp import web

from ...offload_core.device import DeviceBackend, DeviceMemory, backend_for

_SETTINGS_FILE = "comfy.settings.json"


def server() -> Any:
    """ComfyUI's server, or None where ComfyUI runs without one."""
    try:
        from server import PromptServer
    except ImportError:
        return None
    return getattr(PromptServer, "instance", None)


def server_routes() -> web.RouteTableDef | None:
    """The route table of the server, or None where there is no server."""
    instance = server()
    return None if instance is None else instance.routes


def prompt_queue() -> Any:
    """The server's, or None where there is no server."""
    return getattr(server(), "prompt_queue", None)


def announce_prompts(handler: Callable[[Any], Any]) -> None:
    """Have ``handler`` called with each prompt that arrives, once however often this is called."""
    instance = server()
    if instance is not None and handler not in instance.on_prompt_handlers:
        instance.add_on_prompt_handler(handler)


def settings_text() -> str:
    """ComfyUI's own file of settings, as its settings dialog writes it; "" where there is none."""
    file = Path(folder_paths.get_user_directory()) / "default" / _SETTINGS_FILE
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def choices_of(core_class: str, name: str) -> tuple[str, ...]:
    """What a node of the core's offers for an input; where the core's nodes are not loaded, all of
    its types of text encoders."""
    known = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    node = known.get(core_class)
    if node is None:
        return tuple(one.name.lower() for one in comfy.sd.CLIPType)
    return tuple(node.INPUT_TYPES()["required"][name][0])


def device_memory() -> tuple[torch.device, DeviceMemory]:
    """The device that ComfyUI computes on, and its memory as the driver tells it."""
    device = comfy.model_management.get_torch_device()
    return device, _backend(device).memory()


def device_room_bytes(device: torch.device, held_bytes: int, has_figure: bool) -> int | None:
    """What ``device`` has for a model that holds ``held_bytes`` of it already, and for its run.

    Args:
        has_figure: the user gave a device budget. Then nothing is kept back for other applications,
            unless they asked for it with ``--reserve-vram`` or the system needs it (Windows).
    Returns: None where the core's own offer is to be taken at its word: on a CPU, and where the
        user asked for as little on the device as can be.
    """
    management = comfy.model_management
    if device.type == "cpu" or management.vram_state is management.VRAMState.NO_VRAM:
        return None
    asked = comfy.cli_args.args.reserve_vram is not None
    keeps_back = not has_figure or asked or sys.platform == "win32"
    reserved = management.extra_reserved_memory() if keeps_back else 0
    return max(0, int(management.get_free_memory(device) + held_bytes - reserved))


@functools.lru_cache(maxsize=4)
def _backend(device: torch.device) -> DeviceBackend:
    # Kept: a backend has a stream of its own, too much for a question asked every second.
    return backend_for(device)
