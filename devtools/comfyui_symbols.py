"""Whether the files of a ComfyUI have every symbol that the pack uses. Nothing of it is run.

python -m devtools.comfyui_symbols PATH_OF_COMFYUI
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LIST = ROOT / "nodes" / "comfyui" / "symbols.py"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def wanted() -> Sequence[Any]:
    """The pack's own list: see nodes/comfyui/symbols.py."""
    spec = importlib.util.spec_from_file_location("courier_symbols", _LIST)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return tuple(module.SYMBOLS)


def faults_of(comfyui: Path, symbols: Sequence[Any]) -> list[str]:
    """A line for each symbol that is not there, or does not take what it has to."""
    source = _Source(comfyui)
    return [fault for symbol in symbols if (fault := source.fault_of(symbol))]


class _Source:
    """The modules of one ComfyUI, parsed.

    Threads: one.
    """

    def __init__(self, comfyui: Path) -> None:
        self._comfyui = comfyui
        self._tree_of = functools.lru_cache(maxsize=None)(self._parsed)

    def fault_of(self, symbol: Any) -> str:
        tree = self._tree_of(symbol.module)
        if tree is None:
            return f"{symbol.name}: there is no module {symbol.module}"
        *outer, last = symbol.path.split(".")
        where: ast.AST = tree
        for name in outer:
            found = _named(where, name)
            if not isinstance(found, ast.ClassDef):
                return f"{symbol.name}: there is no class {name}"
            where = found
        found = _method(tree, where, last)
        if found is None and not (symbol.is_field and _sets(tree, where, last)):
            return f"{symbol.name}: it is not there"
        lacks = _lacks(found, symbol.takes)
        return f"{symbol.name}: it does not take {', '.join(lacks)}" if lacks else ""

    def _parsed(self, module: str) -> ast.Module | None:
        base = self._comfyui.joinpath(*module.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None


def _statements(where: ast.AST) -> Iterator[ast.stmt]:
    """Also those that stand in a condition or a try."""
    for statement in getattr(where, "body", []):
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _statements(statement)
            for branch in (getattr(statement, "orelse", []), getattr(statement, "finalbody", [])):
                yield from _statements(ast.Module(branch, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler)


def _named(where: ast.AST, name: str) -> ast.AST | None:
    """What has that name in a module or a class."""
    found: ast.AST | None = None
    for statement in _statements(where):
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [statement.name]
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names = [alias.asname or alias.name for alias in statement.names]
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        if name in names:
            found = statement
    return found


def _bases(tree: ast.Module, where: ast.AST) -> Iterator[ast.AST]:
    yield where
    for base in getattr(where, "bases", []):
        found = _named(tree, base.id) if isinstance(base, ast.Name) else None
        if isinstance(found, ast.ClassDef):
            yield from _bases(tree, found)


def _method(tree: ast.Module, where: ast.AST, name: str) -> ast.AST | None:
    return next((one for w in _bases(tree, where) if (one := _named(w, name)) is not None), None)


def _sets(tree: ast.Module, where: ast.AST, name: str) -> bool:
    """Whether a class writes ``self.NAME``."""
    return any(
        isinstance(part, ast.Attribute) and part.attr == name and isinstance(part.ctx, ast.Store)
        for one in _bases(tree, where)
        for part in ast.walk(one)
    )


def _lacks(found: ast.AST | None, takes: Sequence[str]) -> list[str]:
    if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    arguments = found.args
    if arguments.kwarg is not None:
        return []
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    names = {argument.arg for argument in every}
    return [name for name in takes if name not in names]


def main(words: list[str]) -> int:
    if len(words) != 1 or not (Path(words[0]) / "main.py").is_file():
        sys.stderr.write(f"{__doc__}\n")
        return 2
    symbols = wanted()
    faults = faults_of(Path(words[0]), symbols)
    for fault in faults:
        sys.stdout.write(f"{fault}\n")
    sys.stdout.write(f"{len(symbols) - len(faults)} of {len(symbols)} symbols are there\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
