"""Running: the engine, its courier and everything that binds weights."""

from .courier import Courier, Order
from .engine import LayerEngine, attach
from .parts import EngineParts
from .weights import BASE_NAME

__all__ = ["BASE_NAME", "Courier", "EngineParts", "LayerEngine", "Order", "attach"]
