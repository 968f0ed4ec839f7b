"""Weight patches (LoRA and its kin) applied when a weight is used, equal bit for bit to merging.

The core merges a patch into a weight once: it computes in its own dtype for that and rounds to the
dtype the weight is stored in. A streamed weight comes clean from its file each time, so the same
arithmetic runs at each use, with the same rounding: first to the dtype that the core would have
stored, then to whatever the layer computes in. A quantised weight is taken out of its codes,
patched and quantised anew, and the layer then runs on that as it would on the core's.
"""

from __future__ import annotations

import weakref
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch

from ...offload_core.run import is_wrapper
from .fitting import fitting

# 0.26 moved it from model_patcher to utils.
_string_to_seed = getattr(comfy.utils, "string_to_seed", None) or getattr(
    comfy.model_patcher, "string_to_seed", None
)


def compute_dtype(device: torch.device) -> torch.dtype:
    """What the core computes patches in, on ``device``: newer ones in float16 on a card."""
    choose = getattr(comfy.model_management, "lora_compute_dtype", None)
    return torch.float32 if choose is None else choose(device)


class PatchAtUse:
    """A ``weight_function`` of the core's: clean weight in, patched weight out.

    Args of the call: ``weight``, any float dtype, on the device of use. It is never written.
    Returns: same shape, device and dtype; quantised where the module's own weight is.
    """

    def __init__(
        self, key: str, patches: list[Any], module: torch.nn.Module, stored_dtype: torch.dtype
    ) -> None:
        self.key = key
        self.stored_dtype = stored_dtype
        self._attribute = key.rsplit(".", 1)[1]
        self.patches = fitting(patches, getattr(module, self._attribute, None), key)
        # Weak: the module holds its weight functions.
        self._module = weakref.ref(module)

    def put_on(self, module: torch.nn.Module) -> None:
        """Have the module's weight patched whenever it is used, by this alone."""
        setattr(module, f"{self._attribute}_function", [self])
        if not is_wrapper(module._parameters.get(self._attribute)):
            return
        # With a weight function a layer leaves its quantised arithmetic. So that it computes as
        # the core's merged layer does, its forward is given the merged weight and no function.
        me = weakref.ref(self)
        hooks = (
            module.register_forward_pre_hook(lambda module, args: _before(me, module, args)),
            module.register_forward_hook(
                lambda module, args, output: _after(me, module), always_call=True
            ),
        )
        weakref.finalize(self, _take_off, weakref.ref(module), self._attribute, hooks)

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """See the class."""
        own = self._own_weight()
        if own is None:
            return self.merged(weight).to(weight.dtype)
        # The codes, and not ``weight``: those were taken out of them in another dtype.
        merged = self.merged(own, weight.device).to(weight.dtype)
        functions = getattr(self._module(), f"{self._attribute}_function", ())
        return merged if functions and functions[-1] is self else merged.dequantize()

    @property
    def is_plain(self) -> bool:
        """Whether the module stores its weight as it is: no codes, no scale, no conversion."""
        module = self._module()
        ways = (getattr(module, f"{way}_{self._attribute}", None) for way in ("convert", "set"))
        return self._own_weight() is None and all(way is None for way in ways)

    def merged(
        self,
        weight: torch.Tensor,
        device: torch.device | None = None,
        patches: list[Any] | None = None,
    ) -> torch.Tensor:
        """What the core would store after merging, in the dtype it would store it in.

        Args:
            device: where to compute; None: where ``weight`` is.
            patches: the same patches, with their tensors elsewhere.
        """
        device = device or weight.device
        dtype = compute_dtype(device)
        if is_wrapper(weight):
            work = comfy.model_management.cast_to_device(weight, device, dtype, copy=True)
        else:
            # Through the stored dtype first: a float32 file that the core keeps as bfloat16 is
            # rounded before it is patched.
            work = weight.to(self.stored_dtype).to(device=device, dtype=dtype, copy=True)
        module = self._module()
        # Operations with scaled storage convert: patches count in real weights, not in codes.
        convert = getattr(module, f"convert_{self._attribute}", None)
        if convert is not None:
            work = convert(work, inplace=True)
        work = comfy.lora.calculate_weight(patches or self.patches, work, self.key)
        seed = _string_to_seed(self.key)
        store = getattr(module, f"set_{self._attribute}", None)
        if store is not None:
            return store(work, seed=seed, return_weight=True)
        return comfy.float.stochastic_rounding(work, self.stored_dtype, seed=seed)

    def _own_weight(self) -> torch.Tensor | None:
        """The module's weight in its codes; None where it is not quantised."""
        module = self._module()
        own = None if module is None else module._parameters.get(self._attribute)
        return own if is_wrapper(own) else None

    def stand_in(self, module: torch.nn.Module, args: Any) -> None:
        """Give the forward that begins the merged weight, if this patch is in force."""
        functions = getattr(module, f"{self._attribute}_function", [])
        own = self._own_weight()
        if own is None or self not in functions:
            return
        given = next((one for one in args if isinstance(one, torch.Tensor)), own)
        setattr(
            module, f"{self._attribute}_function", [one for one in functions if one is not self]
        )
        merged = self.merged(own, given.device)
        merged.patch = self  # type: ignore[attr-defined]  # nothing else holds it meanwhile
        # Beside the parameter and not in its place: that one belongs to the engine.
        module.__dict__[self._attribute] = merged

    def step_out(self, module: torch.nn.Module) -> None:
        """Undo ``stand_in``."""
        if module.__dict__.pop(self._attribute, None) is not None:
            name = f"{self._attribute}_function"
            setattr(module, name, [self, *getattr(module, name, [])])


def forget_merged(module: torch.nn.Module) -> None:
    """Drop a merged weight that an interrupt left behind: it reaches no hook after a forward."""
    for attribute in ("weight", "bias"):
        if attribute in module._parameters:
            module.__dict__.pop(attribute, None)


def _before(patch: weakref.ref[PatchAtUse], module: torch.nn.Module, args: Any) -> None:
    held = patch()
    if held is not None:
        held.step_out(module)  # what an interrupt left
        held.stand_in(module, args)


def _after(patch: weakref.ref[PatchAtUse], module: torch.nn.Module) -> None:
    held = patch()
    if held is not None:
        held.step_out(module)


def _take_off(module: weakref.ref[torch.nn.Module], attribute: str, hooks: tuple[Any, ...]) -> None:
    for hook in hooks:
        hook.remove()
    held = module()
    if held is not None:
        held.__dict__.pop(attribute, None)
