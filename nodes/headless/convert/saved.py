"""The form that ComfyUI's page saves, read. Pure; of a file that nobody has checked.

A link is known by its id. A file may have links as lists (of the whole graph) or as objects (of a
subgraph, and of newer schemas); both become ``Link``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import WorkflowFileError

ALWAYS, MUTED, BYPASSED = 0, 2, 4
INSIDE_INPUT, INSIDE_OUTPUT = "-10", "-20"
"""What a link within a subgraph comes from or goes to where it crosses the subgraph's border."""
_LINK_FIELDS = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
_RENAMED = {
    "T2IAdapterLoader": "ControlNetLoader",
    "ConditioningAverage ": "ConditioningAverage",
    "SDV_img2vid_Conditioning": "SVD_img2vid_Conditioning",
    "Load3DAnimation": "Load3D",
    "Preview3DAnimation": "Preview3D",
}
"""Classes of the core that have another name now; the page opens old files with these."""


@dataclass(frozen=True)
class Link:
    """``origin_slot`` is the place of an output, ``target_slot`` that of an input."""

    id: str
    origin_id: str
    origin_slot: int
    target_id: str
    target_slot: int


@dataclass(frozen=True)
class Slot:
    """An input or an output. ``widget``: the name of the widget that the input stands for."""

    name: str
    type: Any
    link: str | None = None
    widget: str | None = None
    links: tuple[str, ...] = ()


@dataclass(frozen=True)
class SavedNode:
    """A node as the file has it. ``values``: a list, an object, or None where there are none."""

    id: str
    type: str
    mode: int
    title: str | None
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    values: Any
    properties: Mapping[str, Any]

    @property
    def named(self) -> str:
        """For sentences."""
        return (
            f"{self.id} ({self.type})"
            if not self.title
            else f"{self.id} ({self.type} {self.title!r})"
        )


@dataclass
class Graph:
    """The nodes and links of one level. ``inputs`` and ``outputs``: of a subgraph, its border."""

    id: str
    name: str
    nodes: dict[str, SavedNode]
    links: dict[str, Link]
    inputs: tuple[Slot, ...] = ()
    outputs: tuple[Slot, ...] = ()


@dataclass
class SavedWorkflow:
    """The whole file. ``groups``: the definitions of group nodes, by name."""

    root: Graph
    subgraphs: dict[str, Graph]
    groups: Mapping[str, Any] = field(default_factory=dict)


def read_saved(data: Mapping[str, Any], goes_by_list: bool = True) -> SavedWorkflow:
    """
    Args:
        goes_by_list: whether a link counts that is in the list of links, and not at its input.
    Raises: WorkflowFileError where there are no nodes.
    """
    if not data.get("nodes"):
        raise WorkflowFileError("the workflow has no nodes")
    extra = data.get("extra")
    groups = extra.get("groupNodes") if isinstance(extra, dict) else None
    return SavedWorkflow(
        _graph(data, goes_by_list),
        dict(_subgraphs(data, 0, goes_by_list)),
        groups if isinstance(groups, dict) else {},
    )


def _subgraphs(
    data: Mapping[str, Any], depth: int, goes_by_list: bool
) -> Iterator[tuple[str, Graph]]:
    definitions = data.get("definitions")
    found = definitions.get("subgraphs") if isinstance(definitions, dict) else None
    for item in _dicts(found):
        if isinstance(item.get("id"), str):
            yield item["id"], _graph(item, goes_by_list)
            if depth < 50:  # deeper than anyone nests; a hostile file ends here
                yield from _subgraphs(item, depth + 1, goes_by_list)


def _graph(data: Mapping[str, Any], goes_by_list: bool) -> Graph:
    links = {link.id: link for link in map(_link, _listed(data.get("links"))) if link is not None}
    nodes = [node_of(node) for node in _dicts(data.get("nodes"))]
    listed: dict[tuple[str, int], str] = {}
    for link in links.values() if goes_by_list else ():
        listed.setdefault((link.target_id, link.target_slot), link.id)
    return Graph(
        str(data.get("id", "")),
        str(data.get("name") or ""),
        {node.id: _linked(node, links, listed) for node in nodes if node is not None},
        links,
        _slots(data.get("inputs")),
        _slots(data.get("outputs")),
    )


def _linked(
    node: SavedNode, links: Mapping[str, Link], listed: Mapping[tuple[str, int], str]
) -> SavedNode:
    """An input knows its link; of a link that is in the list no more, nothing comes."""
    inputs = tuple(
        slot if slot.link in links else replace(slot, link=listed.get((node.id, place)))
        for place, slot in enumerate(node.inputs)
    )
    return replace(node, inputs=inputs)


def node_of(data: Mapping[str, Any]) -> SavedNode | None:
    """None: it is no node."""
    node_id, kind = data.get("id"), data.get("type")
    if not _is_id(node_id) or not isinstance(kind, str):
        return None
    title, properties, mode = data.get("title"), data.get("properties"), data.get("mode")
    return SavedNode(
        id=str(node_id),
        type=_RENAMED.get(kind, kind),
        mode=mode if isinstance(mode, int) else ALWAYS,
        title=title if isinstance(title, str) else None,
        inputs=_slots(data.get("inputs")),
        outputs=_slots(data.get("outputs")),
        values=data.get("widgets_values"),
        properties=properties if isinstance(properties, dict) else {},
    )


def _slots(value: Any) -> tuple[Slot, ...]:
    """With their places kept: a slot is known by its place."""
    items = value if isinstance(value, list) else []
    return tuple(_slot(item if isinstance(item, dict) else {}) for item in items)


def _slot(data: Mapping[str, Any]) -> Slot:
    link, widget = data.get("link"), data.get("widget")
    name = widget.get("name") if isinstance(widget, dict) else None
    links = data.get("links", data.get("linkIds"))
    return Slot(
        name=str(data.get("name", "")),
        type=data.get("type"),
        link=str(link) if _is_id(link) else None,
        widget=name if isinstance(name, str) else None,
        links=tuple(str(i) for i in links if _is_id(i)) if isinstance(links, list) else (),
    )


def _link(value: Any) -> Link | None:
    if isinstance(value, dict):
        value = [value.get(name) for name in _LINK_FIELDS]
    if not isinstance(value, list) or len(value) < 5 or not _is_id(value[0]):
        return None
    link_id, origin, origin_slot, target, target_slot = value[:5]
    return Link(str(link_id), str(origin), _place(origin_slot), str(target), _place(target_slot))


def _place(value: Any) -> int:
    """-1, which is no place, where the file says nothing usable."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in _listed(value) if isinstance(item, dict)]


def _listed(value: Any) -> list[Any]:
    """Links and nodes are lists; a few tools write objects by id."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
