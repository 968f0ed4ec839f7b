"""Weight patches (LoRA and its kin) applied when a weight is used, equal bit for bit to merging.

The core merges a patch into a weight once: it computes in float32 and rounds to the dtype the
weight is stored in. A streamed weight comes clean from its file each time, so the same arithmetic
runs at each use, with the same rounding: first to the dtype that the core would have stored, then
to whatever the layer computes in.
"""

from __future__ import annotations

from typing import Any

import comfy.float
import comfy.lora
import comfy.model_patcher
import comfy.utils
import torch

from .fitting import fitting

# 0.26 moved it from model_patcher to utils.
_string_to_seed = getattr(comfy.utils, "string_to_seed", None) or getattr(
    comfy.model_patcher, "string_to_seed", None
)


class PatchAtUse:
    """A ``weight_function`` of the core's: clean weight in, patched weight out.

    Args of the call: ``weight``, any float dtype, on the device of use. It is never written.
    Returns: same shape, device and dtype.
    """

    def __init__(
        self, key: str, patches: list[Any], module: Any, stored_dtype: torch.dtype
    ) -> None:
        attribute = key.rsplit(".", 1)[1]
        self.key = key
        self.patches = fitting(patches, getattr(module, attribute, None), key)
        self.stored_dtype = stored_dtype
        # Operations with scaled storage convert: patches count in real weights, not in codes.
        self._convert = getattr(module, f"convert_{attribute}", None)
        self._set = getattr(module, f"set_{attribute}", None)

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.merged(weight).to(weight.dtype)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """What the core would store after merging, in the dtype it would store it in."""
        # Through the stored dtype first: a float32 file that the core keeps as bfloat16 is rounded
        # before it is patched.
        work = weight.to(self.stored_dtype).to(torch.float32, copy=True)
        if self._convert is not None:
            work = self._convert(work, inplace=True)
        work = comfy.lora.calculate_weight(self.patches, work, self.key)
        seed = _string_to_seed(self.key)
        if self._set is not None:
            return self._set(work, seed=seed, return_weight=True)
        return comfy.float.stochastic_rounding(work, self.stored_dtype, seed=seed)
