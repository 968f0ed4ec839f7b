"""Prompts compared: what the page exports against what the command makes of the same file."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

EXPORT = """async graph => {
    await window.app.loadGraphData(graph);
    return (await window.app.graphToPrompt()).output;
}"""


def what_runs(prompt: Any, object_info: Any) -> dict[str, Any]:
    """The nodes that lead to an output, with the inputs that their classes have.

    The page adds inputs for widgets of its own (a player of sounds), which the server ignores, and
    for inputs that are kept for old workflows only (``hidden``); and it keeps nodes of bypassed
    subgraphs, which nothing uses.
    """
    known = {}
    for node_id, node in prompt.items():
        if node.get("class_type") not in object_info:
            continue  # to the page, a node like any other; the server has no such class
        sections = object_info[node["class_type"]]["input"]
        specs = {**sections.get("required", {}), **sections.get("optional", {})}
        names = {name for name, spec in specs.items() if not (spec[1:] and spec[1].get("hidden"))}
        inputs = {n: v for n, v in node["inputs"].items() if n.partition(".")[0] in names}
        known[node_id] = (node["class_type"], inputs)
    waiting = [i for i, (kind, _) in known.items() if object_info[kind]["output_node"]]
    found: dict[str, Any] = {}
    while waiting:
        node_id = waiting.pop()
        if node_id not in found and node_id in known:
            found[node_id] = known[node_id]
            waiting += [v[0] for v in known[node_id][1].values() if isinstance(v, list)]
    return found


def same_graph(found: dict[str, Any], want: dict[str, Any]) -> bool:
    """Newer pages give the nodes within subgraphs new ids when they open a workflow."""
    return found == want or digests(found) == digests(want)


def digests(found: dict[str, Any]) -> list[str]:
    """What each node is and all that leads to it, whatever they are called."""
    known: dict[str, str] = {}

    def digest(node_id: str) -> str:
        if node_id not in known:
            kind, inputs = found[node_id]
            told = sorted((name, told_of(value)) for name, value in inputs.items())
            known[node_id] = sha256(repr((kind, told)).encode()).hexdigest()
        return known[node_id]

    def told_of(value: Any) -> str:
        if isinstance(value, list):
            return f"{digest(value[0])} {value[1]}"
        # To a page, 1.0 is 1.
        is_whole = isinstance(value, float) and value.is_integer()
        return repr(int(value) if is_whole else value)

    return sorted(map(digest, found))
