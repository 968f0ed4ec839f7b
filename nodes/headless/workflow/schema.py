"""What a ComfyUI says of its nodes (``/object_info``), read. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ANYTHING = ("*", "", 0, None)
"""What the page writes for a socket of any type."""
_UPLOADS = ("image_upload", "video_upload", "audio_upload", "file_upload", "animated_image_upload")
_SOCKETS = frozenset((
    "MODEL", "CLIP", "VAE", "CONDITIONING", "LATENT", "IMAGE", "MASK", "CONTROL_NET", "CLIP_VISION",
    "CLIP_VISION_OUTPUT", "STYLE_MODEL", "UPSCALE_MODEL", "SAMPLER", "SIGMAS", "NOISE", "GUIDER",
    "AUDIO", "VIDEO", "COURIER_BUDGET",
))  # fmt: skip
"""What comes from a node only. Of types that other packs make, nobody knows."""


@dataclass(frozen=True)
class InputSpec:
    """One input of a class.

    Attributes:
        type: such as ``MODEL`` or ``INT``; ``COMBO`` where one of some values is to be chosen.
        choices: of a COMBO, what the server offers; None where that is not known beforehand.
        is_open: what belongs to it is decided by other inputs, or by how many there are.
    """

    name: str
    type: str
    is_required: bool
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    has_default: bool = False
    is_upload: bool = False
    is_open: bool = False

    @property
    def is_socket(self) -> bool:
        """Whether no value of one's own can be given."""
        return self.type in _SOCKETS


class NodeSchema:
    """One class of nodes.

    Threads: any; nothing changes.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.inputs = {spec.name: spec for spec in _inputs(info)}
        outputs = info.get("output")
        self.outputs = [_type_text(t) for t in outputs] if isinstance(outputs, list) else []
        self.is_output = bool(info.get("output_node"))
        self.has_open_inputs = any(spec.is_open for spec in self.inputs.values())

    def offers(self, slot: Any, wanted: str) -> bool:
        """Whether its output ``slot`` may be linked to an input of type ``wanted``."""
        kind = self.outputs[slot]
        # Types that are only known in a running graph fit anything.
        return kind.startswith("COMFY_") or wanted.startswith("COMFY_") or fits(kind, wanted)


class Catalog:
    """Every class that a server has.

    Threads: any; a class is read when it is first asked for.
    """

    def __init__(self, object_info: Mapping[str, Any]) -> None:
        self._info = object_info
        self._read: dict[str, NodeSchema] = {}

    @property
    def names(self) -> list[str]:
        """Of all classes."""
        return list(self._info)

    def get(self, class_type: Any) -> NodeSchema | None:
        """None: the server has no such class."""
        if not isinstance(class_type, str):
            return None
        info = self._info.get(class_type)
        if not isinstance(info, Mapping):
            return None
        return self._read.setdefault(class_type, NodeSchema(info))


def is_link(value: Any) -> bool:
    """Whether the value of an input of the class is meant as (node, output): ComfyUI takes any
    list for one there."""
    return isinstance(value, list)


def is_good_link(value: Any) -> bool:
    """Whether it is (node, output), wherever it stands: an id and a number."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return isinstance(value[0], str) and type(value[1]) in (int, float)


def _inputs(info: Mapping[str, Any]) -> Iterator[InputSpec]:
    sections = info.get("input")
    for section in ("required", "optional"):
        specs = sections.get(section) if isinstance(sections, Mapping) else None
        for name, spec in specs.items() if isinstance(specs, Mapping) else ():
            if isinstance(spec, (list, tuple)) and spec:
                yield _input(name, spec, section == "required")


def _input(name: str, spec: Any, is_required: bool) -> InputSpec:
    kind = spec[0]
    options = spec[1] if len(spec) > 1 and isinstance(spec[1], Mapping) else {}
    choices: Any = None
    if isinstance(kind, (list, tuple)):
        kind, choices = "COMBO", kind
    elif kind == "COMBO":
        choices = options.get("options")
    if (
        options.get("remote")
        or options.get("multiselect")
        or not isinstance(choices, (list, tuple))
    ):
        choices = None
    return InputSpec(
        name=name,
        type=str(kind),
        is_required=is_required,
        choices=None if choices is None else tuple(choices),
        minimum=_number(options.get("min")),
        maximum=_number(options.get("max")),
        has_default="default" in options,
        is_upload=any(options.get(upload) for upload in _UPLOADS),
        is_open=str(kind).startswith("COMFY_") and str(kind) != "COMFY_MATCHTYPE_V3",
    )


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _type_text(kind: Any) -> str:
    """A class may offer a list of choices as an output; any COMBO fits it."""
    return kind if isinstance(kind, str) else "COMBO"


def fits(one: Any, other: Any) -> bool:
    """Whether a link may join the two types: alike, or one is anything; "A,B" is either."""
    if one in ANYTHING or other in ANYTHING or one == other:
        return True
    ones, others = str(one).lower().split(","), str(other).lower().split(",")
    return any(
        a.strip() == b.strip() or "*" in (a.strip(), b.strip()) for a in ones for b in others
    )
