"""From the saved-UI form to the API form, by the rules of ComfyUI's page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import WorkflowFileError
from ..text import some_of
from ..workflow.load import Form, Workflow
from ..workflow.texts import SAVERS, NamedNode
from .build import Placed, placed_nodes, prompt_of
from .groups import ungrouped
from .hosts import Hosts
from .page import Kind, PageGraph, PageNode, page_graph, primitive_values
from .page_class import PageClass
from .rules import Rules, rules_of
from .saved import Graph, read_saved
from .unknown import SEARCH_NAME, decide
from .values import set_value

_LEFT_OUT = (
    "left out: {}; this ComfyUI does not have them, and nothing that runs needs them: they are for "
    "ComfyUI's page only"
)


@dataclass(frozen=True)
class Converted:
    """One workflow in API form, and what there is to say about it.

    Attributes:
        nodes: all nodes of a saved form, for the texts that name them.
        broadcasters: nodes whose links the page makes only when it queues, for sentences.
    """

    prompt: dict[str, Any]
    notes: tuple[str, ...] = ()
    nodes: tuple[NamedNode, ...] = ()
    broadcasters: tuple[str, ...] = ()


def to_api(
    workflow: Workflow, object_info: Mapping[str, Any], page_version: str | None = None
) -> Converted:
    """The workflow as ComfyUI runs it.

    Args:
        page_version: of the page that belongs to the server; None: the newest.
    Raises: WorkflowFileError.
    """
    if workflow.form is Form.API:
        return Converted(workflow.data)
    (found,) = to_api_all([workflow.data], object_info, page_version)
    if isinstance(found, WorkflowFileError):
        raise found
    return found


def to_api_all(
    workflows: Sequence[Mapping[str, Any]],
    object_info: Mapping[str, Any],
    page_version: str | None = None,
) -> list[Converted | WorkflowFileError]:
    """As ``to_api`` for many of the saved-UI form; what cannot be converted is an error in the
    list."""
    classes = {
        name: PageClass(name, info)
        for name, info in object_info.items()
        if isinstance(info, Mapping)
    }
    rules = rules_of(page_version)
    return [_converted_or_error(workflow, classes, rules) for workflow in workflows]


def _converted_or_error(
    data: Mapping[str, Any], classes: Mapping[str, PageClass], rules: Rules
) -> Converted | WorkflowFileError:
    try:
        return _converted(data, classes, rules)
    except WorkflowFileError as error:
        return error
    except RecursionError:
        return WorkflowFileError("the workflow is nested too deeply")


def _converted(
    data: Mapping[str, Any], classes: Mapping[str, PageClass], rules: Rules
) -> Converted:
    saved = read_saved(data, rules.goes_by_list)

    def opened(graph: Graph) -> PageGraph:
        return page_graph(ungrouped(graph, saved.groups, classes), classes, saved.subgraphs)

    pages = {key: opened(graph) for key, graph in saved.subgraphs.items()}
    root = opened(saved.root)
    decided = decide([root, *pages.values()])
    hosts = Hosts(pages, rules)
    for page in (*pages.values(), root):
        _give_primitives(page, hosts)
    placed = placed_nodes(root, pages, hosts, rules)
    prompt = prompt_of(placed, rules)
    _cut_ends(prompt)
    notes = [_LEFT_OUT.format(_named(decided.left_out))] if decided.left_out else []
    broadcasters = tuple(node.saved.named for node in decided.broadcasters)
    return Converted(prompt, tuple(notes), tuple(map(_named_node, placed)), broadcasters)


def _named_node(item: Placed) -> NamedNode:
    named = item.node.saved.properties.get(SEARCH_NAME)
    if not isinstance(named, str):
        # The page gives one to each class of the server but those that it fills texts into.
        is_plain = item.node.kind is Kind.REAL and item.node.saved.type not in SAVERS
        named = item.node.saved.type if is_plain else None
    values = {valued.name: valued.value for valued in item.widgets if valued.name}
    if item.node.kind is Kind.PRIMITIVE and isinstance(item.node.saved.values, list):
        values = dict(zip(("value",), item.node.saved.values, strict=False))
    return NamedNode(item.id, (named, item.node.title), values)


def _give_primitives(page: PageGraph, hosts: Hosts) -> None:
    for target, slot, value in primitive_values(page):
        if target.kind is Kind.SUBGRAPH:
            hosts.values_of(target).own[slot.name] = value
        elif slot.widget is not None:
            set_value(target.widgets, slot.widget, value)


def _cut_ends(prompt: dict[str, Any]) -> None:
    for node in prompt.values():
        inputs = node["inputs"]
        for name in [n for n, v in inputs.items() if isinstance(v, list) and v[0] not in prompt]:
            del inputs[name]


def _named(nodes: Sequence[PageNode]) -> str:
    return some_of([f"node {node.saved.named}" for node in nodes])
