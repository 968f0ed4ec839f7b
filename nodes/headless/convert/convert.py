"""From the saved-UI form to the API form: what comfy-cli does, and where we help it.

Each help has a test that shows the difference to what ComfyUI's own page exports.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import WorkflowFileError
from ..workflow.load import Form, Workflow
from .converter import Converted, convert_all
from .passing import cut_dead_ends
from .widgets import hide_objects, primitive_values, set_primitives, show_objects

_LINK_FIELDS = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
_GROUP_PREFIXES = ("workflow>", "workflow/")


def to_api(workflow: Workflow, object_info: Mapping[str, Any]) -> Converted:
    """The workflow as ComfyUI runs it.

    Raises: WorkflowFileError, ConverterMissingError.
    """
    if workflow.form is Form.API:
        return Converted(workflow.data, ())
    (found,) = to_api_all([workflow.data], object_info)
    if isinstance(found, WorkflowFileError):
        raise found
    return found


def to_api_all(
    workflows: Sequence[Mapping[str, Any]], object_info: Mapping[str, Any]
) -> list[Converted | WorkflowFileError]:
    """As ``to_api`` for many of the saved-UI form; what cannot be converted is an error in the
    list.

    Raises: ConverterMissingError.
    """
    ready = [_prepared_or_error(workflow) for workflow in workflows]
    given = [item for item in ready if not isinstance(item, WorkflowFileError)]
    converted = iter(convert_all(given, without_socket_defaults(object_info)) if given else ())
    return [
        item if isinstance(item, WorkflowFileError) else _finished(item, next(converted))
        for item in ready
    ]


def _prepared_or_error(workflow: Mapping[str, Any]) -> dict[str, Any] | WorkflowFileError:
    try:
        return prepared(workflow)
    except WorkflowFileError as error:
        return error


def prepared(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that comfy-cli's converter takes as the page would.

    Raises: WorkflowFileError for what it would leave out in silence.
    """
    try:
        ready = copy.deepcopy(dict(workflow))
    except RecursionError:
        raise WorkflowFileError("the workflow is nested too deeply") from None
    graphs = [ready, *_subgraphs(ready)]
    if not ready.get("nodes"):
        raise WorkflowFileError("the workflow has no nodes")
    _refuse_group_nodes(graphs)
    ready["links"] = [_as_list(link) for link in ready.get("links") or []]
    for graph in graphs:
        for node in _nodes(graph):
            hide_objects(node)
        cut_dead_ends(graph)
    return ready


def _finished(
    workflow: Mapping[str, Any], converted: Converted | WorkflowFileError
) -> Converted | WorkflowFileError:
    if isinstance(converted, Converted):
        show_objects(converted.prompt)
        set_primitives(converted.prompt, primitive_values(workflow))
    return converted


def without_socket_defaults(object_info: Mapping[str, Any]) -> dict[str, Any]:
    """comfy-cli fills in the default of an optional input that is a socket only (``forceInput``);
    the page sends nothing there."""
    return {name: _without_socket_defaults(info) for name, info in object_info.items()}


def _without_socket_defaults(info: Any) -> Any:
    optional = info.get("input", {}).get("optional") if isinstance(info, dict) else None
    if not isinstance(optional, dict) or not any(map(_is_socket_with_default, optional.values())):
        return info
    plain = {
        name: [spec[0], {k: v for k, v in spec[1].items() if k != "default"}]
        if _is_socket_with_default(spec)
        else spec
        for name, spec in optional.items()
    }
    return {**info, "input": {**info["input"], "optional": plain}}


def _is_socket_with_default(spec: Any) -> bool:
    if not isinstance(spec, list) or len(spec) < 2 or not isinstance(spec[1], dict):
        return False
    return bool(spec[1].get("forceInput")) and "default" in spec[1]


def _subgraphs(workflow: Mapping[str, Any]) -> list[dict[str, Any]]:
    definitions = workflow.get("definitions")
    found = definitions.get("subgraphs") if isinstance(definitions, dict) else None
    return [graph for graph in found or [] if isinstance(graph, dict)]


def _nodes(graph: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [node for node in graph.get("nodes") or [] if isinstance(node, dict)]


def _as_list(link: Any) -> Any:
    """A newer schema of the saved form has links as objects; comfy-cli reads lists only."""
    return [link.get(name) for name in _LINK_FIELDS] if isinstance(link, dict) else link


def _refuse_group_nodes(graphs: Sequence[Mapping[str, Any]]) -> None:
    groups = [
        f"{node.get('id')} ({node['type']})"
        for graph in graphs
        for node in _nodes(graph)
        if str(node.get("type")).startswith(_GROUP_PREFIXES)
    ]
    if groups:
        raise WorkflowFileError(
            f"the workflow has group nodes of an older ComfyUI: node {', node '.join(groups)}; "
            "open it in ComfyUI, right-click each and choose Convert to nodes, and save it again, "
            "or export it with File > Export (API)"
        )
