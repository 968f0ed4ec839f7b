"""Where the value of an input comes from, in the end. Pure.

As the page decides it: through nodes that pass a link on, through bypassed nodes by the types of
their inputs, into subgraphs and out of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..workflow.schema import fits
from .page import Kind, Level, PageNode
from .rules import Rules
from .saved import BYPASSED, INSIDE_INPUT, INSIDE_OUTPUT, MUTED, Link, Slot


@dataclass(frozen=True)
class Origin:
    """An output of a node that runs."""

    node_id: str
    slot: int


@dataclass(frozen=True)
class Given:
    """A value: what a subgraph's node has for an input that has no link."""

    value: Any


Source = Origin | Given | None
"""None: nothing comes, and the input keeps what it has."""


class Resolver:
    """Follows links through all levels of one workflow.

    Threads: one at a time.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.levels: dict[tuple[str, ...], Level] = {}

    def add(self, level: Level) -> None:
        """Make a level known, before anything is asked."""
        self.levels[level.path] = level

    def source(self, level: Level, node: PageNode, slot: Slot) -> Source:
        """What an input of a node gets."""
        return self._input(level, node, slot, slot.type, set())

    def _input(
        self, level: Level, node: PageNode, slot: Slot, wanted: Any, seen: set[Any]
    ) -> Source:
        link = level.page.graph.links.get(slot.link) if slot.link is not None else None
        key = ("input", level.path, node.id, slot.name, slot.link)
        if link is None or key in seen:
            return None
        seen.add(key)
        if link.origin_id == INSIDE_INPUT and level.host is not None:
            return self._from_outside(level, link, wanted, seen)
        return self._output(level, link, wanted, seen)

    def _from_outside(self, level: Level, link: Link, wanted: Any, seen: set[Any]) -> Source:
        host, parent = level.host, level.parent
        if host is None or parent is None or not 0 <= link.origin_slot < len(host.inputs):
            return None
        slot = host.inputs[link.origin_slot]
        found = None
        if slot.link is not None:
            found = self._input(parent, host, slot, wanted, seen)
            if found is not None or not self._is_primitive(parent, slot):
                return found
        return Given(level.values[slot.name]) if slot.name in level.values else None

    def _is_primitive(self, level: Level, slot: Slot) -> bool:
        """Whether a primitive is at the other end, whose value the subgraph's node has by now."""
        link = level.page.graph.links.get(slot.link or "")
        node = level.page.nodes.get(link.origin_id) if link is not None else None
        return node is not None and node.kind is Kind.PRIMITIVE

    def _output(self, level: Level, link: Link, wanted: Any, seen: set[Any]) -> Source:
        node = level.page.nodes.get(link.origin_id)
        key = ("output", level.path, link.origin_id, link.origin_slot)
        if node is None or key in seen:
            return None
        seen.add(key)
        if node.saved.mode == MUTED and self._rules.muted_ends_links:
            return None
        if node.saved.mode == BYPASSED:
            place = _passed_on(node, link.origin_slot, wanted)
            if place is None or place >= len(node.inputs):
                return None
            slot = node.inputs[place]
            return self._input(level, node, slot, slot.type, seen)
        if node.kind is Kind.SUBGRAPH:
            return self._from_inside(level, node, link.origin_slot, wanted, seen)
        if node.kind is Kind.PASSING:
            return self._passed(level, node, link.origin_slot, wanted, seen)
        if node.kind in (Kind.PRIMITIVE, Kind.NOTE):
            return None
        return Origin(level.id_of(node.id), link.origin_slot)

    def _passed(
        self, level: Level, node: PageNode, place: int, wanted: Any, seen: set[Any]
    ) -> Source:
        here: Level | None = level
        if node.partner is not None:
            # The other one of a pair, here or where the subgraph is used.
            while here is not None and node.partner not in here.page.nodes:
                here = here.parent
            if here is None:
                return None
            other = here.page.nodes[node.partner]
            if not other.inputs:  # its mode does not matter: the link is taken from before it
                return None
            return self._input(here, other, other.inputs[0], wanted, seen)
        if not 0 <= place < len(node.inputs):
            return None
        return self._input(level, node, node.inputs[place], wanted, seen)

    def _from_inside(
        self, level: Level, node: PageNode, place: int, wanted: Any, seen: set[Any]
    ) -> Source:
        inside = self.levels.get((*level.path, node.id))
        if inside is None:
            return None
        for link in _border_links(inside, place):
            if link.origin_id == INSIDE_INPUT:
                return self._from_outside(inside, link, wanted, seen)
            return self._output(inside, link, wanted, seen)
        return None


def _border_links(inside: Level, place: int) -> list[Link]:
    """The links to an output of a subgraph, the one that counts first."""
    graph = inside.page.graph
    found = [
        link
        for link in graph.links.values()
        if link.target_id == INSIDE_OUTPUT and link.target_slot == place
    ]
    listed = graph.outputs[place].links if 0 <= place < len(graph.outputs) else ()
    return sorted(
        found, key=lambda link: listed.index(link.id) if link.id in listed else len(listed)
    )


def _passed_on(node: PageNode, place: int, wanted: Any) -> int | None:
    """Which input a bypassed node passes on: the one at the same place if its type fits, else the
    first of exactly the type that is wanted, else the first that fits."""
    if not 0 <= place < len(node.outputs):
        return None
    given, types = node.outputs[place], [slot.type for slot in node.inputs]
    if wanted in ("*", ""):
        return place if place < len(types) else 0
    if place < len(types) and fits(types[place], given) and fits(types[place], wanted):
        return place
    if wanted in types:
        return types.index(wanted)
    either = (i for i, kind in enumerate(types) if fits(kind, given) and fits(kind, wanted))
    return next(either, None)
