"""Quantised files: which of them this ComfyUI reads, and what it made of their weights.

A file says how a layer is quantised in a tensor beside its weight (``comfy_quant``), or for all
layers in its header. A ComfyUI that does not know such a mark takes the codes for the weights and
computes noise without a word, so the file is refused before.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import comfy.utils
import comfyui_version
import torch

from ....offload_core.run import is_wrapper, over_originals
from ....offload_core.values import CheckpointFormatError

MARK = ".comfy_quant"
"""The ending of the tensor that says how the weight beside it is quantised."""
HEADER_KEY = "_quantization_metadata"
_MARKS_SINCE = "0.4.0"
_SINCE = {
    "float8_e4m3fn": "0.3.68",
    "float8_e5m2": "0.8.0",
    "nvfp4": "0.8.0",
    "mxfp8": "0.18.0",
    "int8_tensorwise": "0.27.0",
    "convrot_w4a4": "0.28.0",
    "asym_w4a8_int8": "0.31.0",
}
"""The first ComfyUI that reads each, as its release notes have it."""


def refuse_unknown(
    state_dict: Mapping[str, torch.Tensor], metadata: Mapping[str, str], name: str
) -> None:
    """Refuse a file of a format that this ComfyUI would take for another.

    Raises: CheckpointFormatError naming the format and a ComfyUI that reads it.
    """
    in_header = _formats_in(_parsed(metadata.get(HEADER_KEY)).get("layers"))
    marks = {key: tensor for key, tensor in state_dict.items() if key.endswith(MARK)}
    beside = _formats_in({key: _parsed(_text(mark)) for key, mark in marks.items()})
    known = _known_formats()
    unknown = sorted((in_header | beside) - known)
    if beside and not unknown and not _reads_marks():
        unknown = sorted(beside)
    if not unknown:
        return
    since = max((_since(one, bool(beside)) for one in unknown), key=_order)
    which = f"ComfyUI {since} or newer reads it" if since else "a newer ComfyUI may read it"
    raise CheckpointFormatError(
        f"{name} has weights in the format {', '.join(unknown)}, which this ComfyUI "
        f"({comfyui_version.__version__}) does not read; {which}; update ComfyUI, or choose a "
        "file in another format"
    )


def is_code(key: str, state_dict: Mapping[str, torch.Tensor]) -> bool:
    """Whether ``key`` holds the codes of a quantised weight: its dtype is part of the format."""
    module, _, attribute = key.rpartition(".")
    return attribute == "weight" and f"{module}{MARK}" in state_dict


def held_dtypes(model: torch.nn.Module, given: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """The dtype that ComfyUI itself computes or holds a weight in, where it made another of it.

    A wrapper over codes has the dtype that it is computed in; a layer that converts on loading has
    what it converted to.

    Args:
        given: what each parameter was given, by its key.
    """
    found = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        if is_wrapper(parameter) or parameter.dtype != given.get(key, parameter.dtype):
            found[key] = parameter.dtype
    return found


def take_back(model: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    """Have quantised weights lie where they were given: ComfyUI copies their scales on loading.

    Args:
        given: what the model was loaded from, by its own keys.
    """
    held = {one.data_ptr() for one in model.parameters()}
    spare: dict[str, list[torch.Tensor]] = {}
    for key, tensor in given.items():
        if tensor.data_ptr() not in held:
            spare.setdefault(key.rpartition(".")[0], []).append(tensor)
    made: dict[int, torch.nn.Parameter | None] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if not is_wrapper(parameter):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = over_originals(parameter, spare.get(path, []))
            again = made[id(parameter)]
            if again is not None:
                module._parameters[attribute] = again


def _known_formats() -> set[str]:
    try:
        algorithms = importlib.import_module("comfy.quant_ops").QUANT_ALGOS
    except (ImportError, AttributeError):
        return set()
    return set(algorithms)


def _reads_marks() -> bool:
    # What turns older files into marked ones came together with what reads the marks.
    return hasattr(comfy.utils, "convert_old_quants")


def _since(name: str, is_marked: bool) -> str:
    since = _SINCE.get(name, "")
    return max(since, _MARKS_SINCE, key=_order) if since and is_marked else since


def _order(version: str) -> tuple[int, ...]:
    # One that nobody can name is newer than all others.
    return tuple(int(part) for part in version.split(".")) if version else (1 << 30,)


def _formats_in(layers: Any) -> set[str]:
    if not isinstance(layers, Mapping):
        return set()
    named = (layer.get("format") for layer in layers.values() if isinstance(layer, Mapping))
    return {str(one) for one in named if one}


def _text(mark: torch.Tensor) -> str:
    return bytes(mark.flatten().to(torch.uint8).tolist()).decode("utf-8", "replace")


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
