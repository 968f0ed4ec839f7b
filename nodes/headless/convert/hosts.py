"""The values that a subgraph node gives to what is inside of it. Pure.

A subgraph node has a widget for each input of the subgraph that ends at a widget inside. Its saved
values are those of its widgets in their order; or, where the file has a list of the widgets that
were taken out to the node (``proxyWidgets``), that list is the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .page import Kind, PageGraph, PageNode, border_targets
from .page_class import UNDEFINED, Widget
from .rules import Rules
from .saved import INSIDE_INPUT
from .values import Valued

_OWN = "-1"
"""In that list, stands for an input of the node itself."""


@dataclass
class HostValues:
    """What one subgraph node was saved with.

    Attributes:
        own: by the name of the subgraph's input; of the inputs that have a widget.
        inner: by (node inside, widget), of widgets that no input of the subgraph leads to.
    """

    own: dict[str, Any] = field(default_factory=dict)
    inner: dict[tuple[str, str], Any] = field(default_factory=dict)


class Hosts:
    """The values of every subgraph node of a workflow.

    Threads: one at a time; what was found is kept.
    """

    def __init__(self, pages: Mapping[str, PageGraph], rules: Rules) -> None:
        self._rules = rules
        self._pages = pages
        self._found: dict[int, HostValues] = {}

    def values_of(self, node: PageNode) -> HostValues:
        """Of one subgraph node."""
        key = id(node)
        if key not in self._found:
            # A subgraph that is within itself finds nothing there, and ends.
            self._found[key] = HostValues()
            self._found[key] = self._read(node)
        return self._found[key]

    def _read(self, node: PageNode) -> HostValues:
        promoted = [
            (slot.name, widget)
            for place, slot in enumerate(node.inputs)
            if (widget := self._widget_behind(node, place)) is not None
        ]
        found = HostValues({name: widget.value for name, widget in promoted})
        saved = node.saved.values if isinstance(node.saved.values, list) else []
        # Some tools write the control behind a seed as well, as inside.
        has_controls = len(saved) > len(promoted) and not _proxies(node)
        place = 0
        for name, widget in promoted:
            if place < len(saved) and saved[place] is not None:
                found.own[name] = saved[place]
            place += 2 if has_controls and _has_control(widget) else 1
        for (node_id, name), value in _listed(node, saved):
            if node_id != _OWN and self._rules.takes_inner_values:
                found.inner[node_id, name] = value
            elif node_id == _OWN and name in found.own:
                found.own[name] = value
        found.own.update(_kept_aside(node))
        return found

    def _widget_behind(self, node: PageNode, place: int) -> Valued | None:
        """The widget inside that an input of a subgraph node ends at, through subgraphs in it."""
        page = self._pages.get(node.saved.type)
        for target, slot in border_targets(page, place) if page is not None else ():
            if target.kind is Kind.SUBGRAPH:
                own = self.values_of(target).own
                if slot.name in own:
                    behind = self._widget_behind(target, target.inputs.index(slot))
                    return behind and Valued(behind.widget, own[slot.name])
            elif (found := target.widget(slot.widget)) is not None:
                return found
        if page is not None and _was_widget(page, place):
            # The class is not here, or has that widget no more: it has its place all the same.
            return Valued(Widget("", UNDEFINED), UNDEFINED)
        return None


def _was_widget(page: PageGraph, place: int) -> bool:
    links = {
        link.id
        for link in page.graph.links.values()
        if (link.origin_id, link.origin_slot) == (INSIDE_INPUT, place)
    }
    slots = (slot for node in page.graph.nodes.values() for slot in node.inputs)
    return any(slot.link in links and slot.widget is not None for slot in slots)


def _has_control(widget: Valued) -> bool:
    spec = widget.widget.belongs_to
    return spec is not None and spec.has_control


def _proxies(node: PageNode) -> list[Any]:
    proxies = node.saved.properties.get("proxyWidgets")
    return proxies if isinstance(proxies, list) else []


def _listed(node: PageNode, saved: list[Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    for place, entry in enumerate(_proxies(node)):
        if place >= len(saved) or saved[place] is None:
            continue
        if isinstance(entry, list) and len(entry) >= 2 and isinstance(entry[1], str):
            yield (str(entry[0]), entry[1]), saved[place]


def _kept_aside(node: PageNode) -> dict[str, Any]:
    """Values that a newer page could not place, which it still gives to the input of that name."""
    found: dict[str, Any] = {}
    entries = node.saved.properties.get("proxyWidgetErrorQuarantine")
    names = {slot.name for slot in node.inputs}
    for entry in entries if isinstance(entries, list) else []:
        original = entry.get("originalEntry") if isinstance(entry, dict) else None
        if not isinstance(original, list) or len(original) < 2 or str(original[0]) != _OWN:
            continue
        if original[1] in names and entry.get("hostValue") is not None:
            found.setdefault(original[1], entry["hostValue"])
    return found
