"""Changes to a workflow in API form: values, seeds, Courier's loaders and budgets. Pure."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from ..text import some_of
from .graph import Node, read_nodes
from .loaders import LOADERS, knows_courier, left_alone
from .nearest import nearest_choices
from .schema import Catalog, InputSpec, is_link
from .values import match_choice

SEEDS = ("seed", "noise_seed")
RANDOM = "random"
BUDGET_CLASS, BUDGET_INPUT = "CourierBudget", "budget"
_BUDGET_NODE = "courier_budget"
_SEED_LIMIT = 1 << 48
"""What the page draws seeds from has about as many bits, and JavaScript reads them exactly."""
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class BudgetChoice:
    """GiB of the card and of RAM for all Courier nodes. None: automatic."""

    vram_gib: float | None = None
    host_gib: float | None = None
    together: bool = False


@dataclass(frozen=True)
class Changes:
    """What to change, in this order: loaders, budgets, seeds, values.

    Attributes:
        values: texts such as ``KSampler.seed=7`` or ``6.text=a cat``.
        seed: a number, ``random``, or None: as it is.
    """

    values: Sequence[str] = ()
    seed: str | None = None
    budget: BudgetChoice | None = None
    courier: bool = False

    @property
    def any(self) -> bool:
        """Whether there is something to change."""
        return bool(self.values) or self.seed is not None or self.courier or bool(self.budget)


@dataclass
class Changed:
    """A workflow with what was done to it, in words."""

    prompt: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def change_workflow(prompt: Mapping[str, Any], changes: Changes, catalog: Catalog) -> Changed:
    """The workflow, changed; the one that was given stays as it is.

    Raises: UsageError naming what cannot be meant, and what could.
    """
    changed = Changed({i: _copy(node) for i, node in prompt.items()})
    if changes.courier:
        _use_courier(changed, catalog)
    if changes.budget is not None:
        _set_budget(changed, changes.budget, changes.courier)
    if changes.seed is not None:
        _set_seeds(changed, changes.seed, catalog)
    for text in changes.values:
        _set_value(changed, text, catalog)
    return changed


def _copy(node: Any) -> Any:
    if isinstance(node, dict) and isinstance(node.get("inputs"), dict):
        return {**node, "inputs": dict(node["inputs"])}
    return node


def _nodes(changed: Changed) -> dict[str, Node]:
    return read_nodes(changed.prompt)[0]


def _use_courier(changed: Changed, catalog: Catalog) -> None:
    for node in _nodes(changed).values():
        ours = LOADERS.get(node.class_type)
        if ours is None:
            continue
        if not knows_courier(catalog):
            raise UsageError(
                f"--courier puts {ours} in the place of node {node.name}, and this ComfyUI has no "
                "such node: install ComfyUI-Courier there, or a newer one"
            )
        if catalog.get(ours) is None:
            continue  # an older Courier; the loader is named below
        changed.prompt[node.id]["class_type"] = ours
        changed.notes.append(f"node {node.name} is loaded by {ours}")
    nodes = _nodes(changed).values()
    left = list(left_alone(nodes, catalog))
    changed.notes += left
    if not left and not any(node.class_type in LOADERS.values() for node in nodes):
        raise UsageError(
            f"--courier finds nothing to replace: it knows {', '.join(LOADERS)}, and the workflow "
            "has none of them"
        )


def _set_budget(changed: Changed, budget: BudgetChoice, was_asked_for_loaders: bool) -> None:
    loaders = [n for n in _nodes(changed).values() if n.class_type in LOADERS.values()]
    if not loaders and was_asked_for_loaders:
        changed.notes.append("the budget holds for nothing: no loader of the workflow is Courier's")
        return
    if not loaders:
        raise UsageError(
            "a budget is for Courier's loaders, and the workflow has none; with --courier they "
            "take the place of ComfyUI's own"
        )
    # What is not said stays as the workflow has it.
    vram_gib = _figure(changed, loaders, "vram_gib", budget.vram_gib)
    host_gib = _figure(changed, loaders, "host_gib", budget.host_gib)
    inputs = {
        "preset": "custom",
        # To the node, 0 is automatic, and -1 for RAM.
        "vram_gib": 0.0 if vram_gib is None else vram_gib,
        "host_gib": -1.0 if host_gib is None else host_gib,
        "applies_to": "all models together" if budget.together else "each model",
    }
    node_id = _free_id(changed.prompt)
    changed.prompt[node_id] = {
        "class_type": BUDGET_CLASS,
        "inputs": inputs,
        "_meta": {"title": "Courier Budget"},
    }
    for node in loaders:
        changed.prompt[node.id]["inputs"][BUDGET_INPUT] = [node_id, 0]
    names = ", ".join(node.name for node in loaders)
    card, ram = _gib_text(vram_gib), _gib_text(host_gib)
    changed.notes.append(f"node {names}: card {card}, RAM {ram}")


def _figure(
    changed: Changed, loaders: Sequence[Any], name: str, chosen: float | None
) -> float | None:
    """The figure that was chosen, or the one that all loaders have from a typed budget of theirs;
    None, automatic, where they have none or do not agree."""
    if chosen is not None:
        return chosen
    found: set[float | None] = set()
    for loader in loaders:
        link = changed.prompt[loader.id]["inputs"].get(BUDGET_INPUT)
        node = changed.prompt.get(str(link[0])) if isinstance(link, list) and link else None
        inputs = node["inputs"] if node and node.get("class_type") == BUDGET_CLASS else {}
        value = inputs.get(name) if inputs.get("preset") == "custom" else None
        is_figure = isinstance(value, (int, float)) and not isinstance(value, bool)
        # To the node, 0 is automatic for the card, and -1 for RAM.
        automatic = value == 0 if name == "vram_gib" else is_figure and value < 0
        found.add(float(value) if is_figure and not automatic else None)
    return found.pop() if len(found) == 1 else None


def _gib_text(gib: float | None) -> str:
    return "automatic" if gib is None else f"{gib:g} GiB"


def _free_id(prompt: Mapping[str, Any]) -> str:
    number = 1
    while (name := _BUDGET_NODE if number == 1 else f"{_BUDGET_NODE}_{number}") in prompt:
        number += 1
    return name


def _set_seeds(changed: Changed, text: str, catalog: Catalog) -> None:
    seed = secrets.randbelow(_SEED_LIMIT) if text == RANDOM else _whole(text, "--seed")
    found = [
        (node, name)
        for node in _nodes(changed).values()
        for name, value in node.inputs.items()
        if name in SEEDS and not is_link(value)
    ]
    if not found:
        raise UsageError("--seed finds no seed: no node has an input seed or noise_seed of its own")
    for node, name in found:
        changed.prompt[node.id]["inputs"][name] = seed
    names = ", ".join(node.name for node, _ in found)
    changed.notes.append(f"seed {seed}: node {names}")


def _whole(text: str, option: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{option} has to be a whole number or {RANDOM}, not {text!r}") from None


def _set_value(changed: Changed, text: str, catalog: Catalog) -> None:
    target, equals, value = text.partition("=")
    if not equals or "." not in target:
        raise UsageError(
            f"--set {text!r} has to be NODE.INPUT=VALUE, where NODE is an id, a title or a class: "
            '--set "KSampler.seed=7"'
        )
    nodes = _nodes(changed)
    found = next(_matches(nodes, target, catalog), None)
    if found is None:
        raise UsageError(f"--set {text!r}: {_no_match(nodes, target, catalog)}")
    matched, name = found
    for node in matched:
        spec = _spec(node, name, catalog)
        new = _parsed(value, spec, node.inputs.get(name), f"--set {text!r}")
        if is_link(node.inputs.get(name)):
            origin = node.inputs[name][0]
            changed.notes.append(f"node {node.name}: {name} no longer comes from node {origin}")
        changed.prompt[node.id]["inputs"][name] = new
        changed.notes.append(f"node {node.name}: {name} is {new!r}")


def _matches(
    nodes: Mapping[str, Node], target: str, catalog: Catalog
) -> Iterator[tuple[list[Node], str]]:
    """Every reading of ``target``: titles and names of inputs may have dots in them."""
    for node_name, name in _splits(target):
        for named in _named(nodes, node_name):
            matched = [node for node in named if _has_input(node, name, catalog)]
            if matched:
                yield matched, name


def _splits(target: str) -> Iterator[tuple[str, str]]:
    parts = target.split(".")
    for place in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:place]), ".".join(parts[place:])


def _named(nodes: Mapping[str, Node], name: str) -> Iterator[list[Node]]:
    if name in nodes:
        yield [nodes[name]]
    ways: Sequence[Callable[[Node], bool]] = (
        lambda node: node.title == name,
        lambda node: node.class_type == name,
    )
    for is_meant in ways:
        found = [node for node in nodes.values() if is_meant(node)]
        if found:
            yield found


def _has_input(node: Node, name: str, catalog: Catalog) -> bool:
    schema = catalog.get(node.class_type)
    if name in node.inputs:
        return True
    return schema is not None and (name in schema.inputs or schema.has_open_inputs)


def _no_match(nodes: Mapping[str, Node], target: str, catalog: Catalog) -> str:
    for node_name, name in _splits(target):
        for node, *_ in _named(nodes, node_name):
            schema = catalog.get(node.class_type)
            names = list(dict.fromkeys([*node.inputs, *(schema.inputs if schema else ())]))
            near = nearest_choices(name, names) or names
            return f"node {node.name} has no input {name!r}; it has {', '.join(near)}"
    node_name = target.rpartition(".")[0]
    names = [n for node in nodes.values() for n in (node.id, node.title, node.class_type)]
    near = nearest_choices(node_name, names)
    there = ", ".join(near) if near else some_of([node.name for node in nodes.values()])
    return f"no node has the id, title or class {node_name!r}; there is {there}"


def _spec(node: Node, name: str, catalog: Catalog) -> InputSpec | None:
    schema = catalog.get(node.class_type)
    return None if schema is None else schema.inputs.get(name)


def _parsed(text: str, spec: InputSpec | None, before: Any, option: str) -> Any:
    kind = spec.type if spec is not None else _type_of(before)
    if kind in ("INT", "FLOAT"):
        try:
            return int(text) if kind == "INT" else float(text)
        except ValueError:
            what = "a whole number" if kind == "INT" else "a number"
            raise UsageError(f"{option}: that input takes {what}") from None
    if kind == "BOOLEAN":
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise UsageError(f"{option}: that input takes true or false")
    if spec is not None and spec.choices is not None:
        return _choice(text, spec, option)
    if kind == "STRING" or spec is None:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _choice(text: str, spec: InputSpec, option: str) -> Any:
    choices = spec.choices or ()
    by_text = {str(choice): choice for choice in choices}
    found = by_text.get(text, match_choice(text, choices))
    if found is None and not spec.is_upload:
        near = nearest_choices(text, choices)
        there = ", ".join(near) if near else some_of([str(choice) for choice in choices])
        raise UsageError(f"{option}: this ComfyUI does not offer that; there is {there}")
    return text if found is None else found


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "BOOLEAN"
    if isinstance(value, int):
        return "INT"
    return "FLOAT" if isinstance(value, float) else "STRING"
