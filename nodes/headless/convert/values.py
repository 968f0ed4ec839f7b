"""The values of a saved node, given to the page's widgets as the page gives them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .page_class import DYNAMIC_COMBO, PageClass, Widget, dynamic_inputs, widgets_of


@dataclass
class Valued:
    """A widget with its value."""

    widget: Widget
    value: Any

    @property
    def name(self) -> str:
        return self.widget.name


def valued_widgets(of: PageClass, values: Any) -> list[Valued]:
    """The widgets of a node of that class, with the values that it was saved with."""
    found: list[Valued] = []
    for widget in of.widgets:
        found.append(Valued(widget, widget.default))
        _grow(found, len(found) - 1)
    if isinstance(values, Mapping):
        _take_named(found, values)
    elif isinstance(values, list):
        _take_placed(found, without_sockets(of, found, values))
        found += _rows(values)
    return found


def _rows(values: list[Any]) -> list[Valued]:
    """A loader of LoRAs that has a row for each has no inputs for them in its class."""
    rows = [
        row for row in values if isinstance(row, Mapping) and {"lora", "strength"} <= row.keys()
    ]
    return [Valued(Widget(f"lora_{place}"), row) for place, row in enumerate(rows, 1)]


def without_sockets(of: PageClass, widgets: list[Valued], values: list[Any]) -> list[Any]:
    """Values less those of inputs that are sockets today (``forceInput``).

    An older page had widgets for them, and saved their values. That it did can be told by the
    number of values only: as many as the inputs have widgets and controls, those sockets included.
    """
    names = {valued.name for valued in widgets}
    forced: list[bool] = []
    for spec in of.as_declared:
        if spec.name in names or spec.is_forced:
            forced += [spec.is_forced, False] if spec.has_control else [spec.is_forced]
    if len(forced) != len(values):
        return values
    return [value for value, is_forced in zip(values, forced, strict=True) if not is_forced]


def _take_placed(found: list[Valued], values: list[Any]) -> None:
    place = taken = 0
    while place < len(found) and taken < len(values):
        valued = found[place]
        if valued.widget.takes_value:
            valued.value = values[taken]
            taken += 1
            # A choice brings widgets of its own, and these have the next values.
            _grow(found, place)
        place += 1


def _take_named(found: list[Valued], values: Mapping[str, Any]) -> None:
    """Some packs save their values by name."""
    place = 0
    while place < len(found):
        valued = found[place]
        if valued.name in values:
            valued.value = values[valued.name]
            _grow(found, place)
        place += 1


def set_value(widgets: list[Valued], name: str, value: Any) -> bool:
    """Give the widget ``name`` another value. False: there is none."""
    for place, valued in enumerate(widgets):
        if valued.name == name:
            valued.value = value
            _grow(widgets, place)
            return True
    return False


def _grow(found: list[Valued], place: int) -> None:
    """After a choice that brings inputs of its own: those of its value, and no others."""
    chosen = found[place]
    spec = chosen.widget.belongs_to
    if spec is None or spec.type != DYNAMIC_COMBO:
        return
    prefix = f"{chosen.name}."
    found[place + 1 :] = [
        valued for valued in found[place + 1 :] if not valued.name.startswith(prefix)
    ]
    key = chosen.value if isinstance(chosen.value, (str, int, float)) else None
    end = place + 1
    for inner in dynamic_inputs(spec).get(key, ()):
        if not inner.has_widget:
            continue
        for widget in widgets_of(inner, prefix):
            found.insert(end, Valued(widget, widget.default))
            before = len(found)
            _grow(found, end)
            end += 1 + len(found) - before
