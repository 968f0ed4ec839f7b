"""What is wrong with a workflow, all of it at once, before anything is queued or read. Pure."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckError, Fault, FaultKind
from ..text import some_of
from .graph import Node, cycles, read_nodes, upstream
from .nearest import nearest_choices
from .schema import Catalog, NodeSchema, is_good_link, is_link
from .values import value_fault, without_wrapper

_SHOWN_LENGTH = 60
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_CONVERTER_ONLY = ("Note", "MarkdownNote", "Reroute", "PrimitiveNode")


@dataclass(frozen=True)
class Checked:
    """A workflow with what was found.

    Attributes:
        prompt: a copy, with names of files spelled as the server spells them.
        notes: what was changed or will be ignored, in words.
    """

    prompt: dict[str, Any]
    faults: tuple[Fault, ...]
    notes: tuple[str, ...] = ()

    def require(self) -> Checked:
        """Itself. Raises: CheckError where something is wrong."""
        if self.faults:
            raise CheckError(self.faults)
        return self


@dataclass
class _Search:
    """One check under way."""

    nodes: Mapping[str, Node]
    catalog: Catalog
    faults: list[Fault]
    broadcast: str = ""
    notes: list[str] = field(default_factory=list)
    spelled: dict[tuple[str, str], Any] = field(default_factory=dict)


def check_workflow(
    prompt: Mapping[str, Any], catalog: Catalog, broadcasters: Sequence[str] = ()
) -> Checked:
    """Compare a workflow in API form with what a server has.

    Only what leads to an output node is looked at closely: the rest does not run. The server itself
    has the last word, and gives it before it reads a weight.

    Args:
        broadcasters: nodes of the saved form whose links the page makes only when it queues.
    """
    nodes, faults = read_nodes(prompt)
    search = _Search(nodes, catalog, faults, _broadcast_text(broadcasters))
    for node in nodes.values():
        if catalog.get(node.class_type) is None:
            faults.append(_missing_class(node, catalog))
    outputs = [i for i, n in nodes.items() if (s := catalog.get(n.class_type)) and s.is_output]
    if not outputs and not any(f.kind is FaultKind.MISSING_CLASS for f in faults):
        faults.append(_no_output(nodes))
    # Where a class is missing, nobody knows whether it is an output; where there is no output, one
    # will be added. Then all are looked at.
    is_sure = bool(outputs) and not any(f.kind is FaultKind.MISSING_CLASS for f in faults)
    needed = upstream(nodes, outputs if is_sure else nodes)
    for node_id, node in nodes.items():
        schema = catalog.get(node.class_type)
        if node_id in needed and schema is not None:
            _look_at(search, node, schema)
    for ring in cycles(nodes, needed):
        faults.append(_cycle(nodes, ring))
    return Checked(_spelled(prompt, search.spelled), tuple(faults), tuple(search.notes))


def _look_at(search: _Search, node: Node, schema: NodeSchema) -> None:
    for spec in schema.inputs.values():
        if spec.name not in node.inputs:
            if spec.is_required and not spec.is_open:
                search.faults.append(_missing_input(search, node, spec.name, schema))
            continue
        value = node.inputs[spec.name]
        if is_link(value):
            search.faults += _link_faults(search, node, spec.name, spec.type, value)
            continue
        if value is not None and spec.is_socket:
            text = f"{spec.name} has to be a link to a {spec.type}, and is {_shown(value)}"
            search.faults.append(node.fault(FaultKind.BAD_LINK, text, spec.name))
            continue
        found, fault = value_fault(node, spec, without_wrapper(value))
        if fault is not None:
            search.faults.append(fault)
        elif found != without_wrapper(value):
            search.spelled[node.id, spec.name] = found
            search.notes.append(f"node {node.name}: {spec.name} is {found!r} on this server")
    if not schema.has_open_inputs:
        for name in node.inputs:
            if name not in schema.inputs:
                _look_at_unknown(search, node, name)


def _look_at_unknown(search: _Search, node: Node, name: str) -> None:
    value = node.inputs[name]
    # A link among them makes the server run what nobody uses, or stumble over a node that is not
    # there; a value is ignored, a list of texts too.
    if is_good_link(value):
        search.faults += _link_faults(search, node, name, "*", value)
    search.notes.append(f"node {node.name} has no input {name!r}; it is ignored")


def _link_faults(
    search: _Search, node: Node, name: str, wanted: str, value: list[Any]
) -> Iterator[Fault]:
    def bad(text: str) -> Fault:
        return node.fault(FaultKind.BAD_LINK, f"{name} {text}", name)

    if len(value) != 2:
        yield bad(f"is {_shown(value)}, and a link is a node's id and the number of its output")
        return
    origin, slot = value
    source = search.nodes.get(origin) if isinstance(origin, str) else None
    if source is None:
        text = f"comes from node {_shown(origin)}, which is not in the workflow"
        if isinstance(origin, int) and str(origin) in search.nodes:
            text += f'; ids are strings: write "{origin}"'
        yield bad(text)
        return
    schema = search.catalog.get(source.class_type)
    if schema is None:
        return  # told already
    if not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot < len(schema.outputs):
        outputs = ", ".join(f"{i} {kind}" for i, kind in enumerate(schema.outputs)) or "none"
        yield bad(f"comes from output {_shown(slot)} of node {source.name}; it has: {outputs}")
    elif not schema.offers(slot, wanted):
        given = schema.outputs[slot]
        yield bad(f"has to be {wanted}, and output {slot} of node {source.name} is {given}")


def _missing_class(node: Node, catalog: Catalog) -> Fault:
    nearest = nearest_choices(node.class_type, catalog.names, 0.75)
    text = "this ComfyUI has no such node"
    if node.class_type in _CONVERTER_ONLY:
        text = "is for ComfyUI's page only, and nothing that runs; leave it out of the API form"
    elif _UUID.fullmatch(node.class_type):
        text = (
            "stands for a subgraph, and what is in that is not in the file; save the workflow "
            "again from the ComfyUI where it works"
        )
    elif node.class_type.startswith("Courier"):
        text += "; install ComfyUI-Courier there, or a newer one"
    else:
        text += "; install the pack that brings it, or a newer ComfyUI"
    if nearest:
        text += f" (the nearest names: {', '.join(nearest)})"
    return node.fault(FaultKind.MISSING_CLASS, text, nearest=nearest)


def _missing_input(search: _Search, node: Node, name: str, schema: NodeSchema) -> Fault:
    unknown = [given for given in node.inputs if given not in schema.inputs]
    near = difflib.get_close_matches(name, unknown, 1, 0.3) or unknown[:1]
    text = f"{name} is missing"
    if search.broadcast and schema.inputs[name].is_socket:
        text += search.broadcast
    elif near:
        text += f"; there is {near[0]!r}, which this node does not have: was it renamed?"
    else:
        spec = schema.inputs[name]
        text += f" ({spec.type}): connect it" + ("" if spec.is_socket else ", or give it a value")
    return node.fault(FaultKind.MISSING_INPUT, text, name, near)


def _broadcast_text(broadcasters: Sequence[str]) -> str:
    if not broadcasters:
        return ""
    return (
        f"; the workflow has {some_of([f'node {name}' for name in broadcasters], 3)}, whose links "
        "the page makes only when it queues: there, right-click the background, choose Convert all "
        "UEs to real links and save, or export with File > Export (API)"
    )


def _no_output(nodes: Mapping[str, Node]) -> Fault:
    if not nodes:
        return Fault(FaultKind.NO_OUTPUT, "the workflow has no nodes that can run")
    text = "no node is an output, so nothing would run; add a SaveImage, for example"
    return Fault(FaultKind.NO_OUTPUT, text)


def _cycle(nodes: Mapping[str, Node], ring: list[str]) -> Fault:
    # Told as the data goes: each takes from the one after it.
    way = " -> ".join([*reversed(ring), ring[-1]])
    text = f"nodes wait for each other in a ring: {way}; cut one of these links"
    return nodes[ring[0]].fault(FaultKind.CYCLE, text)


def _spelled(prompt: Mapping[str, Any], spelled: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    copy = dict(prompt)
    for (node_id, name), value in spelled.items():
        node = copy[node_id]
        copy[node_id] = {**node, "inputs": {**node["inputs"], name: value}}
    return copy


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."
