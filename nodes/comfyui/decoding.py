"""Runs of a VAE: ComfyUI loads it, and then calls methods of it that are no ``forward``.

See ``encoding``. What a picture of some size takes, ComfyUI asks the VAE itself before it loads it:
there the engine hears of it too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ...offload_core.values import EngineState, size_text
from ..models.attachment import Attachment, attachment_of
from .runs import one_pass, run_of

_METHODS = ("decode", "encode", "decode_tiled", "encode_tiled")
_ESTIMATES = ("memory_used_decode", "memory_used_encode")


def add_vae_runs(vae: Any) -> None:
    """Have decoding and encoding with ``vae`` announce themselves to its engine."""
    model = vae.first_stage_model
    for name in _METHODS:
        if callable(getattr(type(model), name, None)):
            setattr(model, name, _Entry(model, name))
    for number, name in enumerate(_ESTIMATES):
        setattr(vae, name, _Estimate(model, getattr(vae, name), number))


class _Estimate:
    """Stands for one of a VAE's two estimates. Threads: the prompt worker."""

    def __init__(self, model: Any, estimate: Callable[..., Any], number: int) -> None:
        self._model = weakref.ref(model)
        self._estimate = estimate
        self._number = number

    def __call__(self, shape: Any, *args: Any, **kwargs: Any) -> Any:
        """The estimate in bytes, which the engine expects to need."""
        estimated = self._estimate(shape, *args, **kwargs)
        model = self._model()
        attachment = attachment_of(model) if model is not None else None
        if attachment is not None:
            attachment.expect_shape((self._number, *map(int, shape)), int(estimated))
        return estimated


class _Entry:
    """Stands for one method of a model. Threads: the prompt worker."""

    def __init__(self, model: Any, name: str) -> None:
        self._model = weakref.ref(model)
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method, in a run of the engine."""
        model = self._model()
        assert model is not None, "whoever calls this has the model"
        method: Callable[..., Any] = getattr(type(model), self._name)

        def call() -> Any:
            return method(model, *args, **kwargs)

        attachment = attachment_of(model)
        # One of these inside another runs in the outer one's run.
        if attachment is None or attachment.engine.state is not EngineState.LOADED:
            return call()
        with run_of(attachment):
            result = one_pass(attachment, call)
        _say_what_streamed(attachment)
        return result


def _say_what_streamed(attachment: Attachment) -> None:
    """A VAE runs its layers once for each tile, and some once for each frame."""
    snapshot = attachment.engine.snapshot()
    streams = sum(layer.size_bytes - layer.resident_bytes for layer in snapshot.layers)
    if not streams or any(text.startswith(_STREAMS) for text in attachment.remarks):
        return
    text = (
        f"{_STREAMS}{size_text(streams)} of it, and moves that for each tile of a picture, and "
        "for some models for each frame; with a larger budget nothing would"
    )
    attachment.remarks = (*attachment.remarks, text)


_STREAMS = "it streams "
