"""Texts that ComfyUI's page fills in when it queues: ``%date:yyyy%``, ``%Node.widget%``. Pure.

The page fills them into the prefix of what saving nodes write. It looks for ``Node`` among all
nodes of the workflow, those that do not run too: by the name that a node has for this purpose, then
by its title. What was changed by then counts, so this comes after all changes.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PREFIX = "filename_prefix"
SAVERS = frozenset((
    "SaveImage", "SaveVideo", "SaveAnimatedWEBP", "SaveWEBM", "SaveAudio", "SaveAudioMP3",
    "SaveAudioOpus", "SaveAudioAdvanced", "SaveGLB", "Save3DAdvanced", "SaveGaussianSplat",
    "SavePointCloud", "SaveAnimatedPNG", "CLIPSave", "VAESave", "ModelSave", "LoraSave",
    "SaveLatent",
))  # fmt: skip
"""Classes whose prefix the page fills in."""
_TEXT = re.compile(r"%([^%]+)%")
_DATE = re.compile(r"dd?|MM?|hh?|mm?|ss?|yyy?y?")
_NO_FILE_NAME = re.compile(r'[/?<>\\:*|"\x00-\x1f\x7f]')


@dataclass(frozen=True)
class NamedNode:
    """A node of the workflow, as the texts may name it.

    Attributes:
        id: in the prompt; a node that does not run is not there.
        names: its name for this purpose, then its title.
        values: of its widgets.
    """

    id: str
    names: tuple[str | None, str]
    values: Mapping[str, Any] = field(default_factory=dict)


def fill_texts(
    prompt: Mapping[str, Any], nodes: Sequence[NamedNode], now: datetime.datetime
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The prompt with its prefixes filled in, and what there is to say of it."""
    filled, notes = dict(prompt), []
    for node_id, node in prompt.items():
        inputs = node.get("inputs") if isinstance(node, dict) else None
        prefix = inputs.get(PREFIX) if isinstance(inputs, dict) else None
        if node.get("class_type") not in SAVERS or not isinstance(prefix, str) or "%" not in prefix:
            continue
        text = filled_text(prefix, prompt, nodes, now)
        if text != prefix:
            filled[node_id] = {**node, "inputs": {**inputs, PREFIX: text}}
            notes.append(f"node {node_id} ({node['class_type']}): {PREFIX} is {text!r}")
    return filled, tuple(notes)


def filled_text(
    text: str, prompt: Mapping[str, Any], nodes: Iterable[NamedNode], now: datetime.datetime
) -> str:
    """One text. What names nothing stays as it is: ComfyUI itself knows ``%width%`` and others."""
    known = list(nodes)

    def fill(match: re.Match[str]) -> str:
        parts = match[1].split(".")
        if len(parts) != 2:
            # Of a date with points in it, the page takes what stands before the first.
            is_date = parts[0].startswith("date:")
            return date_text(parts[0].removeprefix("date:"), now) if is_date else match[0]
        name, widget = parts
        node = next((n for n in known if n.names[0] == name), None)
        node = node or next((n for n in known if n.names[1] == name), None)
        if node is None:
            return match[0]
        value = _value_of(node, widget, prompt)
        return match[0] if value is None else _NO_FILE_NAME.sub("_", value)

    return _TEXT.sub(fill, text)


def date_text(form: str, now: datetime.datetime) -> str:
    """``yyyy-MM-dd`` and the like: d, M, h, m and s, doubled for two digits, and yy or yyyy."""
    parts = {"d": now.day, "M": now.month, "h": now.hour, "m": now.minute, "s": now.second}

    def written(match: re.Match[str]) -> str:
        found = match[0]
        if found in ("yy", "yyyy"):
            return str(now.year)[2:] if found == "yy" else str(now.year)
        return str(parts[found[0]]).zfill(len(found)) if found[0] in parts else found

    return _DATE.sub(written, form)


def _value_of(node: NamedNode, widget: str, prompt: Mapping[str, Any]) -> str | None:
    """None: it has no such widget."""
    if widget not in node.values:
        return None
    running = prompt.get(node.id)
    inputs = running.get("inputs", {}) if isinstance(running, dict) else {}
    value = inputs.get(widget)
    if widget not in inputs or isinstance(value, list):
        value = node.values[widget]
    return as_text(value)


def as_text(value: Any) -> str:
    """As the page, which is JavaScript, makes a text of a value."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return str(int(value))
    if isinstance(value, list):
        return ",".join(map(as_text, value))
    return value if isinstance(value, str) else json.dumps(value)
