"""A ModelPatcher whose weights belong to a Courier engine.

The core goes on asking its usual questions (how large, how much is loaded, load more, unload
some) and gets true answers; what it would do to the weights itself is done by the engine. Nothing
of the core is replaced: this is a subclass, made by our loaders only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import comfy.hooks
import comfy.model_patcher
import torch
from comfy.patcher_extension import CallbacksMP

from ...offload_core.run import BASE_NAME, Companion, LayerEngine, PatchedWeight
from ...offload_core.values import EngineState, Placement
from ..models.attachment import Attachment, attachment_of
from ..models.load_line import load_line
from .arrival import MergedOnArrival
from .host import device_room_bytes
from .lora import PatchAtUse, forget_merged
from .saving import later_values

_LOG = logging.getLogger("courier")

_EVERYTHING_BYTES = 1 << 60
"""The core says 1e32 for "no limit"; no card has an exbibyte."""


class CourierPatcher(comfy.model_patcher.ModelPatcher):
    """See the head of this file. Clones are made by the core and share model and engine.

    What overrides a method of the core's takes arguments that a newer one may give it, and passes
    them on where the core's own method is called.

    Threads: the prompt worker, as for the core's own patchers.
    """

    @property
    def attachment(self) -> Attachment:
        """What Courier hung on the inner model."""
        found = attachment_of(self.model)
        assert found is not None, "a CourierPatcher is only made for a model with an engine"
        return found

    @property
    def courier_engine(self) -> LayerEngine:
        """The engine, for whoever is handed a MODEL and asks where its layers are."""
        return self.attachment.engine

    def model_size(self, *_: Any, **__: Any) -> int:
        """What will be on the device: the core makes room for this much before it loads."""
        return self.attachment.planned_bytes()

    def loaded_size(self, *_: Any, **__: Any) -> int:
        """What is on the device now: resident weights and slots."""
        return self.attachment.engine.snapshot().memory.device_bytes

    def get_ram_usage(self, *_: Any, **__: Any) -> int:
        """Host memory held: copies and page locks. Pages of the file are the system's."""
        return self.attachment.engine.snapshot().memory.host_bytes

    def get_key_patches(
        self, filter_prefix: str | None = None, **more: Any
    ) -> dict[str, list[Any]]:
        """As the core's, for nodes that merge models: they keep the weights that they are given.

        A layer's place on the device would outlive its layer there, and a weight that was merged
        for a save has its patches in it already; a home is neither.
        """
        found = super().get_key_patches(filter_prefix, **more)
        homes = self.attachment.homes
        for key, patches in found.items():
            if key in homes:
                patches[0] = (homes[key], patches[0][1])
        return found

    def model_state_dict_for_saving(
        self, model: torch.nn.Module | None = None, prefix: str = "", **more: Any
    ) -> dict[str, torch.Tensor]:
        """As the core's, of what it would have held after a load of its own."""
        stored = self.attachment.stored_dtypes
        return later_values(
            (model or self.model).state_dict(),
            weight_of=lambda key: self._saved_weight(f"{prefix}{key}"),
            merged_of=lambda key: self._merger(f"{prefix}{key}"),
            stored_of=lambda key: stored.get(f"{prefix}{key}"),
        )

    def pin_weight_to_device(self, key: str, *_: Any, **__: Any) -> None:
        """Nothing: the core would register the mapping without the read-only flag."""

    def unpin_weight(self, key: str, *_: Any, **__: Any) -> None:
        """Nothing: see ``pin_weight_to_device``."""

    def load(
        self,
        device_to: torch.device | None = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
        **more: Any,
    ) -> None:
        """Load within the user's budget and the core's offer in bytes, and wire the patches.

        In the middle of a run what is loaded serves.

        Raises: AsleepError for a model that sleeps.
        """
        if self._serves_in_mid_run():
            return
        self.attachment.ask_before_use()
        with self.use_ejected():
            self.unpatch_hooks()
            attachment = self.attachment
            attachment.private.restore_all()
            no_limit = full_load or lowvram_model_memory >= _EVERYTHING_BYTES
            offered = None if no_limit else max(0, int(lowvram_model_memory))
            engine = attachment.engine
            has_figure = attachment.budget.device_bytes is not None
            room = device_room_bytes(self.load_device, engine.device_bytes, has_figure)
            self._patch_arrivals()
            attachment.load(offered, room)
            patched = self._wire_patches(force_patch_weights)
            self._log_load(patched)
            self._tell_core(device_to, patched)
            for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
                callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)
            self.apply_hooks(self.forced_hooks, force_apply=True)

    def partially_load(
        self,
        device_to: torch.device,
        extra_memory: float = 0,
        force_patch_weights: bool = False,
        **more: Any,
    ) -> int:
        """Load with ``extra_memory`` more than now. A changed LoRA re-wires and reloads nothing.

        ComfyUI asks this in the middle of a run too: a ControlNet encodes its hint, or a model
        patch its reference, and then has all models of the run loaded again.
        """
        if self._serves_in_mid_run():
            return 0
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            before = self.loaded_size()
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
            try:
                self.load(device_to, before + extra_memory, force_patch_weights, **more)
            except BaseException:
                # The core retries nothing here; leave the model as if it had not been asked.
                self.detach()
                raise
            return self.loaded_size() - before

    def partially_unload(
        self,
        device_to: torch.device,
        memory_to_free: float = 0,
        force_patch_weights: bool = False,
        **more: Any,
    ) -> int:
        """Free at least ``memory_to_free`` device bytes if a smaller plan can; the bytes freed.

        Between two passes of a run they are lent until it ends; while a layer runs none are.
        """
        attachment = self.attachment
        engine = attachment.engine
        if engine.state is EngineState.RUNNING:
            return engine.lend(int(memory_to_free))
        if engine.state is not EngineState.LOADED:
            return 0
        with self.use_ejected():
            self.unpatch_hooks()
            # Before the layers leave: a private weight hides the device's own, which would stay.
            attachment.private.restore_all()
            before = self.loaded_size()
            target = max(0, before - int(memory_to_free))
            attachment.load(target)
            patched = self._wire_patches(force_patch_weights)
            self._tell_core(self.model.device, patched)
            return before - self.loaded_size()

    def unpatch_model(
        self, device_to: torch.device | None = None, unpatch_weights: bool = True, **more: Any
    ) -> None:
        """Give the device and the page locks back; parameters are the file's views again.

        In the middle of a run that is done once it is over: see ``finish_unload``.
        """
        attachment = self.attachment
        if attachment.engine.state is EngineState.RUNNING:
            attachment.unload_after_run = attachment.unload_after_run or unpatch_weights
            return
        if unpatch_weights:
            self.eject_model()
            self.unpatch_hooks()
            self.attachment.private.restore_all()
            self.attachment.engine.unload()
        # Without a device: the core would call model.to(), which turns views into copies.
        super().unpatch_model(None, unpatch_weights, **more)
        if unpatch_weights and device_to is not None:
            self.model.device = device_to

    def finish_unload(self) -> None:
        """The run is over: unload if ComfyUI dropped the model meanwhile."""
        if self.attachment.unload_after_run:
            self.attachment.unload_after_run = False
            self.unpatch_model(self.offload_device)

    def _serves_in_mid_run(self) -> bool:
        """Whether a run is under way; then the model has these patches by its next pass.

        Raises: StateError for other patches than those of the run, where a layer runs: what of it
            has arrived could not be taken back.
        """
        attachment = self.attachment
        if attachment.engine.state is not EngineState.RUNNING:
            return False
        attachment.unload_after_run = False
        if self.model.current_weight_patches_uuid != self.patches_uuid:
            self._patch_arrivals()
            self._wire_patches(force_patch_weights=False)
            self.model.current_weight_patches_uuid = self.patches_uuid
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            super().unpatch_model(None, unpatch_weights=False)
            self.patch_model(load_weights=False)
        return True

    def patch_hook_weight_to_device(
        self,
        hooks: comfy.hooks.HookGroup,
        combined_patches: dict[str, Any],
        key: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """The core writes hooked weights in place; it gets a private one to write into."""
        if key in combined_patches:
            self._make_private(key)
        super().patch_hook_weight_to_device(hooks, combined_patches, key, *args, **kwargs)

    def patch_cached_hook_weights(
        self, cached_weights: dict[str, Any], key: str, *args: Any, **kwargs: Any
    ) -> None:
        """As ``patch_hook_weight_to_device``."""
        self._make_private(key)
        super().patch_cached_hook_weights(cached_weights, key, *args, **kwargs)

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None, **more: Any) -> None:
        """The core restores what it wrote; then the original parameters come back."""
        hooked = frozenset(self.hook_backup)
        super().unpatch_hooks(whitelist_keys_set, **more)
        private = self.attachment.private
        for key in hooked - frozenset(self.hook_backup):
            if key in private:
                private.restore(key)

    def _log_load(self, patched: int) -> None:
        """Once: the core loads before each run, and mostly nothing has changed."""
        attachment = self.attachment
        snapshot = attachment.engine.snapshot()
        name = attachment.model_id or type(self.model).__name__
        line = load_line(name, snapshot, attachment.activation_bytes, patched)
        if line != attachment.told:
            attachment.told = line
            _LOG.info("Courier: %s", line)

    def _make_private(self, key: str) -> None:
        private = self.attachment.private
        if key in private:
            return
        weight = self._parameter(key)
        if weight is None:
            return
        if key in self.patches:
            # From its home: what is on the device may have been merged on its arrival.
            clean = self.attachment.homes.get(key, weight)
            values = self._patch(key).merged(clean.detach().to(weight.device))
        else:
            stored = self.attachment.stored_dtypes.get(key, weight.dtype)
            values = weight.detach().to(stored, copy=True)
        private.put(self.model, key, values)

    def _wire_patches(self, force_patch_weights: bool) -> int:
        """Set every patch to be applied at use; how many weights are patched."""
        patched = 0
        streamed = self._streamed_modules()
        for name, module in self.model.named_modules():
            if hasattr(module, "comfy_cast_weights"):
                patched += self._wire_module(name, module, force_patch_weights)
                if module in streamed or self.force_cast_weights:
                    # As the core does for what it offloads: a weight used outside its layer's
                    # turn is then cast from the file's pages instead of failing.
                    module.prev_comfy_cast_weights = module.comfy_cast_weights
                    module.comfy_cast_weights = True
            elif not any(True for child in module.children() for _ in child.parameters()):
                # The core merges into leaves that cast nothing, and ignores parameters that sit
                # beside child modules; so do we.
                for attribute in module._parameters:
                    key = f"{name}.{attribute}" if name else attribute
                    if key in self.patches:
                        self._make_private(key)
                        patched += 1
        if force_patch_weights:
            self._store_as_core_would()
        return patched

    def _store_as_core_would(self) -> None:
        """The core is about to save the model: every weight in the dtype it would have held."""
        for key, stored in self.attachment.stored_dtypes.items():
            weight = self._parameter(key)
            if weight is not None and weight.dtype != stored:
                self._make_private(key)

    def _wire_module(self, name: str, module: Any, force_patch_weights: bool) -> int:
        comfy.model_patcher.wipe_lowvram_weight(module)
        forget_merged(module)
        patched = 0
        for attribute, parameter in module._parameters.items():
            key = f"{name}.{attribute}"
            if key not in self.patches or parameter is None:
                continue
            patched += 1
            arrival = self.attachment.arrivals.get(key)
            if force_patch_weights or attribute not in ("weight", "bias"):
                self._make_private(key)
            elif arrival is not None:
                for one in arrival.companions:
                    is_home = parameter is self.attachment.homes[key]
                    setattr(module, one.name, one.at_home if is_home else one.on_device)
                continue
            else:
                self._patch(key).put_on(module)
        for attribute in ("weight", "bias"):
            if f"{name}.{attribute}" in self.attachment.arrivals:
                continue
            wrappers = self.weight_wrapper_patches.get(f"{name}.{attribute}", ())
            getattr(module, f"{attribute}_function").extend(wrappers)
        return patched

    def _patch_arrivals(self) -> None:
        """Have the engine merge what it can where weights arrive; the rest is patched at use."""
        attachment = self.attachment
        if attachment.arrivals_of == self.patches_uuid:
            return
        arrivals = {key: made for key in self.patches if (made := self._arrival(key)) is not None}
        by_site = {
            (one.companions[0].module, key.rpartition(".")[2]): one for key, one in arrivals.items()
        }
        attachment.engine.patch(by_site)
        attachment.arrivals, attachment.arrivals_of = arrivals, self.patches_uuid

    def _arrival(self, key: str) -> PatchedWeight | None:
        """None where the device does not hold the weight as ComfyUI would after merging."""
        path, _, attribute = key.rpartition(".")
        module, weight = self.model.get_submodule(path), self._parameter(key)
        if weight is None or attribute not in ("weight", "bias"):
            return None
        if not hasattr(module, "comfy_cast_weights"):
            return None
        stored = self.attachment.stored_dtypes.get(key, weight.dtype)
        if self.attachment.engine.patchable(module, attribute) is not stored:
            return None
        at_use = self._patch(key)
        if not at_use.is_plain:
            return None
        wrappers = list(self.weight_wrapper_patches.get(key, ()))
        # A layer that is used out of its turn is used from home, where its weights are clean.
        companion = Companion(module, f"{attribute}_function", [at_use, *wrappers], wrappers)
        return PatchedWeight(MergedOnArrival(at_use, weight.shape), (companion,))

    def _streamed_modules(self) -> set[torch.nn.Module]:
        """Every module inside a layer, unless all layers stay on the device: which of them stream
        may change while the model runs."""
        layers = self.attachment.engine.snapshot().layers
        if all(record.placement is Placement.RESIDENT for record in layers):
            return set()
        return {
            module
            for record in layers
            if record.name != BASE_NAME
            for module in self.model.get_submodule(record.name).modules()
        }

    def _patch(self, key: str) -> PatchAtUse:
        module = self.model.get_submodule(key.rpartition(".")[0])
        weight = self._parameter(key)
        assert weight is not None
        stored = self.attachment.stored_dtypes.get(key, weight.dtype)
        return PatchAtUse(key, self.patches[key], module, stored)

    def _saved_weight(self, key: str) -> torch.nn.Parameter | None:
        # A private one is what the core would hold already.
        return None if key in self.attachment.private else self._parameter(key)

    def _merger(self, key: str) -> Callable[[], torch.Tensor] | None:
        if key not in self.patches or key in self.attachment.private:
            return None
        weight = self._parameter(key)
        if weight is None or not hasattr(self._module(key), "comfy_cast_weights"):
            return None
        return lambda: self._patch(key).merged(weight, self.load_device)

    def _module(self, key: str) -> torch.nn.Module:
        return self.model.get_submodule(key.rpartition(".")[0])

    def _parameter(self, key: str) -> torch.nn.Parameter | None:
        path, _, attribute = key.rpartition(".")
        return self.model.get_submodule(path)._parameters.get(attribute)

    def _tell_core(self, device_to: torch.device | None, patched: int) -> None:
        """The fields of the inner model that the core reads after a load."""
        model = self.model
        model.model_lowvram = True
        model.lowvram_patch_counter = patched
        model.device = device_to
        model.model_loaded_weight_memory = self.loaded_size()
        model.model_offload_buffer_memory = 0
        model.current_weight_patches_uuid = self.patches_uuid
