"""Nodes in the place of those that this ComfyUI cannot have: workflows open, and learn why."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..comfyui.compat import require
from ..comfyui.symbols import Part

_OUTPUTS = 4
"""As many as any node of ours has: a workflow keeps its links."""
_NAMES = {
    "loaders": (("CourierLoadDiffusionModel", "Load Diffusion Model (Courier)", Part.LOAD),),
    "encoders": (
        ("CourierLoadCLIP", "Load CLIP (Courier)", Part.LOAD),
        ("CourierLoadDualCLIP", "Load Dual CLIP (Courier)", Part.LOAD),
        ("CourierLoadTripleCLIP", "Load Triple CLIP (Courier)", Part.LOAD),
        ("CourierLoadQuadrupleCLIP", "Load Quadruple CLIP (Courier)", Part.LOAD),
    ),
    "vaes": (("CourierLoadVAE", "Load VAE (Courier)", Part.LOAD),),
    "checkpoints": (("CourierLoadCheckpoint", "Load Checkpoint (Courier)", Part.LOAD),),
    "sleep": (
        ("CourierSleepModel", "Sleep Model", Part.SLEEP),
        ("CourierWakeModel", "Wake Model", Part.SLEEP),
    ),
    "status": (("CourierStatus", "Courier Status", Part.LOAD),),
    "budget": (("CourierBudget", "Courier Budget", Part.LOAD),),
}
"""By module of this room: id, name, and what it cannot do."""


def stand_ins(module: str) -> list[type[io.ComfyNode]]:
    """One for each node of that module."""
    return [_stand_in(*entry) for entry in _NAMES[module]]


def _stand_in(node_id: str, name: str, part: Part) -> type[io.ComfyNode]:
    class StandIn(io.ComfyNode):
        """Says what this ComfyUI lacks."""

        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(
                node_id=node_id,
                display_name=f"{name}: not with this ComfyUI",
                category="courier",
                description="ComfyUI's log says at its beginning what is missing.",
                inputs=[],
                outputs=[io.AnyType.Output(f"out_{number}") for number in range(_OUTPUTS)],
                is_output_node=True,
            )

        @classmethod
        def execute(cls, **inputs: Any) -> io.NodeOutput:
            """Raises: NotWithThisComfyError."""
            require(part)
            raise RuntimeError(f"{name} could not be loaded; ComfyUI's log says why")

    return StandIn
