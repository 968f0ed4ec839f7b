"""The hooks that bring a layer when it is about to run and let it go when it has."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..values import StateError


class LayerUser(Protocol):
    """Who is told. Threads: the one that runs the model."""

    def begin_layer(self, index: int) -> None:
        """Layer ``index`` is about to run."""

    def end_layer(self, index: int) -> None:
        """Layer ``index`` has issued its work."""


@dataclass(frozen=True)
class _LayerHook:
    """The two hooks of one layer. Holds the user weakly: a hook must not keep a model alive."""

    user: weakref.ref[LayerUser]
    index: int

    def before(self, module: nn.Module, args: Any) -> None:
        user = self.user()
        if user is not None:
            user.begin_layer(self.index)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        user = self.user()
        if user is not None:
            user.end_layer(self.index)


def put_hooks(user: LayerUser, modules: Sequence[nn.Module | None]) -> Iterator[RemovableHandle]:
    """Hook every module; ``user`` is told by its place in the list."""
    for index, module in enumerate(modules):
        assert module is not None
        hook = _LayerHook(weakref.ref(user), index)
        yield module.register_forward_pre_hook(hook.before, prepend=True)
        yield module.register_forward_hook(hook.after, always_call=True)


def refuse_new_weights(modules: Iterable[nn.Module]) -> Iterator[RemovableHandle]:
    """Have ``load_state_dict`` raise for modules that hold mapped weights: it would write into the
    mapping, and that ends the process."""
    for module in modules:
        # torch has it under this name since 2.5; before, only the write itself would tell.
        register = getattr(module, "register_load_state_dict_pre_hook", None)
        if register is not None:
            yield register(_refuse)


def _refuse(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    mine = [name for name in module._parameters if f"{prefix}{name}" in state_dict]
    if mine:
        raise StateError(
            f"{prefix}{mine[0]} is a weight that lies in the checkpoint file and cannot be "
            "written; give new weights as a LoRA or another patch, or load their own file"
        )
