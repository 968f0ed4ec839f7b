"""Whether a value is one that an input takes: choices, files, numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import Fault, FaultKind
from .graph import Node
from .nearest import nearest_choices
from .schema import InputSpec

_MODEL_ENDINGS = (
    ".safetensors", ".sft", ".ckpt", ".pt", ".pt2", ".pth", ".bin", ".pkl", ".gguf", ".onnx",
)  # fmt: skip
_SHOWN_LENGTH = 80
_SHOWN_CHOICES = 3


def value_fault(node: Node, spec: InputSpec, value: Any) -> tuple[Any, Fault | None]:
    """The value as the server spells it, and what is wrong with it, if anything."""
    if spec.choices is not None:
        return _choice(node, spec, value)
    if spec.type in ("INT", "FLOAT"):
        return value, _number_fault(node, spec, value)
    if value is None or isinstance(value, (str, int, float, bool, dict, list)):
        return value, None
    return value, node.fault(FaultKind.BAD_VALUE, f"{spec.name} is no JSON value", spec.name)


def without_wrapper(value: Any) -> Any:
    """A list that is no link is written as {"__value__": [...]}."""
    if isinstance(value, dict) and value.keys() == {"__value__"}:
        return value["__value__"]
    return value


def match_choice(value: Any, choices: Sequence[Any]) -> Any | None:
    """The one of ``choices`` that ``value`` is, whichever separator it was saved with; None: none.

    Nothing but an entry of the list is ever given back.
    """
    if value in choices:
        return value
    if not isinstance(value, str):
        return None
    wanted = value.replace("\\", "/")
    found = [c for c in choices if isinstance(c, str) and c.replace("\\", "/") == wanted]
    return found[0] if len(found) == 1 else None


def _choice(node: Node, spec: InputSpec, value: Any) -> tuple[Any, Fault | None]:
    choices = spec.choices or ()
    if isinstance(value, list):
        return value, None  # several at once: the node's own affair
    found = match_choice(value, choices)
    if found is not None:
        return found, None
    if spec.is_upload and isinstance(value, str) and _is_annotated(value):
        return value, None  # "name [output]", or in a folder: the list has the others only
    nearest = nearest_choices(value, choices)
    kind = _kind(spec, value)
    text = f"{spec.name} is {_shown(value)}, which this ComfyUI does not offer"
    if kind is FaultKind.MISSING_MODEL:
        text = f"{spec.name} is {_shown(value)}, a model that this ComfyUI does not have"
    elif kind is FaultKind.MISSING_FILE:
        text = f"{spec.name} is {_shown(value)}, a file that is not in this ComfyUI's input folder"
    return value, node.fault(kind, text + _instead(nearest, choices), spec.name, nearest)


def _instead(nearest: Sequence[str], choices: Sequence[Any]) -> str:
    if nearest:
        return f"; the nearest: {', '.join(map(_shown, nearest))}"
    if not choices:
        return "; it offers none at all"
    shown = ", ".join(_shown(choice) for choice in choices[:_SHOWN_CHOICES])
    return f"; it offers {shown}" + (" and others" if len(choices) > _SHOWN_CHOICES else "")


def _kind(spec: InputSpec, value: Any) -> FaultKind:
    if spec.is_upload:
        return FaultKind.MISSING_FILE
    names = [value, *(spec.choices or ())[:_SHOWN_CHOICES]]
    is_model = any(isinstance(n, str) and n.lower().endswith(_MODEL_ENDINGS) for n in names)
    return FaultKind.MISSING_MODEL if is_model else FaultKind.BAD_VALUE


def _is_annotated(value: str) -> bool:
    parts = value.replace("\\", "/").split("/")
    if ".." in parts or parts[0] == "" or ":" in parts[0] or "\0" in value:
        return False
    return value.endswith(("[input]", "[output]", "[temp]")) or len(parts) > 1


def _number_fault(node: Node, spec: InputSpec, value: Any) -> Fault | None:
    what = "a whole number" if spec.type == "INT" else "a number"
    try:
        # As the server converts it: "7" is taken, "seven" is not.
        number = int(value) if spec.type == "INT" else float(value)
    except (TypeError, ValueError, OverflowError):
        text = f"{spec.name} has to be {what}, not {_shown(value)}"
        return node.fault(FaultKind.BAD_VALUE, text, spec.name)
    if spec.minimum is not None and number < spec.minimum:
        text = f"{spec.name} is {_shown(value)}; the smallest is {spec.minimum:g}"
        return node.fault(FaultKind.BAD_VALUE, text, spec.name, [spec.minimum])
    if spec.maximum is not None and number > spec.maximum:
        text = f"{spec.name} is {_shown(value)}; the largest is {_plain(spec.maximum)}"
        return node.fault(FaultKind.BAD_VALUE, text, spec.name, [spec.maximum])
    return None


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}...'"
