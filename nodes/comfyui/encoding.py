"""Runs of a text encoder: ComfyUI loads it, and then calls methods of it that are no ``forward``.

An instance attribute stands before each of these methods. It finds the model weakly: one that held
the model would be a circle, and ComfyUI warns of models that only a garbage collection frees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...offload_core.values import Budget, EngineState, size_text
from ..models.attachment import Attachment, attachment_of
from .runs import one_pass, run_of

ENCODE, GENERATE = "encode_token_weights", "generate"
_TOKEN_BYTES = 512 << 10
"""What one token takes in the widest layers, as float32, attention included; a guess."""
_USUAL_TOKENS = 512


def take_over(patcher: Any, theirs: Any) -> None:
    """What ComfyUI set on its own patcher of a text encoder or VAE, set on ours.

    The sets of patches get a number of their own with it: to the core they are the same model.
    """
    for name in ("is_clip", "hook_mode", "force_cast_weights"):
        if hasattr(theirs, name):
            setattr(patcher, name, getattr(theirs, name))
    patcher.object_patches = dict(theirs.object_patches)
    patcher.patches_uuid = theirs.patches_uuid


def add_encoder_runs(model: Any) -> None:
    """Have encoding and generating with ``model`` announce themselves to its engine."""
    attachment = attachment_of(model)
    assert attachment is not None
    attachment.expect_shape((_USUAL_TOKENS,), _estimated_bytes(model, _USUAL_TOKENS))
    for name in (ENCODE, GENERATE):
        if hasattr(type(model), name):
            setattr(model, name, _Entry(model, name))


class _Entry:
    """Stands for one method of a model. Threads: the prompt worker."""

    def __init__(self, model: Any, name: str) -> None:
        self._model = weakref.ref(model)
        self._name = name

    def __call__(self, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        """The method, in a run of the engine."""
        model = self._model()
        assert model is not None, "whoever calls this has the model"
        method: Callable[..., Any] = getattr(type(model), self._name)

        def call() -> Any:
            return method(model, tokens, *args, **kwargs)

        attachment = attachment_of(model)
        # Encoding inside of another call runs in the outer one's run.
        if attachment is None or attachment.engine.state is not EngineState.LOADED:
            return call()
        count = max(1, count_tokens(tokens))
        attachment.expect_shape((count,), _estimated_bytes(model, count))
        if self._name == GENERATE:
            _say_what_streams(attachment)
        with run_of(attachment):
            return one_pass(attachment, call)


def count_tokens(tokens: Any) -> int:
    """How many tokens the longest of the encoders is given."""
    if isinstance(tokens, dict):
        return max(map(count_tokens, tokens.values()), default=0)
    if isinstance(tokens, (list, tuple)):
        return sum(len(one) for one in tokens if isinstance(one, (list, tuple)))
    return 0


def _estimated_bytes(model: Any, tokens: int) -> int:
    """The widest weight as the float32 that it is computed in, and the tokens."""
    widest = max((weight.nelement() for weight in _computed_weights(model)), default=0)
    return widest * torch.float32.itemsize + tokens * _TOKEN_BYTES


def _computed_weights(model: Any) -> Iterator[torch.Tensor]:
    """All but tables that only rows are read of."""
    for module in model.modules():
        for weight in module._parameters.values():
            is_table = isinstance(module, torch.nn.Embedding) and weight.itemsize > 1
            if weight is not None and not is_table:
                yield weight


def _say_what_streams(attachment: Attachment) -> None:
    """Each token runs every layer: what streams then, moves once for each."""
    memory = attachment.engine.snapshot()
    streamed = sum(layer.size_bytes - layer.resident_bytes for layer in memory.layers)
    if not streamed:
        return
    whole = attachment.engine.plan(Budget(None, 0)).device_bytes
    text = (
        f"it generates while {size_text(streamed)} of it stream, and all of that moves for each "
        f"token; with {size_text(whole)} of the card for its weights nothing would"
    )
    if text not in attachment.remarks:
        attachment.remarks = (*attachment.remarks, text)
