"""The rooms: imports go down only, doors are complete, and importing does nothing."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "offload_core"
ROOMS = ["values", "plan", "host", "device", "run", "sleep"]
FOREIGN = {"comfy", "comfy_api", "folder_paths", "server", "nodes", "aiohttp", "execution"}


def files() -> Iterator[Path]:
    yield from sorted(CORE.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, relative ones resolved."""
    package = ["offload_core", *path.relative_to(CORE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*start, *filter(None, [node.module])])


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down_only(room: str) -> None:
    allowed = ROOMS[: ROOMS.index(room) + 1]
    for path in sorted((CORE / room).rglob("*.py")):
        for name in imported(path):
            first, _, rest = name.partition(".")
            assert first not in FOREIGN, f"{path} imports {name}"
            if first == "offload_core":
                assert rest.split(".")[0] in allowed, f"{path} imports {name}"


def test_the_plan_is_arithmetic() -> None:
    named = {name.split(".")[0] for path in (CORE / "plan").glob("*.py") for name in imported(path)}
    allowed = {"__future__", "collections", "dataclasses", "functools", "itertools"}
    assert named <= allowed | {"torch", "offload_core"}
    torch_users = {
        path.name
        for path in (CORE / "plan").glob("*.py")
        if any(name.split(".")[0] == "torch" for name in imported(path))
    }
    assert torch_users == {"blocks.py"}


def test_torch_cuda_is_named_in_one_file() -> None:
    named = {
        str(path.relative_to(CORE))
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr == "cuda"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    }
    assert named == {"device/cuda.py"}


def test_private_names_stay_in_their_file() -> None:
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                private = [a.name for a in node.names if a.name.startswith("_")]
                assert not private, f"{path} imports {private}"


@pytest.mark.parametrize("room", ROOMS)
def test_every_door_lists_exactly_what_it_gives_sorted(room: str) -> None:
    package = importlib.import_module(f"offload_core.{room}")
    tree = ast.parse((CORE / room / "__init__.py").read_text())
    given = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    given |= {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert set(package.__all__) == given
    # Constants, then classes, then functions: as the linter sorts them.
    ranks = [(not name.isupper(), not name[0].isupper(), name) for name in package.__all__]
    assert ranks == sorted(ranks)


def test_importing_the_core_starts_no_thread_and_says_nothing() -> None:
    code = (
        "import threading, warnings; warnings.simplefilter('error'); import torch, psutil;"
        "before = threading.active_count(), torch.is_grad_enabled();"
        "import offload_core.run, offload_core.device;"
        "assert before == (threading.active_count(), torch.is_grad_enabled());"
        "assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CORE.parent, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
