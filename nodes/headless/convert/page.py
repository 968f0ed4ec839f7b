"""A saved graph as the page has it once it is open: nodes with their inputs and widgets. Pure.

One ``PageNode`` stands for a node of the file; a subgraph's nodes are there once, however often the
subgraph is used. What differs from use to use is in the ``Level`` that it is used at.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .page_class import AUTOGROW, DYNAMIC_COMBO, PageClass
from .saved import INSIDE_INPUT, Graph, SavedNode, Slot
from .values import Valued, valued_widgets

PRIMITIVE, REROUTE = "PrimitiveNode", "Reroute"
NOTES = ("Note", "MarkdownNote")


class Kind(enum.Enum):
    """What a node is to the page."""

    REAL = "of a class that the server has"
    SUBGRAPH = "stands for a subgraph"
    PRIMITIVE = "gives its value to the widgets that it is linked to"
    PASSING = "passes a link on"
    NOTE = "says something to people"
    UNKNOWN = "of a class that the server does not have"


@dataclass
class PageNode:
    """A node. ``widgets``: with the values of the file; of a subgraph's node see ``Level``."""

    saved: SavedNode
    kind: Kind
    inputs: list[Slot]
    outputs: list[Any]
    widgets: list[Valued]
    of: PageClass | None = None
    subgraph: Graph | None = None
    partner: str | None = None
    """Of one that passes on what another one gets: that node's id."""

    @property
    def id(self) -> str:
        return self.saved.id

    @property
    def title(self) -> str:
        """What the page shows over it."""
        if self.saved.title:
            return self.saved.title
        return self.of.title if self.of is not None else self.saved.type

    def widget(self, name: str | None) -> Valued | None:
        """The widget of that name."""
        return next((valued for valued in self.widgets if valued.name == name), None)


@dataclass
class PageGraph:
    """The nodes of one graph of the file."""

    graph: Graph
    nodes: dict[str, PageNode]

    def targets(self, node_id: str, slot: int) -> Iterator[tuple[PageNode, Slot]]:
        """Inputs that are linked to an output, in the order of the nodes."""
        for node in self.nodes.values():
            for entry in node.inputs:
                link = self.graph.links.get(entry.link) if entry.link is not None else None
                if link is not None and (link.origin_id, link.origin_slot) == (node_id, slot):
                    yield node, entry


@dataclass
class Level:
    """One use of a graph.

    Attributes:
        path: ids of the subgraph nodes that lead to it.
        host: the subgraph node that stands for it, at ``parent``; None for the whole workflow.
        values: of the host's own widgets, by the name of the subgraph's input.
        inner_values: values that this use gives to widgets inside: (node id, widget).
    """

    page: PageGraph
    path: tuple[str, ...] = ()
    host: PageNode | None = None
    parent: Level | None = None
    values: dict[str, Any] = field(default_factory=dict)
    inner_values: dict[tuple[str, str], Any] = field(default_factory=dict)

    def id_of(self, node_id: str) -> str:
        """As the prompt calls it."""
        return ":".join((*self.path, node_id))


def page_graph(
    graph: Graph, classes: Mapping[str, PageClass], subgraphs: Mapping[str, Graph]
) -> PageGraph:
    """The graph with its nodes as they are before anything is decided of unknown ones."""
    nodes = {i: _page_node(node, classes, subgraphs) for i, node in graph.nodes.items()}
    return PageGraph(graph, nodes)


def _page_node(
    saved: SavedNode, classes: Mapping[str, PageClass], subgraphs: Mapping[str, Graph]
) -> PageNode:
    types = [slot.type for slot in saved.outputs]
    if saved.type in subgraphs:
        graph = subgraphs[saved.type]
        inputs = _host_inputs(saved, graph)
        outputs = [slot.type for slot in graph.outputs]
        return PageNode(saved, Kind.SUBGRAPH, inputs, outputs, [], subgraph=graph)
    if saved.type in classes:
        return _real_node(saved, classes[saved.type])
    kinds = {PRIMITIVE: Kind.PRIMITIVE, REROUTE: Kind.PASSING, **dict.fromkeys(NOTES, Kind.NOTE)}
    return PageNode(saved, kinds.get(saved.type, Kind.UNKNOWN), list(saved.inputs), types, [])


def _real_node(saved: SavedNode, of: PageClass) -> PageNode:
    widgets = valued_widgets(of, saved.values)
    if saved.type in ("KSampler", "KSamplerAdvanced"):
        _shorten_sampler(widgets)
    outputs = [*of.outputs, *(slot.type for slot in saved.outputs[len(of.outputs) :])]
    return PageNode(saved, Kind.REAL, _merged_inputs(saved, of, widgets), outputs, widgets, of)


def _merged_inputs(saved: SavedNode, of: PageClass, widgets: Sequence[Valued]) -> list[Slot]:
    """The class's inputs with the file's links, then what the file has beside them.

    Of those, an input for a widget that is not there is dropped, as the page drops it.
    """
    by_name = {slot.name: slot for slot in saved.inputs}
    merged = []
    for spec in of.sockets:
        slot = by_name.get(spec.name, Slot(spec.name, spec.type))
        widget = spec.name if spec.has_widget else None
        merged.append(replace(slot, name=spec.name, type=spec.type, widget=widget))
    known = {slot.name for slot in merged}
    there = {valued.name for valued in widgets}
    growing = tuple(f"{s.name}." for s in of.inputs if s.type in (AUTOGROW, DYNAMIC_COMBO))
    for slot in saved.inputs:
        is_kept = slot.widget is None or slot.widget in there or slot.name.startswith(growing)
        if slot.name not in known and is_kept:
            merged.append(slot)
    return merged


def _shorten_sampler(widgets: Sequence[Valued]) -> None:
    for valued in widgets:
        if valued.name == "sampler_name" and isinstance(valued.value, str):
            valued.value = valued.value.removeprefix("sample_")


def _host_inputs(saved: SavedNode, graph: Graph) -> list[Slot]:
    """One for each input of the subgraph: the file leaves out those that have no link."""
    left = list(saved.inputs)
    found = []
    for border in graph.inputs:
        alike = [s for s in left if s.name == border.name and s.type == border.type]
        slot = next(iter(alike or [s for s in left if s.name == border.name]), None)
        if slot is not None:
            left.remove(slot)
        link = None if slot is None else slot.link
        found.append(Slot(border.name, border.type, link, border.name))
    return found


def primitive_values(page: PageGraph) -> Iterator[tuple[PageNode, Slot, Any]]:
    """What primitives give: to which node, to which of its inputs, and the value."""
    for node in page.nodes.values():
        values = node.saved.values
        if node.kind is Kind.PRIMITIVE and isinstance(values, list) and values:
            for target, slot in page.targets(node.id, 0):
                yield target, slot, values[0]


def border_targets(page: PageGraph, place: int) -> Iterator[tuple[PageNode, Slot]]:
    """Within a subgraph: the inputs that its input number ``place`` goes to."""
    yield from page.targets(INSIDE_INPUT, place)
