"""Values of widgets that comfy-cli loses, or takes from the wrong place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_OBJECT = "courier:object:"
_PRIMITIVE = "PrimitiveNode"
_DEEPEST = 20


def hide_objects(node: dict[str, Any]) -> None:
    """Write values that are objects as text, for ``show_objects`` to undo.

    Where one value is an object, comfy-cli reads all of them as those of one pack's loader of LoRAs
    and the others are lost: a picture's name becomes the first one of the list.
    """
    values = node.get("widgets_values")
    if not isinstance(values, list) or any(map(_is_of_that_pack, values)):
        return
    node["widgets_values"] = [
        f"{_OBJECT}{json.dumps(value)}" if isinstance(value, dict) else value for value in values
    ]


def show_objects(prompt: dict[str, Any]) -> None:
    """Undo ``hide_objects`` in what was made of it."""
    for node in prompt.values():
        inputs = node["inputs"]
        for name, value in inputs.items():
            if isinstance(value, str) and value.startswith(_OBJECT):
                inputs[name] = json.loads(value.removeprefix(_OBJECT))


def primitive_values(workflow: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """What each input gets from a primitive, by the node's id in the prompt and the input's name.

    The page gives a primitive's value to what is connected to it; comfy-cli prefers what the other
    node had saved itself, which is another one where a program changed the primitive.
    """
    definitions = workflow.get("definitions")
    subgraphs = definitions.get("subgraphs") if isinstance(definitions, dict) else None
    by_id = {graph["id"]: graph for graph in subgraphs or [] if _has_id(graph)}
    return dict(_primitive_values(workflow, by_id, "", 0))


def set_primitives(prompt: dict[str, Any], values: Mapping[tuple[str, str], Any]) -> None:
    """Put the values of ``primitive_values`` where they belong."""
    for (node_id, name), value in values.items():
        inputs = prompt.get(node_id, {}).get("inputs", {})
        if name in inputs and not isinstance(inputs[name], list):
            inputs[name] = {"__value__": value} if isinstance(value, list) else value


def _is_of_that_pack(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return "lora" in value or str(value.get("type", "")).endswith("Widget")


def _has_id(graph: Any) -> bool:
    return isinstance(graph, dict) and isinstance(graph.get("id"), str)


def _primitive_values(
    graph: Mapping[str, Any], subgraphs: Mapping[str, Any], prefix: str, depth: int
) -> Iterator[tuple[tuple[str, str], Any]]:
    nodes = [node for node in graph.get("nodes") or [] if isinstance(node, dict)]
    values = {
        str(node.get("id")): node["widgets_values"][0]
        for node in nodes
        if node.get("type") == _PRIMITIVE
        and isinstance(node.get("widgets_values"), list)
        and node["widgets_values"]
    }
    origins = {key: origin for key, origin in map(_origin, graph.get("links") or []) if key}
    for node in nodes:
        inner = subgraphs.get(str(node.get("type")))
        if inner is not None and depth < _DEEPEST:
            yield from _primitive_values(inner, subgraphs, f"{prefix}{node.get('id')}:", depth + 1)
        for slot in node.get("inputs") or []:
            link = str(slot.get("link")) if isinstance(slot, dict) else ""
            if origins.get(link) in values:
                yield (f"{prefix}{node.get('id')}", str(slot.get("name"))), values[origins[link]]


def _origin(link: Any) -> tuple[str, str]:
    """(id of the link, id of the node that it comes from)."""
    if isinstance(link, dict):
        return str(link.get("id")), str(link.get("origin_id"))
    if isinstance(link, list) and len(link) > 1:
        return str(link[0]), str(link[1])
    return "", ""
