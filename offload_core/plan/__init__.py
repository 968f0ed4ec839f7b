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
)
from .windows import NOTHING, Footprint, Held, Streaming, Window, stream_least

__all__ = [
    "ALIGNMENT",
    "NOTHING",
    "BlockList",
    "BufferLayout",
    "Extent",
    "Footprint",
    "Held",
    "LayerCost",
    "LayerModule",
    "LayerPlan",
    "Piece",
    "Plan",
    "PlanRequest",
    "Streaming",
    "Window",
    "find_block_lists",
    "lay_out",
    "make_plan",
    "smallest_device_bytes",
    "stream_least",
]
