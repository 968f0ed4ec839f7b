"""In an older or a newer ComfyUI the nodes come up, and what cannot work says what is missing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from devtools.comfyui_symbols import faults_of, wanted

from ..nodes.conftest import Pack, load_pack

SCRIPT = Path(__file__).parent / "scripts" / "missing_symbols.py"
SYMBOLS = wanted()
NAMES = [symbol.name for symbol in SYMBOLS]


@pytest.fixture(scope="module")
def pack() -> Pack:
    return load_pack()


@pytest.fixture(scope="module")
def compat(pack: Pack) -> Any:
    return pack.module("nodes.comfyui.compat")


def is_class(symbol: Any) -> bool:
    return any(
        other.module == symbol.module and other.path.startswith(f"{symbol.path}.")
        for other in SYMBOLS
    )


def fake_tree(left_out: Any = None, without: str = "") -> dict[str, Any]:
    """Modules that have every symbol but one, or one that lacks an argument."""
    tree: dict[str, Any] = {}
    for symbol in SYMBOLS:
        module = tree.setdefault(symbol.module, ModuleType(symbol.module))
        *outer, last = symbol.path.split(".")
        owner: Any = module
        for name in outer:
            if not hasattr(owner, name):
                setattr(owner, name, type(name, (), {}))
            owner = getattr(owner, name)
        if symbol == left_out and not without:
            continue
        if symbol.is_field:
            # As a method that sets it on its object.
            made: dict[str, Any] = {}
            exec(f"def sets_{last}(self): self.{last} = 1", made)
            setattr(owner, f"sets_{last}", made[f"sets_{last}"])
        elif is_class(symbol):
            if not hasattr(owner, last):
                setattr(owner, last, type(last, (), {}))
        else:
            takes = [name for name in symbol.takes if (symbol, name) != (left_out, without)]
            made = {}
            exec(f"def {last}({', '.join(takes)}): pass", made)
            setattr(owner, last, made[last])
    return tree


def of(compat: Any, tree: dict[str, Any], version: str = "0.3.75") -> Any:
    return compat.compare(compat.SYMBOLS, tree.__getitem__, version)


def test_where_all_is_there_nothing_is_said(compat: Any) -> None:
    found = of(compat, fake_tree())
    assert (found.problems, found.sentence()) == ((), "")
    for part in compat.Part:
        found.require(part)


@pytest.mark.parametrize("symbol", SYMBOLS, ids=NAMES)
def test_each_symbol_that_is_gone_is_named_where_it_is_needed(
    compat: Any, pack: Pack, symbol: Any
) -> None:
    tree = fake_tree(symbol)
    if is_class(symbol):
        delattr(tree[symbol.module], symbol.path)
    found = of(compat, tree)
    assert symbol.name in [problem.symbol.name for problem in found.problems]
    assert symbol.name in found.sentence()
    error = pack.module("nodes.requests.records").NotWithThisComfyError
    for part in symbol.parts:
        with pytest.raises(error, match=re.escape(symbol.name)) as caught:
            found.require(compat.Part[part.name])
        assert str(caught.value).startswith(part.value)


@pytest.mark.parametrize(
    ("symbol", "argument"),
    [(symbol, argument) for symbol in SYMBOLS for argument in symbol.takes],
    ids=lambda value: getattr(value, "name", value),
)
def test_each_argument_that_is_gone_is_named(compat: Any, symbol: Any, argument: str) -> None:
    (problem,) = of(compat, fake_tree(symbol, argument)).problems
    assert str(problem) == f"{symbol.name}({argument})"


def test_whatever_keyword_is_taken_does(compat: Any) -> None:
    symbol = compat.Symbol("m", "f", (compat.Part.LOAD,), ("a", "b"))
    tree = {"m": SimpleNamespace(f=lambda *args, **more: None)}
    assert compat.compare([symbol], tree.__getitem__, "").problems == ()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.3.74", "this ComfyUI (0.3.74) is older"),
        ("0.3.75", "this ComfyUI is 0.3.75"),
        ("0.26.0", "this ComfyUI is 0.26.0"),
        ("0.40.1+git", "this ComfyUI (0.40.1+git) is newer"),
        ("", "this ComfyUI tells no version"),
    ],
)
def test_the_version_is_compared_with_what_was_tried(compat: Any, version: str, said: str) -> None:
    assert said in of(compat, fake_tree(SYMBOLS[0]), version).sentence()
    whole = of(compat, fake_tree(), version).sentence()
    assert bool(whole) == ("newer" in said)


def test_the_log_has_one_line(
    compat: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "this_comfyui", lambda: of(compat, {}))
    with caplog.at_level(logging.INFO, "courier"):
        assert compat.tell() is False
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 600


# From the files


def test_the_files_of_this_comfyui_have_every_symbol(comfyui_path: Path) -> None:
    assert faults_of(comfyui_path, SYMBOLS) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (None, "there is no module m"),
        ("x = 1", "there is no class C"),
        ("class C:\n    pass", "it is not there"),
        ("class C:\n    def f(self, a): pass", "it does not take b"),
        ("class C:\n    def f(self, a, *, b): pass", ""),
        ("class C:\n    def f(self, **more): pass", ""),
        ("class B:\n    def f(self, a, b): pass\nclass C(B):\n    pass", ""),
        ("try:\n    import x\nexcept ImportError:\n    class C:\n        f = 1", ""),
    ],
)
def test_files_are_read_and_not_run(
    compat: Any, tmp_path: Path, source: str | None, fault: str
) -> None:
    if source is not None:
        (tmp_path / "m.py").write_text(f"{source}\nraise SystemExit\n")
    symbol = compat.Symbol("m", "C.f", (compat.Part.LOAD,), ("a", "b"))
    assert faults_of(tmp_path, [symbol]) == ([f"m.C.f: {fault}"] if fault else [])


# In a ComfyUI


def test_the_nodes_come_up_and_say_what_is_missing(
    comparisons_of: Callable[..., dict[str, list[str]]],
) -> None:
    found = comparisons_of(SCRIPT)
    for part, least in (("symbols", 100), ("modules", 20)):
        assert [line for line in found.get(part, []) if line.startswith("FAIL")] == []
        assert len(found[part]) >= least
