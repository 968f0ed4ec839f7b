"""What a bypassed node passes on, as ComfyUI's page decides it.

A node that is bypassed passes an input on for each output: the one at the same place if its type
fits, else the first of exactly the type that is wanted, else the first that fits. Where that one
has no link, or none fits, nothing arrives. comfy-cli then takes any input that has a link, of
whatever type; so those links are cut before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..workflow.schema import ANYTHING, fits

BYPASSED = 4


@dataclass(frozen=True)
class _Link:
    id: Any
    origin_id: Any
    origin_slot: Any
    target_id: Any
    target_slot: Any


def cut_dead_ends(graph: dict[str, Any]) -> None:
    """Cut each link that comes from a bypassed node and brings nothing, until there is none."""
    nodes = {str(n.get("id")): n for n in graph.get("nodes") or [] if isinstance(n, dict)}
    bypassed = {key: node for key, node in nodes.items() if node.get("mode") == BYPASSED}
    links = list(_links(graph)) if bypassed else []
    cut: set[Any] = set()
    while True:
        dead = [
            link
            for link in links
            if link.id not in cut
            and (node := bypassed.get(str(link.origin_id))) is not None
            and not _passes(node, link.origin_slot, _input_of(nodes, link), cut)
        ]
        if not dead:
            break
        cut.update(link.id for link in dead)
    if not cut:
        return
    for node in nodes.values():
        for slot in _dicts(node.get("inputs")):
            if _hashable(slot.get("link")) and slot["link"] in cut:
                slot["link"] = None
    graph["links"] = [link for link in graph["links"] if _id_of(link) not in cut]


def _passes(node: dict[str, Any], slot: Any, target: dict[str, Any], cut: set[Any]) -> bool:
    wanted = target.get("type")
    inputs, outputs = _dicts(node.get("inputs")), _dicts(node.get("outputs"))
    if not isinstance(slot, int) or not 0 <= slot < len(outputs):
        return True  # not for us to say
    index = _passed_on(inputs, slot, outputs[slot].get("type"), wanted)
    if index is None or index >= len(inputs):
        return False
    link = inputs[index].get("link")
    return link is not None and (not _hashable(link) or link not in cut)


def _passed_on(inputs: list[dict[str, Any]], slot: int, given: Any, wanted: Any) -> int | None:
    if wanted in ANYTHING:
        return slot if slot < len(inputs) else 0
    types = [entry.get("type") for entry in inputs]
    if slot < len(types) and fits(types[slot], given) and fits(types[slot], wanted):
        return slot
    if wanted in types:
        return types.index(wanted)
    either = (i for i, kind in enumerate(types) if fits(kind, given) and fits(kind, wanted))
    return next(either, None)


def _links(graph: dict[str, Any]) -> Iterator[_Link]:
    for link in graph.get("links") or []:
        if isinstance(link, dict):
            found = [link.get(name) for name in _Link.__dataclass_fields__]
        elif isinstance(link, list) and len(link) >= 5:
            found = link[:5]
        else:
            continue
        if _hashable(found[0]):
            yield _Link(*found)


def _id_of(link: Any) -> Any:
    found = link.get("id") if isinstance(link, dict) else link[0] if link else None
    return found if _hashable(found) else None


def _input_of(nodes: dict[str, dict[str, Any]], link: _Link) -> dict[str, Any]:
    inputs = _dicts(nodes.get(str(link.target_id), {}).get("inputs"))
    slot = link.target_slot
    return inputs[slot] if isinstance(slot, int) and 0 <= slot < len(inputs) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    """The list with its places kept: a slot is known by its place."""
    found = value if isinstance(value, list) else []
    return [item if isinstance(item, dict) else {} for item in found]


def _hashable(value: Any) -> bool:
    return isinstance(value, (int, str, float)) and not isinstance(value, bool)
