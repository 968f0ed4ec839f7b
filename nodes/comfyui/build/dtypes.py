"""Which dtype each weight needs for a model to run as the core's own loader would run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.utils
import torch

_FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)


@dataclass(frozen=True)
class DtypeChoice:
    """``reference`` is what the core would store, ``storage`` what we do, ``cast`` the compute
    dtype when it is not ``storage`` (None: computed as stored)."""

    reference: torch.dtype
    storage: torch.dtype
    cast: torch.dtype | None


def choose_dtypes(
    state_dict: dict[str, torch.Tensor], model_config: Any, requested: torch.dtype | None
) -> DtypeChoice:
    """Keep the file's own dtype wherever casting it at use gives the core's numbers.

    That is so when the core would widen (exactly), or when it would compute in the very dtype it
    rounds to. Asking for fp8 of a wider file is neither: those weights have to be converted.
    """
    file_dtype = comfy.utils.weight_dtype(state_dict)
    supported = list(model_config.supported_inference_dtypes)
    device = comfy.model_management.get_torch_device()
    # 0.3.75 tells scales alone (scaled_fp8) from layers of several kinds; newer versions do not.
    per_layer = any(
        _config_value(model_config, name) is not None
        for name in ("quant_config", "layer_quant_config")
    )
    quantised = per_layer or _config_value(model_config, "scaled_fp8") is not None
    reference = requested or comfy.model_management.unet_dtype(
        model_params=comfy.utils.calculate_parameters(state_dict),
        supported_dtypes=supported,
        weight_dtype=None if quantised else file_dtype,
    )
    compute = _compute_dtype(reference, device, supported)
    if per_layer:
        # Such layers have no one storage dtype to compare with: the core always names the compute
        # dtype for them, and they are what carries it to the dequantising.
        cast = comfy.model_management.unet_manual_cast(None, device, supported)
        return DtypeChoice(reference, reference, cast)
    if quantised or file_dtype is None or not file_dtype.is_floating_point:
        return DtypeChoice(reference, reference, None if compute == reference else compute)
    keeps = widens_exactly(file_dtype, reference) or (reference == compute)
    storage = file_dtype if keeps else reference
    return DtypeChoice(reference, storage, None if compute == storage else compute)


def widens_exactly(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every value of ``narrow`` is a value of ``wide``."""
    if narrow == wide:
        return True
    if not (narrow.is_floating_point and wide.is_floating_point):
        return False
    if narrow in _FLOAT8:
        return wide in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if narrow in (torch.float16, torch.bfloat16):
        return wide in (torch.float32, torch.float64)
    return narrow == torch.float32 and wide == torch.float64


def _config_value(model_config: Any, name: str) -> Any:
    # Not getattr: the core's configs answer for names they lack, with a warning in the log.
    return vars(model_config).get(name, vars(type(model_config)).get(name))


def _compute_dtype(
    reference: torch.dtype, device: torch.device, supported: list[torch.dtype]
) -> torch.dtype:
    cast = comfy.model_management.unet_manual_cast(reference, device, supported)
    return reference if cast is None else cast
