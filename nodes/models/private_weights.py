"""Parameters that stand in for a while, where the core insists on writing into a weight.

A mapped weight is read-only memory: a write ends the process. So before the core writes (hook
LoRAs, merging for a save), the parameter is replaced by a private one, and put back afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class _StandIn:
    module: nn.Module
    attribute: str
    original: nn.Parameter
    private: nn.Parameter
    functions: list[Any]


class PrivateWeights:
    """The stand-ins of one model, by key. Shared by all its clones, as the model is.

    While a weight is private, its patches at use are suspended: they are in the private values.
    Threads: the thread that runs the model.
    """

    def __init__(self) -> None:
        self._stand_ins: dict[str, _StandIn] = {}

    def __len__(self) -> int:
        return len(self._stand_ins)

    def __contains__(self, key: str) -> bool:
        return key in self._stand_ins

    def put(self, model: nn.Module, key: str, values: torch.Tensor) -> None:
        """Replace parameter ``key`` by one over ``values``, which must be memory of its own."""
        path, _, attribute = key.rpartition(".")
        module = model.get_submodule(path)
        private = nn.Parameter(values, requires_grad=False)
        functions_name = f"{attribute}_function"
        functions = list(getattr(module, functions_name, ()))
        original = module._parameters[attribute]
        assert original is not None
        self._stand_ins[key] = _StandIn(module, attribute, original, private, functions)
        if functions:
            setattr(module, functions_name, [])
        module._parameters[attribute] = private

    def restore(self, key: str) -> None:
        """Put the original back, unless somebody replaced the private one meanwhile."""
        stand_in = self._stand_ins.pop(key)
        if stand_in.module._parameters.get(stand_in.attribute) is stand_in.private:
            stand_in.module._parameters[stand_in.attribute] = stand_in.original
        if stand_in.functions:
            setattr(stand_in.module, f"{stand_in.attribute}_function", stand_in.functions)

    def restore_all(self, keep: frozenset[str] = frozenset()) -> None:
        """Put every original back except those in ``keep``."""
        for key in [key for key in self._stand_ins if key not in keep]:
            self.restore(key)
