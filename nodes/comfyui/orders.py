"""Orders to sleep and to wake in a running ComfyUI. Made when first asked for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.utils
import torch

from ...offload_core.host import process_memory
from ...offload_core.run import LayerEngine
from ...offload_core.sleep import EngineSleeper, MachineRecord, Sleeper
from ...offload_core.values import Budget, EngineState, size_text
from ..models.attachment import Attachment, attachment_of
from ..models.registry import Origin, get_service
from ..requests.gate import PromptHold, PromptRunsError
from ..requests.records import OnUse
from ..requests.sleep import SleepService, busy_error
from .compat import has, require
from .host import device_memory, device_room_bytes, prompt_queue
from .sleeping import CoreModels, is_listed, patcher_of
from .symbols import Part


@dataclass(frozen=True)
class _Belongings:
    """What hangs on an engine of ours. Weakly: an attachment holds its engine."""

    attachment: weakref.ref[Attachment]
    patcher: weakref.ref[Any]


_belongings: weakref.WeakKeyDictionary[LayerEngine, _Belongings] = weakref.WeakKeyDictionary()


class CourierSleeper(EngineSleeper):
    """A model of ours, with what hangs on it besides the engine."""

    def fall_asleep(self, level: int) -> None:
        """Private weights (of hooked or forced patches) hide the device's own, which would stay;
        the next load makes them again."""
        found = self._found()
        attachment = found.attachment() if found is not None else None
        if attachment is not None and not self.is_asleep:
            attachment.private.restore_all()
        super().fall_asleep(level)

    def wake(self) -> None:
        """What is on the device is in the core's list again: the core takes a model off it that it
        tries to load and that refuses."""
        was_asleep = self.is_asleep
        super().wake()
        engine, found = self.engine, self._found()
        if not was_asleep or engine is None or found is None or not engine.device_bytes:
            return
        attachment = found.attachment()
        if attachment is not None:
            attachment.loaded_for = attachment.budget
        patcher = found.patcher()
        if patcher is not None and not is_listed(patcher.model):
            with torch.inference_mode():
                comfy.model_management.load_models_gpu([patcher])

    def budget_to_wake_in(self, engine: LayerEngine) -> Budget | None:
        """Of a budget that several models share: what the others leave, once they made room. And
        the budget that somebody asked for while it slept."""
        found = self._found()
        attachment = found.attachment() if found is not None else None
        if attachment is None or engine.slept_with is None:
            return None
        wanted, activation_bytes = engine.slept_with
        patcher = found.patcher() if found is not None else None
        if attachment.is_asked_anew and patcher is not None:
            has_figure = attachment.budget.device_bytes is not None
            room = device_room_bytes(patcher.load_device, engine.device_bytes, has_figure)
            wanted = attachment.budget_within(room, room)
        if attachment.share is not None:
            return attachment.share.take(engine, wanted, activation_bytes)
        return wanted if wanted is not engine.slept_with[0] else None

    def _found(self) -> _Belongings | None:
        engine = self.engine
        return None if engine is None else _belongings.get(engine)


_hold = PromptHold()


@contextmanager
def at_rest(wait: bool, check: Callable[[], None]) -> Iterator[None]:
    """While it is entered no prompt begins.

    Raises: BusyError, NotWithThisComfyError, and what ``check`` does.
    """
    require(Part.QUEUE)
    queue = prompt_queue()
    if queue is None:
        yield
        return
    try:
        with _hold.held(queue, wait, check):
            yield
    except PromptRunsError:
        raise busy_error() from None


class ComfyHost:
    """What orders need to know of ComfyUI; see ``requests.sleep.Host``."""

    def __init__(self) -> None:
        self.core = CoreModels(before_use)

    def sleepers(self) -> Sequence[Sleeper]:
        """Ours, then those that the core loaded. Raises: NotWithThisComfyError."""
        require(Part.SLEEP)
        ours: list[Sleeper] = [
            CourierSleeper(engine, model_id, name, get_service().origin_of(model_id).kind)
            for model_id, name, engine in get_service().engines()
        ]
        return [*ours, *self.core.sleepers()]

    def nothing_runs(self, wait: bool, check: Callable[[], None]) -> AbstractContextManager[None]:
        """See ``at_rest``."""
        return at_rest(wait, check)

    def is_busy(self) -> bool:
        """By the queue, without its lock: the answer may be a moment old."""
        queue = prompt_queue()
        return queue is not None and bool(queue.currently_running or queue.queue)

    def measure(self) -> MachineRecord:
        """The driver's figures of the device, where it is not the CPU, and the kernel's of us."""
        process = process_memory()
        total = used = None
        if comfy.model_management.get_torch_device().type != "cpu":
            _, memory = device_memory()
            total, used = memory.total_bytes, memory.used_bytes
        return MachineRecord(
            device_total_bytes=total,
            device_used_bytes=used,
            anon_bytes=process.rss_anon_bytes,
            locked_bytes=process.locked_bytes,
        )

    def place(self) -> str:
        """What the device's memory is called."""
        return "RAM (ComfyUI runs on the CPU)" if self.is_ram() else "the card"

    def is_ram(self) -> bool:
        """Whether the device's memory is the host's own."""
        # Asked when ComfyUI starts, where nothing may fail.
        return has(Part.SLEEP) and str(comfy.model_management.get_torch_device().type) == "cpu"

    def foreign(self) -> Sequence[str]:
        """On a device: what the driver counts and none of the models holds."""
        if comfy.model_management.get_torch_device().type == "cpu":
            return ()
        used = device_memory()[1].used_bytes
        held = sum(sleeper.held().device_bytes for sleeper in self.sleepers())
        left = max(0, used - held)
        return (
            f"{size_text(left)} of the card are in use by what is no model of this ComfyUI: other "
            "processes, the driver's own context, other packs and what the allocator keeps",
        )


_refusal: ContextVar[str | None] = ContextVar("courier_refusal", default=None)
"""Of the prompt that this task of the server checks."""

_orders: SleepService | None = None
_host: ComfyHost | None = None
_making = threading.Lock()


def get_orders() -> SleepService:
    """The one of this process. Threads: any."""
    global _orders, _host
    with _making:
        if _orders is None:
            _host = ComfyHost()
            _orders = SleepService(_host)
        return _orders


def note_prompt(json_data: Any) -> Any:
    """ComfyUI's call for each prompt that arrives, before it is checked: why it cannot run."""
    prompt = json_data.get("prompt") if isinstance(json_data, dict) else None
    nodes = list(prompt.values()) if isinstance(prompt, dict) else []
    _refusal.set(_refusal_of([(_kind_of(node), _inputs_of(node)) for node in nodes]))
    return json_data


def rest_of(engine: LayerEngine, model_id: str, name: str) -> str:
    """Where one of ours stands between awake and asleep. Any thread, without waiting."""
    return get_orders().controller.state_of(EngineSleeper(engine, model_id, name, "")).value


def refusal_of_prompt() -> str | None:
    """Why the prompt that is being checked cannot use a model: it sleeps, and nothing in the prompt
    wakes it. None where that is not known: then the node that needs it says so."""
    return _refusal.get()


def _kind_of(node: Any) -> Any:
    return node.get("class_type") if isinstance(node, dict) else None


def _inputs_of(node: Any) -> dict[str, Any]:
    inputs = node.get("inputs") if isinstance(node, dict) else None
    return inputs if isinstance(inputs, dict) else {}


def _refusal_of(nodes: Sequence[tuple[Any, dict[str, Any]]]) -> str | None:
    """``nodes``: kind and inputs of each; nobody has checked them yet."""
    if any(kind == "CourierWakeModel" for kind, _ in nodes):
        return None
    asleep = _asleep_of(nodes)
    orders = [inputs for kind, inputs in nodes if kind == "CourierSleepModel"]
    if orders and all(inputs.get("on_use") == OnUse.WAKE.value for inputs in orders):
        # The user's later word: the workflow that put them to sleep says now that use wakes them.
        of_all = any("model" not in inputs for inputs in orders)
        ids = [m["id"] for m in get_orders().models()] if of_all else asleep
        get_orders().controller.set_wakes_on_use(ids, True)
    return get_orders().refusal(asleep)


def _asleep_of(nodes: Sequence[tuple[Any, dict[str, Any]]]) -> list[str]:
    """Ids of the sleeping models that these loaders would find in ComfyUI's cache."""
    asleep: dict[Origin, list[str]] = {}
    awake = set()
    for model_id, _, engine in get_service().engines():
        origin = get_service().origin_of(model_id)
        if engine.state is not EngineState.ASLEEP:
            awake.add(origin)
        elif not engine.file_problem():  # of a file that changed, the loader makes a new model
            asleep.setdefault(origin, []).append(model_id)
    # An input that is a link is a list: what comes of it is not known yet, and it is no such text.
    return [
        model_id
        for origin, ids in asleep.items()
        for model_id in ids
        if origin not in awake and any(origin.is_made_by(kind, inputs) for kind, inputs in nodes)
    ]


def before_use(model_id: str) -> None:
    """Asked before a model is loaded. Raises: AsleepError."""
    get_orders().before_use(model_id)


def show_progress(done: int, total: int, name: str) -> None:
    """Of an order that a node gives: ComfyUI's own bar, and its way to cancel. What was done until
    then is undone."""
    comfy.model_management.throw_exception_if_processing_interrupted()
    comfy.utils.ProgressBar(total).update_absolute(done)


def remember(patcher: Any, attachment: Attachment) -> None:
    """What an order to the model's engine has to tidy."""
    _belongings[attachment.engine] = _Belongings(weakref.ref(attachment), weakref.ref(patcher))


def belongings_of(engine: LayerEngine) -> tuple[Attachment | None, Any]:
    """The attachment and a patcher of an engine of ours; None for what is gone."""
    found = _belongings.get(engine)
    return (None, None) if found is None else (found.attachment(), found.patcher())


def id_of(value: Any) -> str | None:
    """The id under which orders know a MODEL, CLIP, VAE or CONTROL_NET; None if they do not."""
    patcher = patcher_of(value)
    if patcher is None:
        return None
    attachment = attachment_of(getattr(patcher, "model", None))
    if attachment is not None:
        return attachment.model_id
    get_orders()
    assert _host is not None
    sleeper = _host.core.sleeper_of(patcher)
    return sleeper.id if sleeper is not None else None
