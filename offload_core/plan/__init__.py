"""Plans: which modules are layers, how they lie in a buffer, what rests where. Arithmetic only."""

from .blocks import BlockList, LayerModule, find_block_lists
from .layout import ALIGNMENT, BufferLayout, Extent, Piece, lay_out
from .placement import (
    LayerCost,
    LayerPlan,
    Plan,
    PlanRequest,
    make_plan,
    smallest_device_bytes,
    spread,
)

__all__ = [
    "ALIGNMENT",
    "BlockList",
    "BufferLayout",
    "Extent",
    "LayerCost",
    "LayerModule",
    "LayerPlan",
    "Piece",
    "Plan",
    "PlanRequest",
    "find_block_lists",
    "lay_out",
    "make_plan",
    "smallest_device_bytes",
    "spread",
]
