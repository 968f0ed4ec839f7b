"""ComfyUI's own models as sleepers."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import comfy.model_base
import comfy.model_management
import torch

from ...offload_core.sleep import Held, Sleeper
from ...offload_core.values import size_text
from ..models.attachment import attachment_of
from ..models.registry import DIFFUSION_MODEL, LOADER_TITLES, TEXT_ENCODER, VAE, slug

_NOT_LOADED = Held(0)

BeforeUse = Callable[[str], None]


class CoreEntry(comfy.model_management.LoadedModel):
    """Stands in the core's list of loaded models for one that sleeps.

    The core asks every entry of a model that it is about to load to leave the list, by way of its
    finalizer, before it loads anything: there the use of a sleeping model is refused, or wakes it.
    Nothing of the core is replaced for that.
    """

    def __init__(self, patcher: Any, before_use: Callable[[], None]) -> None:
        super().__init__(patcher)
        self.is_asleep = True
        self.is_being_loaded = False
        self.real_model = weakref.ref(patcher.model)
        self.model_finalizer = _Doorkeeper(self, before_use)
        self._forget = weakref.finalize(patcher.model, comfy.model_management.cleanup_models)
        self._forget.atexit = False

    def is_dead(self, *_: Any, **__: Any) -> bool:
        """Nobody can use it any more."""
        return self.model is None

    def model_unload(
        self, memory_to_free: Any = None, unpatch_weights: bool = True, **more: Any
    ) -> bool:
        """There is nothing to free; the entry stays, or the core would forget that it sleeps."""
        if self.is_asleep:
            return False
        return bool(super().model_unload(memory_to_free, unpatch_weights, **more))

    def leave(self) -> None:
        """Sleep no more."""
        self.is_asleep = False
        self._forget.detach()
        _remove(self)


class _Doorkeeper:
    """What the core takes for the entry's finalizer. Holds the entry weakly: no cycle."""

    def __init__(self, entry: CoreEntry, before_use: Callable[[], None]) -> None:
        self._entry = weakref.ref(entry)
        self._before_use = before_use

    def detach(self) -> None:
        """The core is about to load this model. Raises: AsleepError."""
        entry = self._entry()
        if entry is None or not entry.is_asleep:
            return
        # The core has taken it off the list already.
        if not any(other is entry for other in _entries()):
            comfy.model_management.current_loaded_models.append(entry)
        entry.is_being_loaded = True
        try:
            self._before_use()
        finally:
            entry.is_being_loaded = False


class CoreSleeper:
    """A model that the core loads: any of its patchers, by the inner model that clones share.

    Holds everything weakly. The core keeps a model's weights in RAM while they are off the device,
    so that both levels are alike.
    """

    def __init__(self, patcher: Any, model_id: str, before_use: BeforeUse) -> None:
        self.id = model_id
        inner = patcher.model
        self.name = _name_of(inner)
        self.kind = kind_of(inner)
        self._patcher = weakref.ref(patcher)
        self._inner = weakref.ref(inner)
        self._before_use = before_use

    @property
    def is_asleep(self) -> bool:
        """Its entry stands in the core's list."""
        return self._entry() is not None

    @property
    def obstacle(self) -> str:
        """None: its weights are in RAM."""
        return ""

    def held(self) -> Held:
        """By the core's own count."""
        patcher = self._living()
        if patcher is None:
            return _NOT_LOADED
        size, loaded = int(patcher.model_size()), int(patcher.loaded_size())
        return Held(loaded, copied_bytes=max(0, size - loaded))

    def kept(self) -> tuple[str, ...]:
        """The core's copy in RAM."""
        patcher = self._living()
        if patcher is None:
            return ()
        size = size_text(int(patcher.model_size()))
        text = f"{size} of weights stay in RAM: ComfyUI's own loader has no other place for them"
        if self.kind in LOADER_TITLES:
            text += f"; loaded with {LOADER_TITLES[self.kind]}, they stay in the file"
        return (text,)

    def fall_asleep(self, level: int) -> None:
        """By the core's own unload."""
        patcher = self._living()
        if patcher is None or self.is_asleep:
            return
        entry = CoreEntry(patcher, lambda: self._before_use(self.id))
        for one in self._loaded():
            one.model_unload()
            _remove(one)
        comfy.model_management.current_loaded_models.append(entry)
        comfy.model_management.soft_empty_cache()

    def wake(self) -> None:
        """By the core's own load, as far as there is room."""
        entry, patcher = self._entry(), self._living()
        if entry is None:
            return
        entry.leave()
        if patcher is None or entry.is_being_loaded:
            return  # nobody can use it any more, or the core is about to load it itself
        try:
            with torch.inference_mode():
                comfy.model_management.load_models_gpu([patcher])
        except BaseException:
            # Whatever it was, Ctrl-C too: it is awake, or it sleeps as before.
            self.fall_asleep(1)
            raise

    def _living(self) -> Any:
        """A patcher of it: the one that was given, or another clone that the core knows."""
        patcher = self._patcher()
        if patcher is None:
            found = (one.model for one in _entries() if self._is_of_us(one))
            patcher = next((model for model in found if model is not None), None)
        return patcher

    def _is_of_us(self, one: Any) -> bool:
        inner = self._inner()
        return inner is not None and _inner_of(one) is inner

    def _loaded(self) -> list[Any]:
        return [one for one in _entries() if not _sleeps(one) and self._is_of_us(one)]

    def _entry(self) -> CoreEntry | None:
        return next((one for one in _entries() if _sleeps(one) and self._is_of_us(one)), None)


class CoreModels:
    """The core's models by id; the same inner model has the same id for as long as it lives.

    Threads: whoever carries out an order or asks for the models, one at a time.
    """

    def __init__(self, before_use: BeforeUse) -> None:
        self._before_use = before_use
        self._numbers_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._asked: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        """A patcher by inner model, of those that were asked for: they need not be loaded."""
        self._numbers = itertools.count(1)

    def sleepers(self) -> list[Sleeper]:
        """Of all models in the core's list that are not ours, and of those that were asked for, in
        the order of loading: the core's list has the last one used first, and a sleeper last."""
        patchers = [one.model for one in reversed(_entries())]
        patchers += [patcher() for patcher in list(self._asked.values())]
        found: dict[int, Sleeper] = {}
        for patcher in patchers:
            sleeper = self._sleeper(patcher)
            if sleeper is not None:
                found.setdefault(self._numbers_of[patcher.model], sleeper)
        return [found[number] for number in sorted(found)]

    def sleeper_of(self, patcher: Any) -> CoreSleeper | None:
        """The sleeper behind a patcher, loaded or not; None if it is ours, or none at all."""
        sleeper = self._sleeper(patcher)
        if sleeper is not None:
            self._asked[patcher.model] = weakref.ref(patcher)
        return sleeper

    def _sleeper(self, patcher: Any) -> CoreSleeper | None:
        inner = getattr(patcher, "model", None)
        if inner is None or attachment_of(inner) is not None:
            return None
        if inner not in self._numbers_of:
            self._numbers_of[inner] = next(self._numbers)
        model_id = f"core-{slug(_name_of(inner))}-{self._numbers_of[inner]}"
        return CoreSleeper(patcher, model_id, self._before_use)


def patcher_of(value: Any) -> Any:
    """The patcher of a MODEL, a CLIP, a VAE or a CONTROL_NET; None if it has none."""
    for candidate in (
        value,
        getattr(value, "patcher", None),
        getattr(value, "control_model_wrapped", None),
    ):
        if hasattr(candidate, "model_size") and hasattr(candidate, "model"):
            return candidate
    return None


def kind_of(inner: Any) -> str:
    """What an inner model is, for people."""
    if isinstance(inner, comfy.model_base.BaseModel):
        return DIFFUSION_MODEL
    if hasattr(inner, "encode_token_weights"):
        return TEXT_ENCODER
    if "control" in _name_of(inner).lower():
        return "ControlNet"
    if hasattr(inner, "decode") and hasattr(inner, "encode"):
        return VAE
    return "model"


def is_listed(inner: Any) -> bool:
    """Whether the core counts a model among those that it loaded."""
    return any(_inner_of(one) is inner for one in _entries())


def listed_patcher(inner: Any) -> Any:
    """The clone with which the core has loaded a model; None if it has not."""
    return next((one.model for one in _entries() if _inner_of(one) is inner), None)


def count_asleep() -> int:
    """How many of the core's models sleep. Any thread, without waiting."""
    return sum(_sleeps(one) for one in _entries())


def _inner_of(one: Any) -> Any:
    """The model of an entry; None where its patcher is gone."""
    return getattr(one.model, "model", None)


def _sleeps(one: Any) -> bool:
    return isinstance(one, CoreEntry) and one.is_asleep


def _entries() -> list[Any]:
    return list(comfy.model_management.current_loaded_models)


def _remove(entry: Any) -> None:
    # By identity: the core's own comparison takes entries of one patcher for the same.
    models = comfy.model_management.current_loaded_models
    for index in range(len(models) - 1, -1, -1):
        if models[index] is entry:
            models.pop(index)


def _name_of(inner: Any) -> str:
    return type(inner).__name__
