"""A workflow in what programs wrap around it: request bodies, entries of a history. Pure.

ComfyUI's own request has it as ``prompt``; its history and its queue as the third item of a list;
workers that run ComfyUI behind a queue of their own as ``input.workflow`` and under other names, at
times as text. Where it lies says nothing; what it is does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_DEEPEST = 8
_MOST = 20_000
"""Values looked at: a request may carry pictures and lists beside its workflow."""


@dataclass(frozen=True)
class Found:
    """A workflow, and the keys that lead to it."""

    data: dict[str, Any]
    is_api: bool
    path: tuple[str, ...]


def is_api(value: Any) -> bool:
    """Whether it is nodes by their ids, as ComfyUI runs them."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(
        isinstance(n, Mapping) and "class_type" in n and "inputs" in n for n in value.values()
    )


def is_saved(value: Any) -> bool:
    """Whether it is nodes and links, as the page saves them."""
    return isinstance(value, Mapping) and isinstance(value.get("nodes"), list)


def wrapped(value: Any) -> list[Found]:
    """Every workflow in it, the outermost first. One within another is a part of that."""
    return list(_search(value))


def _search(value: Any) -> Iterator[Found]:
    level: list[tuple[tuple[str, ...], Any]] = [((), value)]
    looked_at = 0
    for _ in range(_DEEPEST):
        below: list[tuple[tuple[str, ...], Any]] = []
        for path, item in level:
            looked_at += 1
            if looked_at > _MOST:
                return
            item = _parsed(item)
            if is_api(item) or is_saved(item):
                yield Found(dict(item), is_api(item), path)
            elif isinstance(item, Mapping):
                below += [((*path, str(key)), inner) for key, inner in item.items()]
            elif isinstance(item, list):
                below += [((*path, str(place)), inner) for place, inner in enumerate(item)]
        level = below


def _parsed(item: Any) -> Any:
    if not isinstance(item, str) or item.lstrip()[:1] != "{":
        return item
    try:
        return json.loads(item, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return item
