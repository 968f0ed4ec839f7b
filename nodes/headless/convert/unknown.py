"""Nodes of classes that the server does not have: which of them are the page's alone. Pure.

A pack may bring nodes that are there for the page only: labels, bookmarks, switches of groups,
reroutes, pairs that carry a link without a line. Their names say nothing; what they do does.

- What has no link at all runs nowhere and gives nothing to anybody.
- A node that has one input and one output of any type, or of one type that the input is named
  after, and no values but a name, passes its link on.
- Two nodes with the same text for their only value, of which one takes a link and the other one
  gives, are the ends of one link.

All others are classes that are missing, and the check says so. The page writes "Node name for S&R"
into nodes that a server has described to it, and seldom into others: with it, a node of one input
and one output is taken for one that does something.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..workflow.schema import ANYTHING, fits
from .page import Kind, PageGraph, PageNode
from .saved import BYPASSED, MUTED, Slot

SEARCH_NAME = "Node name for S&R"
_GIVES, _TAKES = re.compile("get", re.I), re.compile("set", re.I)
_BROADCAST = re.compile(r"\b(anything|prompts?|seed) everywhere\b", re.I)


@dataclass(frozen=True)
class Decided:
    """What became of a graph's unknown nodes.

    Attributes:
        left_out: nodes that are the page's alone and that nothing needs.
        broadcasters: nodes whose links the page makes only when it queues.
    """

    left_out: tuple[PageNode, ...] = ()
    broadcasters: tuple[PageNode, ...] = ()


def decide(pages: Sequence[PageGraph]) -> Decided:
    """Mark what passes links on, and name what is left out."""
    unknown = [(page, n) for page in pages for n in page.nodes.values() if n.kind is Kind.UNKNOWN]
    broadcasters = [node for page in pages for node in page.nodes.values() if _is_broadcaster(node)]
    for _, node in unknown:
        if _is_reroute(node):
            node.kind = Kind.PASSING
    for page, node in unknown:
        partner = _partner(page, node, pages) if node.kind is Kind.UNKNOWN else None
        if partner is not None:
            node.kind, node.partner = Kind.PASSING, partner.id
            partner.kind = Kind.PASSING
        elif node.kind is Kind.UNKNOWN and _is_empty_getter(node):
            node.kind = Kind.PASSING
    left_out = []
    for page, node in unknown:
        if node.kind is Kind.UNKNOWN and (_is_idle(page, node) or node in broadcasters):
            node.kind = Kind.NOTE
            if node.saved.mode not in (MUTED, BYPASSED):
                left_out.append(node)
    return Decided(
        tuple(node for node in left_out if node not in broadcasters),
        tuple(n for n in broadcasters if n.saved.mode not in (MUTED, BYPASSED)),
    )


def _is_broadcaster(node: PageNode) -> bool:
    """Of Use Everywhere, which says so in each of its own nodes."""
    properties = node.saved.properties
    if node.kind in (Kind.REAL, Kind.UNKNOWN) and properties.get("ue_convert") is True:
        return True
    is_its_own = node.kind is Kind.UNKNOWN and not node.outputs and "ue_properties" in properties
    return is_its_own or bool(_BROADCAST.search(node.saved.type))


def _is_idle(page: PageGraph, node: PageNode) -> bool:
    """Nothing that runs needs it, and it is not what the workflow is for."""
    targets = [
        target
        for place in range(len(node.saved.outputs))
        for target, _ in page.targets(node.id, place)
    ]
    if any(target.kind in (Kind.REAL, Kind.SUBGRAPH) for target in targets):
        return False
    is_linked = bool(targets) or any(slot.link is not None for slot in node.inputs)
    return not is_linked or _only_looks(node)


def _only_looks(node: PageNode) -> bool:
    """No server has described it, and it does nothing but take what there is."""
    return (
        SEARCH_NAME not in node.saved.properties
        and (not node.saved.values or _key(node) is not None)
        and all(_takes_as_it_is(slot) for slot in node.inputs)
    )


def _takes_as_it_is(slot: Slot) -> bool:
    """Of any type, or named after its type: an input of a class has a name of its own."""
    return slot.type in ANYTHING or slot.name in ("", "*", str(slot.type))


def _is_reroute(node: PageNode) -> bool:
    inputs, outputs = node.saved.inputs, node.saved.outputs
    if len(inputs) != 1 or len(outputs) != 1:
        return False
    if "reroute" in node.saved.type.lower() and not node.saved.values:
        return True
    takes, gives = inputs[0], outputs[0]
    if takes.type in ANYTHING or gives.type in ANYTHING:
        return _only_looks(node)
    return takes.type == gives.type and _only_looks(node)


def _is_empty_getter(node: PageNode) -> bool:
    """The end of a link that begins nowhere."""
    return (
        SEARCH_NAME not in node.saved.properties
        and not node.inputs
        and len(node.saved.outputs) == 1
        and _key(node) is not None
        and _GIVES.search(node.saved.type) is not None
    )


def _partner(page: PageGraph, node: PageNode, pages: Sequence[PageGraph]) -> PageNode | None:
    """The node that takes what ``node`` gives, where the two are a pair."""
    key = _key(node)
    gives = len(node.saved.outputs) == 1 and all(slot.link is None for slot in node.inputs)
    if key is None or not gives:
        return None
    for graph in (page, *(other for other in pages if other is not page)):
        found = [other for other in graph.nodes.values() if _is_taker(other, node, key)]
        if found:
            return found[0]
    return None


def _is_taker(other: PageNode, node: PageNode, key: str) -> bool:
    if other.kind not in (Kind.UNKNOWN, Kind.PASSING) or other is node or _key(other) != key:
        return False
    linked = [slot for slot in other.inputs if slot.link is not None]
    if len(other.inputs) != 1 or not linked or len(other.saved.outputs) > 1:
        return False
    named = _TAKES.search(other.saved.type) and _GIVES.search(node.saved.type)
    described = SEARCH_NAME in other.saved.properties or SEARCH_NAME in node.saved.properties
    return bool(named or not described) and fits(linked[0].type, node.saved.outputs[0].type)


def _key(node: PageNode) -> str | None:
    values = node.saved.values
    if isinstance(values, list) and len(values) == 1 and isinstance(values[0], str) and values[0]:
        return values[0]
    return None
