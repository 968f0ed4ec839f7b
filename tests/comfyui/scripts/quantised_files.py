"""Small quantised files and patches for them, made by the quantisers of the ComfyUI under test."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """One way to quantise the matrices of a model's blocks.

    Attributes:
        layout: the ComfyUI layout that quantises; "" where a scale is all there is to it.
        conf: what ``comfy_quant`` says beside the format's name.
        options: for the quantiser.
        place: where a file says that it is quantised: "beside" a weight, in the "header", or "old",
            with scales under the names that they had before.
    """

    name: str
    format: str
    layout: str
    conf: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    has_input_scale: bool = False
    place: str = "beside"


_FP8 = ("float8_e4m3fn", "")
_ROTATED = {"convrot": True, "convrot_groupsize": 64}
_RECALCULATED = {"scale": "recalculate"}
_FP8_TYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
FORMATS = (
    Format("fp8", *_FP8),
    Format("fp8_input_scale", *_FP8, has_input_scale=True),
    Format("fp8_full_precision", *_FP8, {"full_precision_matrix_mult": True}),
    Format("fp8_header", *_FP8, place="header"),
    Format("fp8_old", *_FP8, place="old"),
    Format("fp8_e5m2", "float8_e5m2", ""),
    Format("mxfp8", "mxfp8", "TensorCoreMXFP8Layout"),
    Format("int8", "int8_tensorwise", "TensorWiseINT8Layout", options=_RECALCULATED),
    Format("int8_channel", "int8_tensorwise", "TensorWiseINT8Layout",
           options={"scale": "recalculate", "per_channel": True}),
    Format("int8_convrot", "int8_tensorwise", "TensorWiseINT8Layout", _ROTATED,
           {"scale": "recalculate", "per_channel": True, **_ROTATED}),
    Format("nvfp4", "nvfp4", "TensorCoreNVFP4Layout"),
    Format("convrot_w4a4", "convrot_w4a4", "TensorCoreConvRotW4A4Layout",
           {"convrot_groupsize": 64}, {"convrot_groupsize": 64}),
    Format("asym_w4a8", "asym_w4a8_int8", "AsymW4A8Int8Layout",
           {"group_size": 16, "convrot_groupsize": 64},
           {"group_size": 16, "convrot_groupsize": 64}),
)  # fmt: skip


def is_block_matrix(name: str, tensor: torch.Tensor) -> bool:
    return name.startswith("blocks.") and name.endswith(".weight") and tensor.dim() == 2


def known_formats() -> set[str]:
    """Those of ``FORMATS`` that the ComfyUI under test reads, by their names here."""
    import comfy.utils
    from comfy.quant_ops import QUANT_ALGOS

    reads_marks = hasattr(comfy.utils, "convert_old_quants")
    return {
        how.name
        for how in FORMATS
        if how.place == "old"
        or (how.format in QUANT_ALGOS and (how.place == "header" or reads_marks))
    }


def _quantise(name: str, tensor: torch.Tensor, how: Format) -> Tensors:
    if not how.layout:
        kind = _FP8_TYPES[how.format]
        scale = tensor.float().abs().max() / torch.finfo(kind).max
        return {name: (tensor.float() / scale).to(kind), f"{name}_scale": scale}
    from comfy.quant_ops import QuantizedTensor

    quantised = QuantizedTensor.from_float(tensor.float(), how.layout, **how.options)
    return {key: part.contiguous() for key, part in quantised.state_dict(name).items()}


def write_quantised(
    file: Path, plain: Path, how: Format, rest: torch.dtype = torch.bfloat16
) -> Path:
    """``plain``, a bf16 file: the matrices of its blocks quantised, and the rest in ``rest``."""
    tensors: Tensors = {}
    layers: dict[str, dict[str, Any]] = {}
    for name, tensor in load_file(plain).items():
        if not is_block_matrix(name, tensor):
            tensors[name] = tensor.to(rest)
            continue
        stem = name.removesuffix(".weight")
        tensors |= _quantise(name, tensor, how)
        layers[stem] = {"format": how.format, **how.conf}
        if how.has_input_scale:
            tensors[f"{stem}.input_scale"] = torch.tensor(0.05)
    metadata = {"format": "pt"}
    if how.place == "beside":
        tensors |= {f"{stem}.comfy_quant": as_bytes(conf) for stem, conf in layers.items()}
    elif how.place == "header":
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})
    else:
        tensors = {key.replace("weight_scale", "scale_weight"): one for key, one in tensors.items()}
        tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(tensors, file, metadata=metadata)
    return file


def as_bytes(conf: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(conf).encode()), dtype=torch.uint8)


def _matrices(plain: Path) -> Tensors:
    return {
        f"diffusion_model.{name.removesuffix('.weight')}": tensor
        for name, tensor in load_file(plain).items()
        if is_block_matrix(name, tensor)
    }


def _noise(shape: tuple[int, ...], seed: int, size: float) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def _lora(stem: str, matrix: torch.Tensor, seed: int) -> Tensors:
    rows, columns = matrix.shape
    return {
        f"{stem}.lora_A.weight": _noise((4, columns), seed, columns**-0.5),
        f"{stem}.lora_B.weight": _noise((rows, 4), seed + 1, 0.3),
    }


def _lokr(stem: str, matrix: torch.Tensor, seed: int) -> Tensors:
    rows, columns = matrix.shape
    return {
        f"{stem}.lokr_w1": _noise((4, 4), seed, 0.3),
        f"{stem}.lokr_w2": _noise((rows // 4, columns // 4), seed + 1, columns**-0.5),
    }


def _diff(stem: str, matrix: torch.Tensor, seed: int) -> Tensors:
    return {f"{stem}.diff": _noise(tuple(matrix.shape), seed, 0.3 * matrix.shape[1] ** -0.5)}


def _set(stem: str, matrix: torch.Tensor, seed: int) -> Tensors:
    return {f"{stem}.set_weight": _noise(tuple(matrix.shape), seed, matrix.shape[1] ** -0.5)}


PATCHES: dict[str, Callable[[str, torch.Tensor, int], Tensors]] = {
    "lora": _lora,
    "lokr": _lokr,
    "diff": _diff,
    "set": _set,
}


def patches(kind: str, plain: Path) -> Tensors:
    """A file's worth of patches of one kind, on every matrix of every block."""
    found: Tensors = {}
    for index, (stem, matrix) in enumerate(_matrices(plain).items()):
        found |= PATCHES[kind](stem, matrix, 10 * index)
    return found
