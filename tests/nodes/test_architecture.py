"""The rooms of the adapter and of the tools: who may import whom. CONTRIBUTING draws them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = {
    "nodes": [
        {"background", "default_budget"},
        {"models"},
        {"requests"},
        {"runs"},
        {"http", "comfyui"},
        {"graph"},
        {"extension"},
    ],
    "nodes/headless": [
        {"errors", "interrupts", "text"},
        {"client", "workflow", "plan"},
        {"convert"},
        {"cli"},
    ],
}
"""From the ground up. What stands on one floor does not know its neighbours."""
COMFYUI = {"comfy", "comfy_execution", "comfy_extras", "execution", "folder_paths", "server"}
CORE_DOORS = {"values", "plan", "host", "device", "run", "sleep"}


def files(*tops: str) -> list[Path]:
    found = [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]
    assert found, f"there is nothing below {tops}"
    return found


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    return (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()


def is_door(name: str, part: ast.ImportFrom) -> bool:
    """Whether what is taken is what a package gives, be it named as a module of it is."""
    door = ROOT / name.replace(".", "/") / "__init__.py"
    if not door.is_file():
        return False
    tree = ast.parse(door.read_text(encoding="utf-8"))
    given = {
        alias.asname or alias.name
        for one in tree.body
        if isinstance(one, ast.ImportFrom)
        for alias in one.names
    }
    return all(alias.name in given for alias in part.names)


def imported(path: Path) -> Iterator[str]:
    """Full names of what a file imports, at whatever place in it; relative ones resolved."""
    package = list(path.relative_to(ROOT).parent.parts)
    for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(part, ast.Import):
            yield from (alias.name for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            start = package[: len(package) - part.level + 1] if part.level else []
            name = ".".join([*start, *filter(None, [part.module])])
            # "from . import a" names modules, "from .a import b" names what is in one.
            inner = [f"{name}.{alias.name}" for alias in part.names]
            modules = [] if is_door(name, part) else [one for one in inner if is_module(one)]
            yield from modules or [name]


def box_of(module: str, top: str) -> str | None:
    """The folder or flat file of ``top`` in which a module lies; None: elsewhere, or top itself."""
    prefix = top.replace("/", ".") + "."
    return module[len(prefix) :].split(".")[0] if module.startswith(prefix) else None


@pytest.mark.parametrize("top", FLOORS)
def test_imports_go_down_only(top: str) -> None:
    floor_of = {box: floor for floor, boxes in enumerate(FLOORS[top]) for box in boxes}
    seen = set()
    for path in files(top):
        own = box_of(module_of(path), top)
        if own is None or (top == "nodes" and own == "headless"):
            continue  # a door, which gives what is in its rooms; a house of its own
        seen.add(own)
        for name in imported(path):
            other = box_of(name, top)
            if other is not None and other != own:
                assert floor_of[other] < floor_of[own], f"{path} imports {name}"
    assert seen == floor_of.keys(), "a room that is not in the picture, or no longer there"


def test_headless_takes_one_file_of_the_adapter() -> None:
    for path in files("nodes/headless"):
        for name in imported(path):
            box = box_of(name, "nodes")
            assert box in (None, "headless", "default_budget"), f"{path} imports {name}"


def test_what_lies_flat_in_nodes_puts_the_rooms_together() -> None:
    flat = {path.stem for path in (ROOT / "nodes").glob("*.py")}
    assert flat == {"__init__", "extension", "background", "default_budget"}


def test_comfyui_is_named_in_one_room() -> None:
    """Its public ``comfy_api`` is for the nodes themselves, and for the list of them."""
    for path in files("nodes"):
        room = box_of(module_of(path), "nodes")
        for name in imported(path):
            first = name.partition(".")[0]
            assert first not in COMFYUI or room == "comfyui", f"{path} imports {name}"
            is_public = first == "comfy_api"
            assert not is_public or room in ("graph", "extension", "comfyui"), f"{path}: {name}"


def test_the_core_is_entered_by_its_doors() -> None:
    for path in files("nodes"):
        for name in imported(path):
            if name.startswith("offload_core"):
                assert name.removeprefix("offload_core.") in CORE_DOORS, f"{path} imports {name}"


def test_torch_cuda_is_left_to_the_core() -> None:
    for path in files("nodes"):
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(part, ast.Attribute) and ast.unparse(part).startswith("torch.cuda")
            assert not named, f"{path}:{getattr(part, 'lineno', 0)}"


def test_private_names_stay_in_their_file() -> None:
    for path in files("nodes", "devtools", "bench"):
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(part, ast.ImportFrom):
                private = [alias.name for alias in part.names if alias.name.startswith("_")]
                assert private in ([], ["__version__"]), f"{path} imports {private}"


def test_nothing_imports_in_a_circle() -> None:
    arrows: dict[str, set[str]] = {}
    everything = files("nodes", "offload_core", "devtools", "bench")
    modules = {module_of(path) for path in everything}
    for path in everything:
        # A door is entered by everybody and gives what is inside: only its rooms can be circles.
        known = {name for name in imported(path) if name in modules}
        arrows[module_of(path)] = known - {module_of(path)}
    circle = a_circle(arrows)
    assert circle is None, " -> ".join(circle or [])


def test_the_tools_know_nothing_of_the_benchmarks() -> None:
    for path in files("devtools"):
        assert not [name for name in imported(path) if name.partition(".")[0] == "bench"], path


def a_circle(arrows: dict[str, set[str]]) -> list[str] | None:
    """Some way from a module back to itself; None where there is none."""
    done: set[str] = set()
    way: list[str] = []

    def visit(module: str) -> list[str] | None:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return None
        way.append(module)
        for other in sorted(arrows.get(module, ())):
            if (found := visit(other)) is not None:
                return found
        done.add(way.pop())
        return None

    for module in sorted(arrows):
        if (found := visit(module)) is not None:
            return found
    return None


def test_a_circle_would_be_found() -> None:
    assert a_circle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert a_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.parametrize(
    ("file", "name"), [("patcher", "CourierPatcher"), ("sleeping", "CoreEntry")]
)
def test_what_a_newer_comfyui_gives_a_method_of_ours_is_taken(file: str, name: str) -> None:
    """Nearly every public method there overrides one of the core's, which grow arguments."""
    tree = ast.parse((ROOT / "nodes" / "comfyui" / f"{file}.py").read_text(encoding="utf-8"))
    (found,) = (part for part in tree.body if isinstance(part, ast.ClassDef) and part.name == name)
    methods = [part for part in found.body if isinstance(part, ast.FunctionDef)]
    ours = {"attachment", "courier_engine", "finish_unload", "leave", "__init__"}
    strict = [
        method.name
        for method in methods
        if method.args.kwarg is None and method.name not in ours and method.name[0] != "_"
    ]
    assert strict == []
