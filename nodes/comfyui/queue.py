"""ComfyUI's own queue, for runs: prompts in, their place and their end out. Nothing is replaced."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import comfy.model_management
import execution
from comfy_execution.progress import NodeState, get_progress_state

import nodes as comfy_nodes

from ..models.registry import get_service
from ..models.status_json import status_json
from ..runs.paths import all_without_paths, without_paths
from ..runs.records import Look, Outcome, Place, PromptRefusedError, RunError, RunOrder, Steps
from ..runs.run_json import model_summary, plain
from ..runs.state import names_of
from .compat import require
from .host import prompt_queue, server
from .symbols import Part

_CLIENT_ID = "courier-runs"
"""Nobody's: what ComfyUI tells a client by its socket goes nowhere."""
_ID, _PROMPT = 1, 2
"""Places in an entry of the queue: (number, id, prompt, extra data, outputs, secrets)."""


class ComfyQueue:
    """See ``runs.records.RunHost``."""

    async def submit(self, prompt_id: str, order: RunOrder) -> None:
        """As ComfyUI's own POST /prompt does it: announced, checked, put into the queue."""
        require(Part.RUNS)
        instance = server()
        if instance is None:
            raise PromptRefusedError("ComfyUI runs without a server here", {})
        # Without a client, ComfyUI keeps back what nodes in its cache showed, pictures included.
        extra: dict[str, Any] = {"client_id": _CLIENT_ID}
        if order.workflow is not None:
            extra["extra_pnginfo"] = {"workflow": order.workflow}
        body = {"prompt": order.queued_prompt, "prompt_id": prompt_id, "extra_data": extra}
        try:
            prompt = instance.trigger_on_prompt(body)["prompt"]
            replacements = getattr(instance, "node_replace_manager", None)
            if replacements is not None:  # newer than 0.3.75: nodes that have got another name
                replacements.apply_replacements(prompt)
            valid = await execution.validate_prompt(prompt_id, prompt, None)
        except Exception as error:
            # What it does not expect in a prompt ends it in many ways.
            kind = type(error).__name__
            text = without_paths(f"ComfyUI cannot check it ({kind}: {error})")
            raise PromptRefusedError(text, {}) from error
        # Also where only one of several outputs is wrong: a half of a workflow is not what was
        # asked for.
        if not valid[0] or valid[3]:
            text = without_paths(_refusal_text(valid[1], valid[3], prompt))
            raise PromptRefusedError(text, all_without_paths(plain(valid[3])))
        extra["create_time"] = int(time.time() * 1000)
        number = instance.number
        instance.number += 1
        instance.prompt_queue.put((number, prompt_id, prompt, extra, valid[2], {}))

    def look(self, prompt_ids: Sequence[str]) -> dict[str, Look]:
        """See RunHost."""
        queue = prompt_queue()
        with queue.mutex:
            running = {item[_ID] for item in queue.currently_running.values()}
            queued = sorted(queue.queue)
            entries = {i: queue.history[i] for i in prompt_ids if i in queue.history}
        places = {item[_ID]: place for place, item in enumerate(queued)}
        looks = {}
        for prompt_id in prompt_ids:
            if prompt_id in running:
                looks[prompt_id] = Look(Place.RUNNING)
            elif prompt_id in places:
                looks[prompt_id] = Look(Place.QUEUED, places[prompt_id] + len(running))
            elif prompt_id in entries:
                looks[prompt_id] = Look(Place.ENDED, outcome=_read_outcome(entries[prompt_id]))
            else:
                looks[prompt_id] = Look(Place.GONE)
        return looks

    def steps(self, prompt_id: str) -> Steps | None:
        """From where ComfyUI keeps what its page shows."""
        progress = get_progress_state()
        if progress.prompt_id != prompt_id:
            return None
        done, current = 0, None
        # A copy: the thread that runs prompts adds to it meanwhile.
        for node_id, state in list(progress.nodes.items()):
            done += state["state"] is NodeState.Finished
            if state["state"] is NodeState.Running:
                current = node_id, int(state["value"]), max(1, int(state["max"]))
        return Steps(nodes_done=done) if current is None else Steps(*current, nodes_done=done)

    def stop(self, prompt_id: str) -> None:
        """Check and act under the queue's own lock: no other prompt can begin meanwhile, and what
        is interrupted is the one that runs."""
        queue = prompt_queue()
        with queue.mutex:
            queue.delete_queue_item(lambda item: item[_ID] == prompt_id)
            if any(item[_ID] == prompt_id for item in queue.currently_running.values()):
                comfy_nodes.interrupt_processing()


def look_at_models() -> tuple[tuple[dict[str, Any], ...], int | None]:
    """See ``runs.service.ModelsProbe``."""
    record = get_service().status()
    used = None
    device = record.device
    is_card = comfy.model_management.get_torch_device().type != "cpu"
    if is_card and device.total_bytes is not None and device.free_bytes is not None:
        used = device.total_bytes - device.free_bytes
    return tuple(model_summary(model) for model in status_json(record)["models"]), used


def _read_outcome(entry: dict[str, Any]) -> Outcome:
    """What nodes showed may be anything, and none of it may keep a run from ending."""
    try:
        return _outcome(entry)
    except Exception as error:
        text = f"what it showed cannot be read ({type(error).__name__}); see ComfyUI's history"
        return Outcome({}, RunError("unknown", text))


def _outcome(entry: dict[str, Any]) -> Outcome:
    status = entry.get("status") or {}
    outputs = plain(entry.get("outputs") or {})
    if status.get("status_str") == "success":
        return Outcome(outputs)
    prompt = entry["prompt"][_PROMPT]
    for name, data in status.get("messages") or []:
        if name == "execution_error":
            return Outcome(outputs, _node_error(prompt, data))
        if name == "execution_interrupted":
            text = "it was interrupted, by somebody else"
            error = _error_at("interrupted", text, prompt, data.get("node_id"))
            return Outcome(outputs, error, interrupted=True)
    return Outcome(outputs, RunError("unknown", "it ended with an error that ComfyUI did not keep"))


def _node_error(prompt: dict[str, Any], data: dict[str, Any]) -> RunError:
    text = without_paths(str(data.get("exception_message") or "").strip())
    # With the folder of the pack in front of it, where it is one of a pack.
    kind = str(data.get("exception_type") or "an error").rpartition(".")[2]
    return _error_at("node_failed", text or kind, prompt, data.get("node_id"), kind)


def _error_at(
    code: str, text: str, prompt: dict[str, Any], node_id: Any, kind: str | None = None
) -> RunError:
    class_type, title = names_of(prompt, str(node_id))
    return RunError(code, text, None if node_id is None else str(node_id), class_type, title, kind)


def _refusal_text(error: Any, node_errors: dict[str, Any], prompt: dict[str, Any]) -> str:
    """Every fault that ComfyUI found, a line each."""
    lines = []
    for node_id, found in node_errors.items():
        class_type, title = names_of(prompt, str(node_id))
        name = class_type if title == class_type else f"{class_type} {title!r}"
        # What a node's own check refuses is told once for each of its inputs.
        told = dict.fromkeys(_fault_text(fault) for fault in found.get("errors", []))
        lines += [f"node {node_id} ({name}): {text}" for text in told]
    if not lines and isinstance(error, dict):
        lines = [": ".join(str(error[k]) for k in ("message", "details") if error.get(k))]
    return "ComfyUI refuses the workflow: " + "; ".join(lines or [str(error)])


def _fault_text(fault: dict[str, Any]) -> str:
    message, details = str(fault.get("message")), str(fault.get("details"))
    _, dash, reason = details.partition(" - ")
    return reason if dash and "is asleep" in reason else f"{message}: {details}"
