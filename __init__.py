"""ComfyUI-Courier: the door that ComfyUI opens. Importing it does nothing."""

from typing import Any

WEB_DIRECTORY = "./web"
__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]


async def comfy_entrypoint() -> Any:
    """ComfyUI's call for our nodes. Routes are registered here too: 0.3.75 calls nothing else."""
    try:
        from comfy_api.latest import ComfyExtension  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "ComfyUI-Courier needs comfy_api.latest, which this ComfyUI does not have; it was "
            "tried with ComfyUI 0.3.75 to 0.33.0"
        ) from error
    from .nodes.extension import make_extension

    return make_extension()
