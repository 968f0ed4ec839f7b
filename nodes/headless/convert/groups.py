"""Group nodes of before 2025, taken apart: the file has what is in them. Pure.

A group node has the sockets and the widgets of the nodes in it, in their order: of each node first
its widgets, then its sockets that no node of the group is linked to; at the end of all, the inputs
that were made of widgets. Its saved values are those of its widgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import WorkflowFileError
from .page import PRIMITIVE
from .page_class import Input, PageClass, Widget, widgets_of
from .saved import BYPASSED, MUTED, Graph, Link, SavedNode, Slot, node_of
from .values import valued_widgets

_PREFIXES = ("workflow>", "workflow/")
_DEEPEST = 20
_LONGEST = 2000


@dataclass
class _Group:
    """A definition, read: which input, widget and output of the group is which of a node in it."""

    nodes: list[SavedNode]
    inner_links: list[tuple[int, int, int, int]]
    inputs: list[tuple[str, int, str]] = field(default_factory=list)
    widgets: list[tuple[str, int, Widget]] = field(default_factory=list)
    outputs: list[tuple[int, int]] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)


def is_group(node: SavedNode) -> bool:
    """Whether a node is a group node that takes part in anything."""
    return node.type.startswith(_PREFIXES) and node.mode not in (MUTED, BYPASSED)


def ungrouped(
    graph: Graph, definitions: Mapping[str, Any], classes: Mapping[str, PageClass]
) -> Graph:
    """The graph with the nodes of its groups in the place of the groups.

    Raises: WorkflowFileError where the file lacks what a group is made of.
    """
    for _ in range(_DEEPEST):
        found = next((node for node in graph.nodes.values() if is_group(node)), None)
        if found is None:
            return graph
        while found is not None and len(graph.nodes) < _LONGEST:
            graph = _without(graph, found, definitions, classes)
            found = next((node for node in graph.nodes.values() if is_group(node)), None)
    raise WorkflowFileError("the workflow has group nodes within each other without an end")


def _without(
    graph: Graph,
    group: SavedNode,
    definitions: Mapping[str, Any],
    classes: Mapping[str, PageClass],
) -> Graph:
    definition = definitions.get(group.type.partition(group.type[8])[2])
    if not isinstance(definition, dict) or not isinstance(definition.get("nodes"), list):
        raise WorkflowFileError(
            f"node {group.named} is a group node, and the file does not say what is in it; save "
            "the workflow again from the ComfyUI where the group works, or export it from there "
            "with File > Export (API)"
        )
    read = _read(group, definition, classes)
    links = dict(graph.links)
    nodes = {i: node for i, node in graph.nodes.items() if node is not group}
    inner = _valued(read, group, classes)
    for place, (source, source_slot, target, target_slot) in enumerate(read.inner_links):
        link = Link(
            f"{group.id}:{place}", inner[source].id, source_slot, inner[target].id, target_slot
        )
        links[link.id] = link
        inner[target] = _linked(
            inner[target], _input_name(read.nodes[target], target_slot, classes), link.id
        )
    for place, slot in _matched(read, group):
        _, index, name = place
        if slot.link is not None:
            old = links[slot.link]
            links[old.id] = replace(old, target_id=inner[index].id)
            inner[index] = _linked(inner[index], name, old.id)
    for link in list(links.values()):
        if link.origin_id == group.id and 0 <= link.origin_slot < len(read.outputs):
            index, slot_number = read.outputs[link.origin_slot]
            links[link.id] = replace(link, origin_id=inner[index].id, origin_slot=slot_number)
    return replace(graph, nodes={**nodes, **{node.id: node for node in inner}}, links=links)


def _read(
    group: SavedNode, definition: Mapping[str, Any], classes: Mapping[str, PageClass]
) -> _Group:
    nodes = [
        node_of({**item, "id": f"{group.id}:{place}"} if isinstance(item, dict) else {})
        for place, item in enumerate(definition["nodes"])
    ]
    if any(node is None for node in nodes):
        raise WorkflowFileError(f"node {group.named}: what the file says is in it is damaged")
    found = _Group([node for node in nodes if node is not None], [])
    for link in definition.get("links") or []:
        if isinstance(link, list) and len(link) >= 4 and all(isinstance(n, int) for n in link[:4]):
            source, _, target, _ = link[:4]
            if 0 <= source < len(found.nodes) and 0 <= target < len(found.nodes):
                found.inner_links.append((link[0], link[1], link[2], link[3]))
    config = definition.get("config")
    config = config if isinstance(config, dict) else {}
    later = []
    for index, node in enumerate(found.nodes):
        later.append(_add_inputs(found, index, node, _options(config, index, "input"), classes))
        _add_outputs(found, index, node, definition, _options(config, index, "output"))
    for (index, node), specs in zip(enumerate(found.nodes), later, strict=True):
        for spec in specs:
            name = _name(found, node, spec.name, _options(config, index, "input"))
            found.inputs.append((name, index, spec.name))
            _add_widgets(found, name, index, spec)
    return found


def _add_widgets(found: _Group, name: str, index: int, spec: Input) -> None:
    for place, widget in enumerate(widgets_of(spec)):
        found.widgets.append((name if not place else "", index, widget))


def _add_inputs(
    found: _Group,
    index: int,
    node: SavedNode,
    config: Mapping[str, Any],
    classes: Mapping[str, PageClass],
) -> list[Input]:
    """Gives those that come after those of all nodes: inputs that were made of widgets."""
    linked = {
        _input_name(node, slot, classes)
        for _, _, target, slot in found.inner_links
        if target == index
    }
    made = {slot.name for slot in node.inputs if slot.widget == slot.name}
    later: list[Input] = []
    sockets = []
    for spec in _specs(found, index, node, classes):
        if not spec.has_widget:
            sockets.append(spec.name)
        elif spec.name in made:
            later += [spec] if spec.name not in linked else []
        else:
            _add_widgets(found, _name(found, node, spec.name, config), index, spec)
    for socket in sockets:
        if socket not in linked:
            name = _name(found, node, socket, config)
            if _option(config, socket, "visible") is not False:
                found.inputs.append((name, index, socket))
    return later


def _specs(
    found: _Group, index: int, node: SavedNode, classes: Mapping[str, PageClass]
) -> Iterator[Input]:
    if node.type == PRIMITIVE:
        # Its widget is of the type of what it is linked to.
        kind = next((s.type for s in node.outputs), "INT")
        yield Input("value", str(kind), {"control_after_generate": kind in ("INT", "COMBO")})
    elif node.type in classes:
        yield from classes[node.type].as_declared
    else:
        yield from (Input(slot.name, str(slot.type), {"forceInput": True}) for slot in node.inputs)


def _add_outputs(
    found: _Group,
    index: int,
    node: SavedNode,
    definition: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    external = {
        (item[0], item[1])
        for item in definition.get("external") or []
        if isinstance(item, list) and len(item) >= 2 and all(isinstance(n, int) for n in item[:2])
    }
    inside = {(source, slot) for source, slot, _, _ in found.inner_links}
    for slot in range(len(node.outputs)):
        is_shown = (index, slot) not in inside or (index, slot) in external
        visible = _option(config, str(slot), "visible")
        if is_shown if visible is None else visible:
            found.outputs.append((index, slot))


def _name(found: _Group, node: SavedNode, name: str, config: Mapping[str, Any]) -> str:
    """What the group calls an input: by its own name while that is free."""
    shown = _option(config, name, "name") or name
    key = str(shown)
    if (node.type == PRIMITIVE and node.title) or key in found.seen:
        prefix = f"{node.title or node.type} "
        key = shown = f"{prefix}{name}"
        if key in found.seen:
            shown = f"{prefix}{found.seen[key]} {name}"
    found.seen[key] = found.seen.get(key, 1) + 1
    return str(shown)


def _matched(found: _Group, group: SavedNode) -> Iterator[tuple[tuple[str, int, str], Slot]]:
    """The group's inputs with those of the file: by name, and by place where names differ."""
    entries = [*found.inputs, *((n, i, w.name) for n, i, w in found.widgets if n)]
    by_name = {entry[0]: entry for entry in reversed(entries)}
    for place, slot in enumerate(group.inputs):
        entry = by_name.get(slot.widget or slot.name) or by_name.get(slot.name)
        if entry is None and place < len(found.inputs):
            entry = found.inputs[place]
        if entry is not None:
            yield entry, slot


def _valued(found: _Group, group: SavedNode, classes: Mapping[str, PageClass]) -> list[SavedNode]:
    """The nodes with the values that the group gives to them."""
    saved = group.values if isinstance(group.values, list) else []
    given: list[dict[str, Any]] = [{} for _ in found.nodes]
    widgets = found.widgets
    if len(saved) < len(widgets):
        # A class may have got a widget since: one that the nodes in the file have no input for.
        then = [(n, i, w) for n, i, w in widgets if _was_there(found.nodes[i], w)]
        widgets = then if len(then) == len(saved) else widgets
    for (_, index, widget), value in zip(widgets, saved, strict=False):
        given[index].setdefault(widget.name, value)
    nodes = []
    for node, values in zip(found.nodes, given, strict=True):
        if node.type == PRIMITIVE and values:
            nodes.append(replace(node, values=[values["value"]]))
        elif node.type in classes:
            own = {v.name: v.value for v in valued_widgets(classes[node.type], node.values)}
            nodes.append(replace(node, values={**own, **values}))
        else:
            nodes.append(node)
    return [replace(n, inputs=tuple(replace(s, link=None) for s in n.inputs)) for n in nodes]


def _was_there(node: SavedNode, widget: Widget) -> bool:
    named = {slot.widget for slot in node.inputs if slot.widget is not None}
    return not named or widget.belongs_to is None or widget.name in named


def _input_name(node: SavedNode, slot: int, classes: Mapping[str, PageClass]) -> str:
    if 0 <= slot < len(node.inputs):
        return node.inputs[slot].name
    sockets = classes[node.type].sockets if node.type in classes else []
    return sockets[slot].name if 0 <= slot < len(sockets) else ""


def _linked(node: SavedNode, name: str, link: str) -> SavedNode:
    inputs = [replace(slot, link=link) if slot.name == name else slot for slot in node.inputs]
    if all(slot.name != name for slot in inputs):
        inputs.append(Slot(name, "*", link))
    return replace(node, inputs=tuple(inputs))


def _options(config: Mapping[str, Any], index: int, part: str) -> Mapping[str, Any]:
    of_node = config.get(str(index))
    found = of_node.get(part) if isinstance(of_node, dict) else None
    return found if isinstance(found, dict) else {}


def _option(config: Mapping[str, Any], name: str, option: str) -> Any:
    found = config.get(name)
    return found.get(option) if isinstance(found, dict) else None
