"""What the page makes of a class of the server: its inputs, and its widgets in their order. Pure.

The values of a saved node have no names. They are those of the page's widgets, in the order in
which the page creates them, and that is more than the class has inputs: a seed is followed by its
control, a choice of files by a button. Which, is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

CONTROL = "control_after_generate"
DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"
AUTOGROW = "COMFY_AUTOGROW_V3"
_WIDGETS = frozenset((
    "INT", "FLOAT", "BOOLEAN", "STRING", "COMBO", "MARKDOWN", "TEXTAREA", "COLOR", "IMAGECOMPARE",
    "CHART", "GALLERIA", "BOUNDING_BOX", "PAINTER", "COMPOSITOR", "CURVE", "RANGE", "VIDEO_EDIT",
    "BOUNDING_BOXES", "COLORS", "WEBCAM", "AUDIO_RECORD", "LOAD_3D", "LOAD_3D_ADVANCED",
    "PREVIEW_3D", DYNAMIC_COMBO,
))  # fmt: skip
"""Types of inputs that the page has a widget for. All others are sockets."""
_PLAYERS = frozenset((
    "LoadAudio", "SaveAudio", "PreviewAudio", "SaveAudioMP3", "SaveAudioOpus", "SaveAudioAdvanced",
))  # fmt: skip
_UPLOADS = ("image_upload", "video_upload", "animated_image_upload")
_EMPTY: Mapping[str, Any] = {
    "FLOAT": 0,
    "INT": 0,
    "BOOLEAN": False,
    "STRING": "",
    "COLOR": "#000000",
    "IMAGECOMPARE": ["", ""],
}
_BUTTONS_3D = ("upload 3d model", "upload extra resources", "clear")
_SEEDS = ("seed", "noise_seed")
UNDEFINED: Any = type("Undefined", (), {"__repr__": lambda _: "UNDEFINED"})()
"""Of a widget that has no value, not even null: the page sends nothing."""


@dataclass(frozen=True)
class Input:
    """One input of a class, as ``/object_info`` has it."""

    name: str
    type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[Any, ...] | None = None

    @property
    def is_forced(self) -> bool:
        """A socket, though its type has a widget."""
        return bool(self.options.get("forceInput"))

    @property
    def has_widget(self) -> bool:
        return not self.is_forced and str(self.options.get("widgetType", self.type)) in _WIDGETS

    @property
    def has_socket(self) -> bool:
        return not self.options.get("socketless")

    @property
    def has_control(self) -> bool:
        """Whether a control for the next run follows it."""
        named = self.options.get(CONTROL)
        if named is None:
            return self.type == "INT" and self.name in _SEEDS
        return bool(named) and self.type in ("INT", "COMBO")


@dataclass(frozen=True)
class Widget:
    """One widget.

    Attributes:
        takes_value: whether it has a place among the saved values.
        is_sent: whether its value goes into the prompt.
        belongs_to: the input that it is for; None: it is the page's own.
    """

    name: str
    default: Any = None
    takes_value: bool = True
    is_sent: bool = True
    belongs_to: Input | None = None

    @property
    def type(self) -> str | None:
        """Of its input."""
        return None if self.belongs_to is None else self.belongs_to.type

    @property
    def is_text_area(self) -> bool:
        """Whether it is a field of several lines."""
        spec = self.belongs_to
        return spec is not None and spec.type == "STRING" and bool(spec.options.get("multiline"))

    @property
    def is_dynamic_text(self) -> bool:
        """``{a|b}`` in it is one of the two."""
        return self.belongs_to is not None and bool(self.belongs_to.options.get("dynamicPrompts"))


class PageClass:
    """One class, as the page registers it.

    Threads: any; nothing changes.
    """

    def __init__(self, name: str, info: Mapping[str, Any]) -> None:
        self.name = name
        self.title = str(info.get("display_name") or name)
        self.outputs = [
            kind if isinstance(kind, str) else "COMBO" for kind in _list(info.get("output"))
        ]
        sections = info.get("input")
        self._sections: Mapping[str, Any] = sections if isinstance(sections, Mapping) else {}
        self._order = info.get("input_order")

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """In the order in which the page creates them."""
        found = dict(_inputs(self._sections))
        order = self._order if isinstance(self._order, Mapping) else {}
        names = [
            n for part in ("required", "optional") for n in _list(order.get(part)) if n in found
        ]
        return tuple(found[name] for name in dict.fromkeys([*names, *found]))

    @cached_property
    def as_declared(self) -> tuple[Input, ...]:
        """In the order of the class itself: the required ones, then the optional."""
        return tuple(dict(_inputs(self._sections)).values())

    @cached_property
    def widgets(self) -> tuple[Widget, ...]:
        """Those that a fresh node has; choices that bring inputs of their own bring them later."""
        found = [w for spec in self.inputs if spec.has_widget for w in widgets_of(spec)]
        required = dict(_inputs({"required": self._sections.get("required")}))
        if self.name in _PLAYERS:
            found.append(Widget("audioUI", "", takes_value=False, is_sent=False))
        if _has_upload(required):
            found.append(Widget("upload", "image", is_sent=False))
        return tuple(found)

    @property
    def sockets(self) -> list[Input]:
        """Inputs with a place on the node, in the page's order: plain ones before widgets'."""
        plain = [s for s in self.inputs if not s.has_widget and s.type != AUTOGROW]
        return plain + [s for s in self.inputs if s.has_widget and s.has_socket]


def widgets_of(spec: Input, prefix: str = "") -> Iterator[Widget]:
    """The widget of an input, and those that the page puts beside it."""
    name = prefix + spec.name
    if spec.type == "LOAD_3D":
        yield from (Widget(button, is_sent=False) for button in _BUTTONS_3D)
    yield Widget(name, default_of(spec), belongs_to=spec)
    if spec.options.get("remote"):
        yield Widget("Auto-refresh after generation", False, is_sent=False)
        if spec.options["remote"].get("refresh_button"):
            yield Widget("refresh", "refresh", is_sent=False)
    if spec.type == "BOUNDING_BOX":
        yield from (Widget(side, is_sent=False) for side in ("x", "y", "width", "height"))
    # By its name alone, an input that a choice brings is none: there it is "choice.seed".
    if spec.has_control and (not prefix or spec.options.get(CONTROL)):
        yield Widget(CONTROL, "randomize", is_sent=False)
        if spec.type == "COMBO":
            yield Widget("control_filter_list", "", is_sent=False)


def default_of(spec: Input) -> Any:
    """What a fresh widget has."""
    if spec.type == DYNAMIC_COMBO:
        return next(iter(dynamic_inputs(spec)), UNDEFINED)
    if spec.type == "COMBO":
        if spec.options.get("multi_select"):
            return []
        if spec.options.get("default"):
            return spec.options["default"]
        if spec.choices:
            return spec.choices[0]
        return "Loading..." if spec.options.get("remote") else UNDEFINED
    default = spec.options.get("default")
    return _EMPTY.get(spec.type, UNDEFINED) if default is None else default


def dynamic_inputs(spec: Input) -> dict[str, list[Input]]:
    """Of a choice that brings inputs of its own: those of each choice."""
    found = {}
    for option in _list(spec.options.get("options")):
        if isinstance(option, Mapping) and "key" in option:
            sections = option.get("inputs")
            inputs = dict(_inputs(sections if isinstance(sections, Mapping) else {}))
            found[option["key"]] = list(inputs.values())
    return found


def read_input(name: str, spec: Any) -> Input | None:
    """One entry of ``/object_info``; None where it is none."""
    if not isinstance(spec, (list, tuple)) or not spec:
        return None
    options = spec[1] if len(spec) > 1 and isinstance(spec[1], Mapping) else {}
    kind = spec[0]
    if isinstance(kind, (list, tuple)):
        return Input(name, "COMBO", options, tuple(kind))
    choices = options.get("options") if kind == "COMBO" else None
    return Input(name, str(kind), options, tuple(choices) if isinstance(choices, list) else None)


def _inputs(sections: Mapping[str, Any]) -> Iterator[tuple[str, Input]]:
    for part in ("required", "optional"):
        specs = sections.get(part)
        for name, spec in specs.items() if isinstance(specs, Mapping) else ():
            found = read_input(name, spec)
            if found is not None:
                # An optional one that names a default as an input is a socket, says the page.
                if part == "optional" and found.options.get("defaultInput"):
                    found = Input(
                        name, found.type, {**found.options, "forceInput": True}, found.choices
                    )
                yield name, found


def _has_upload(required: Mapping[str, Input]) -> bool:
    combos = [spec for spec in required.values() if spec.type == "COMBO"]
    if any(spec.options.get(upload) is True for spec in combos for upload in _UPLOADS):
        return True
    return any(
        s.name == "audio" and s.options.get("audio_upload") is True for s in required.values()
    )


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []
