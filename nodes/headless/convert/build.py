"""The prompt out of the nodes of the page: what runs, with its values and links. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..workflow.texts import as_text
from .hosts import Hosts
from .page import Kind, Level, PageGraph, PageNode
from .page_class import UNDEFINED
from .resolve import Given, Origin, Resolver
from .rules import Rules
from .saved import BYPASSED, MUTED
from .values import Valued, set_value

_DEEPEST = 50
_COMMENT = re.compile(r"/\*[\s\S]*?\*/|//.*")
_ESCAPED = re.compile(r"\\([{}|])")


@dataclass(frozen=True)
class Placed:
    """A node at the level that it is used at, with the widgets that it has there."""

    level: Level
    node: PageNode
    widgets: list[Valued]

    @property
    def id(self) -> str:
        return self.level.id_of(self.node.id)


def placed_nodes(
    root: PageGraph, pages: Mapping[str, PageGraph], hosts: Hosts, rules: Rules
) -> list[Placed]:
    """Every node at every level, those that do not run too."""
    return list(_placed(Level(root), pages, hosts, rules))


def _placed(
    level: Level, pages: Mapping[str, PageGraph], hosts: Hosts, rules: Rules
) -> Iterator[Placed]:
    for node in level.page.nodes.values():
        widgets = [Valued(valued.widget, valued.value) for valued in node.widgets]
        for (node_id, name), value in level.inner_values.items():
            if node_id == node.id:
                set_value(widgets, name, value)
        yield Placed(level, node, widgets)
        inside = pages.get(node.saved.type) if node.kind is Kind.SUBGRAPH else None
        does_run = node.saved.mode not in (MUTED, BYPASSED) or rules.runs_what_is_in_muted
        if inside is not None and does_run and len(level.path) < _DEEPEST:
            found = hosts.values_of(node)
            own = dict(found.own)
            for (node_id, name), value in level.inner_values.items():
                if node_id == node.id and name in own:
                    own[name] = value
            below = Level(inside, (*level.path, node.id), node, level, own, found.inner)
            yield from _placed(below, pages, hosts, rules)


def prompt_of(placed: list[Placed], rules: Rules) -> dict[str, Any]:
    """The nodes that run, in API form."""
    resolver = Resolver(rules)
    for item in placed:
        resolver.add(item.level)
    prompt = {}
    for item in placed:
        runs = item.node.kind in (Kind.REAL, Kind.UNKNOWN)
        if runs and item.node.saved.mode not in (MUTED, BYPASSED):
            prompt[item.id] = {
                "inputs": _inputs_of(item, resolver),
                "class_type": item.node.saved.type,
                "_meta": {"title": item.node.title},
            }
    return prompt


def _inputs_of(item: Placed, resolver: Resolver) -> dict[str, Any]:
    inputs = {
        valued.name: _written(valued)
        for valued in item.widgets
        if valued.widget.is_sent and valued.value is not UNDEFINED
    }
    for slot in item.node.inputs:
        source = resolver.source(item.level, item.node, slot)
        if isinstance(source, Origin):
            inputs[slot.name] = [source.node_id, source.slot]
        elif isinstance(source, Given) and source.value is not UNDEFINED:
            inputs[slot.name] = _value(source.value)
    return inputs


def _written(valued: Valued) -> Any:
    value = valued.value
    if valued.widget.is_dynamic_text and isinstance(value, str):
        return dynamic_text(value)
    if valued.widget.is_text_area and not isinstance(value, (list, dict)):
        return as_text(value)  # the page's field holds nothing else
    if valued.widget.type == "CURVE" and isinstance(value, (list, dict)):
        return {"__type__": "CURVE", "__value__": value}
    return _value(value)


def _value(value: Any) -> Any:
    """A list that is a value must not be taken for a link."""
    return {"__value__": value} if isinstance(value, list) else value


def dynamic_text(text: str) -> str:
    """``{a|b}`` is one of the two, drawn anew each time; comments go."""
    text = _COMMENT.sub("", text)
    made, place = "", 0
    while place < len(text):
        if text[place] == "\\":
            made += text[place : place + 2]
            place += 2
        elif text[place] == "{":
            choices, place = _choices(text, place + 1)
            made += dynamic_text(random.choice(choices))
        else:
            made += text[place]
            place += 1
    return _ESCAPED.sub(r"\1", made)


def _choices(text: str, place: int) -> tuple[list[str], int]:
    """What stands between the braces, and the place after them."""
    choices, depth = [""], 0
    while place < len(text):
        letter = text[place]
        step = 2 if letter == "\\" else 1
        if letter == "}" and not depth:
            return choices, place + 1
        if letter == "|" and not depth:
            choices.append("")
        else:
            depth += {"{": 1, "}": -1}.get(letter, 0)
            choices[-1] += text[place : place + step]
        place += step
    return choices, place
