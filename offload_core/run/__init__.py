"""Running: the engine, its courier and everything that binds weights."""

from .assembly import attach
from .courier import Courier, Order
from .engine import LayerEngine
from .parts import EngineParts
from .patches import Companion, PatchedWeight, WeightPatch
from .shared import SharedBudget
from .weights import BASE_NAME
from .wrappers import is_wrapper, over_originals, tensor_bytes

__all__ = [
    "BASE_NAME",
    "Companion",
    "Courier",
    "EngineParts",
    "LayerEngine",
    "Order",
    "PatchedWeight",
    "SharedBudget",
    "WeightPatch",
    "attach",
    "is_wrapper",
    "over_originals",
    "tensor_bytes",
]
