"""Wrappers around the core's sampling: what the run will need, and its clean beginning and end.

They are plain functions that find the engine through their arguments: a wrapper that held a
patcher or an engine would keep the model alive in every clone's options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.sampler_helpers
from comfy.patcher_extension import WrappersMP

from ...offload_core.values import EngineState
from ..models.attachment import Attachment, attachment_of

KEY = "courier"


def add_run_wrappers(patcher: Any) -> None:
    """Have sampling with ``patcher`` (and its clones) announce itself to the engine."""
    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, _one_at_a_time)
    patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, _prepare)
    patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, _run)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, _pass)


def _one_at_a_time(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """A whole sampling. Another thread that samples the same model waits for its end: ComfyUI keeps
    state of a run in the model too."""
    patcher = executor.class_obj.model_patcher
    attachment = attachment_of(patcher.model)
    if attachment is None:
        return executor(*args, **kwargs)
    with attachment.run_lock:
        try:
            return executor(*args, **kwargs)
        finally:
            if attachment.engine.state is not EngineState.RUNNING:
                patcher.finish_unload()


def _prepare(
    executor: Any, model: Any, noise_shape: Any, conds: Any, *args: Any, **kwargs: Any
) -> Any:
    attachment = attachment_of(model.model)
    if attachment is not None:
        # Before the core makes room for it.
        attachment.ask_before_use()
        # The larger figure: with free memory on the card the core batches both conditionings.
        estimate, _ = comfy.sampler_helpers.estimate_memory(model, noise_shape, conds)
        counts = tuple(len(cond) for cond in conds.values())
        attachment.expect_shape((*noise_shape, *counts), int(estimate))
    return executor(model, noise_shape, conds, *args, **kwargs)


def _run(executor: Any, guider: Any, *args: Any, **kwargs: Any) -> Any:
    attachment = attachment_of(guider.inner_model)
    if attachment is None:
        return executor(guider, *args, **kwargs)
    # A sampler inside a sampler runs in the outer one's run.
    if attachment.engine.state is not EngineState.LOADED:
        return executor(guider, *args, **kwargs)
    with run_of(attachment):
        return executor(guider, *args, **kwargs)


@contextmanager
def run_of(attachment: Attachment) -> Iterator[None]:
    """A run of the model's engine that ComfyUI may interrupt; what it took is remembered."""
    engine = attachment.engine
    try:
        with engine.run(comfy.model_management.throw_exception_if_processing_interrupted):
            yield
    finally:
        need = engine.activation_need_bytes
        if need is not None and attachment.shape is not None:
            attachment.measured_activations[attachment.shape] = need


def _pass(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """One forward of a diffusion model."""
    attachment = attachment_of(executor.class_obj)
    if attachment is None:
        return executor(*args, **kwargs)
    return one_pass(attachment, lambda: executor(*args, **kwargs))


def one_pass(attachment: Attachment, call: Callable[[], Any]) -> Any:
    """``call`` passes through the model once: measured, and tried once more when the device was
    full."""
    if attachment.private:
        # Hooked weights stand in for the engine's own until the run ends: the plan stays as it is.
        return call()
    again = False
    try:
        result = call()
    except Exception as error:
        again = attachment.engine.give_way(error)
        if not again:
            raise
    if again:  # outside the handler, so that nothing of the pass that failed is held any more
        result = call()
    attachment.end_pass()
    return result
