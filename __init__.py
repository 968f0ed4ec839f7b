"""ComfyUI-Courier: the door that ComfyUI opens. Importing it does nothing."""

from typing import Any

WEB_DIRECTORY = "./web"
__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]


async def comfy_entrypoint() -> Any:
    """ComfyUI's call for our nodes. Routes are registered here too: 0.3.75 calls nothing else."""
    from .nodes.extension import make_extension

    return make_extension()
