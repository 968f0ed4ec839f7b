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

# 0.26 moved it from model_patcher to utils.
_string_to_seed = getattr(comfy.utils, "string_to_seed", None) or getattr(
    comfy.model_patcher, "string_to_seed", None
)


def patch_dtype(device: torch.device) -> torch.dtype:
    """What the core merges patches in, on that device."""
    return torch.float32


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
        self.patches = patches
        self.stored_dtype = stored_dtype
        # Operations with scaled storage convert: patches count in real weights, not in codes.
        self._convert = getattr(module, f"convert_{attribute}", None)
        self._set = getattr(module, f"set_{attribute}", None)

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.merged(weight).to(weight.dtype)

    @property
    def is_plain(self) -> bool:
        """Whether the module stores its weight as it is, and neither converts nor scales it."""
        return self._convert is None and self._set is None

    def merged(self, weight: torch.Tensor, patches: list[Any] | None = None) -> torch.Tensor:
        """What the core would store after merging, in the dtype it would store it in.

        Args:
            patches: the same patches, with their tensors elsewhere.
        """
        # Through the stored dtype first: a float32 file that the core keeps as bfloat16 is rounded
        # before it is patched.
        work = weight.to(self.stored_dtype).to(patch_dtype(weight.device), copy=True)
        if self._convert is not None:
            work = self._convert(work, inplace=True)
        work = comfy.lora.calculate_weight(patches or self.patches, work, self.key)
        seed = _string_to_seed(self.key)
        if self._set is not None:
            return self._set(work, seed=seed, return_weight=True)
        return comfy.float.stochastic_rounding(work, self.stored_dtype, seed=seed)
