"""The nodes of a prompt and how they hang together. Pure; of a prompt that nobody has checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import Fault, FaultKind
from .schema import is_good_link


@dataclass(frozen=True)
class Node:
    """One node as the prompt has it."""

    id: str
    class_type: str
    title: str
    inputs: Mapping[str, Any]

    def fault(
        self, kind: FaultKind, message: str, input_name: str | None = None, nearest: Any = ()
    ) -> Fault:
        """Something that is wrong here."""
        shown = tuple(str(choice) for choice in nearest)
        return Fault(kind, message, self.id, self.class_type, self.title, input_name, shown)

    @property
    def name(self) -> str:
        """For sentences: id, class, and the title where it is another."""
        other = "" if self.title == self.class_type else f" {self.title!r}"
        return f"{self.id} ({self.class_type}{other})"


def read_nodes(prompt: Mapping[str, Any]) -> tuple[dict[str, Node], list[Fault]]:
    """The nodes that are nodes, and a fault for each that is none."""
    nodes, faults = {}, []
    for node_id, value in prompt.items():
        problem = _problem(value)
        if problem is None:
            nodes[node_id] = Node(node_id, value["class_type"], title_of(value), value["inputs"])
        else:
            kind = value.get("class_type") if isinstance(value, dict) else None
            kind = kind if isinstance(kind, str) else None
            faults.append(Fault(FaultKind.MALFORMED, problem, str(node_id), kind))
    return nodes, faults


def title_of(value: Mapping[str, Any]) -> str:
    """What people call a node; its class where they have given it no name."""
    meta = value.get("_meta")
    title = meta.get("title") if isinstance(meta, dict) else None
    return title if isinstance(title, str) and title else str(value.get("class_type"))


def _problem(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "is no node: a node is an object with class_type and inputs"
    if not isinstance(value.get("class_type"), str) or not value["class_type"]:
        return (
            "has no class_type, so nobody knows what it is; in ComfyUI, export the workflow with "
            "File > Export (API)"
        )
    if not isinstance(value.get("inputs"), dict):
        return "has no inputs (an object, which may be empty)"
    return None


def sources(node: Node) -> Iterator[tuple[str, Any, Any]]:
    """(input, node id, output) of each input that is a link as it should be."""
    for name, value in node.inputs.items():
        if is_good_link(value):
            yield name, value[0], value[1]


def upstream(nodes: Mapping[str, Node], ends: Iterable[str]) -> set[str]:
    """``ends`` and everything that they need, as far as it is there."""
    found: set[str] = set()
    waiting = list(ends)
    while waiting:
        node_id = waiting.pop()
        if node_id in found:
            continue
        found.add(node_id)
        waiting += [
            origin
            for _, origin, _ in sources(nodes[node_id])
            if isinstance(origin, str) and origin in nodes
        ]
    return found


def cycles(nodes: Mapping[str, Node], among: set[str]) -> list[list[str]]:
    """Rings of nodes that wait for each other, each told once, from any of its nodes on."""
    done: set[str] = set()
    rings = []
    for start in sorted(among):
        path: dict[str, Iterator[str]] = {}
        if start in done:
            continue
        path[start] = _origins(nodes, start)
        while path:
            here = next(reversed(path))
            origin = next(path[here], None)
            if origin is None:
                done.add(here)
                del path[here]
            elif origin in path:
                names = list(path)
                rings.append(names[names.index(origin) :])
            elif origin not in done:
                path[origin] = _origins(nodes, origin)
    return rings


def _origins(nodes: Mapping[str, Node], node_id: str) -> Iterator[str]:
    found = (origin for _, origin, _ in sources(nodes[node_id]) if isinstance(origin, str))
    return iter([origin for origin in dict.fromkeys(found) if origin in nodes])
