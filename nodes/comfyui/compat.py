"""Whether this ComfyUI has what the pack uses; a sentence where it has not. Nothing is changed."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..requests.records import NotWithThisComfyError
from .symbols import NEWEST_TRIED, OLDEST_TRIED, SYMBOLS, Part, Symbol

_LOG = logging.getLogger("courier")

_MOST_NAMED = 8
_OF_SERVER = frozenset({"execution", "nodes", "server"})

Importer = Callable[[str], Any]


@dataclass(frozen=True)
class Problem:
    """A symbol that is gone, or no longer takes an argument; or its whole module is."""

    symbol: Symbol
    lacks: tuple[str, ...] = ()
    has_module: bool = True

    def __str__(self) -> str:
        if not self.has_module:
            return f"the module {self.symbol.module}"
        arguments = ", ".join(self.lacks)
        return f"{self.symbol.name}({arguments})" if self.lacks else self.symbol.name


@dataclass(frozen=True)
class Compat:
    """What was found. ``version`` "" where ComfyUI does not tell one."""

    version: str
    problems: tuple[Problem, ...]

    @property
    def age(self) -> str:
        """In words, against what was tried."""
        tried = f"Courier was tried with {OLDEST_TRIED} to {NEWEST_TRIED}"
        number = _number(self.version)
        if number is None:
            return f"this ComfyUI tells no version; {tried}"
        if number < (_number(OLDEST_TRIED) or ()):
            return f"this ComfyUI ({self.version}) is older: {tried}"
        if number > (_number(NEWEST_TRIED) or ()):
            return f"this ComfyUI ({self.version}) is newer: {tried}"
        return f"this ComfyUI is {self.version}; {tried}"

    def sentence(self) -> str:
        """For the log at start-up; "" where there is nothing to say."""
        if self.problems:
            parts = {part: None for one in self.problems for part in one.symbol.parts}
            return (
                f"Courier: {self.age}. It lacks, or has changed: {_listed(self.problems)}. What "
                f"needs them says so when it is used: {', '.join(part.value for part in parts)}"
            )
        number = _number(self.version)
        is_newer = number is not None and number > (_number(NEWEST_TRIED) or ())
        return f"Courier: {self.age}; nothing that it uses is missing" if is_newer else ""

    def require(self, part: Part) -> None:
        """Raises: NotWithThisComfyError where ``part`` cannot work."""
        problems = [one for one in self.problems if part in one.symbol.parts]
        if problems:
            raise NotWithThisComfyError(
                f"{part.value}: not possible here, since {self.age}, and it lacks or has changed "
                f"{_listed(problems)}. Update ComfyUI-Courier, or use a ComfyUI that was tried"
            )


def compare(symbols: Sequence[Symbol], get_module: Importer, version: str) -> Compat:
    """``get_module`` may raise whatever a module raises that is imported."""
    found = (_problem_with(symbol, get_module) for symbol in symbols)
    return Compat(version, tuple(one for one in found if one is not None))


class NoServerError(Exception):
    """ComfyUI runs without a server here, so that what belongs to one is not missed."""


@functools.lru_cache(maxsize=1)
def this_comfyui() -> Compat:
    """Of the ComfyUI that runs, looked at once."""
    return compare(SYMBOLS, _module, _version())


def _module(name: str) -> Any:
    # A look must not bring in what a server is made of.
    if name in _OF_SERVER and name not in sys.modules:
        raise NoServerError
    return importlib.import_module(name)


def require(part: Part) -> None:
    """Raises: NotWithThisComfyError where this ComfyUI cannot do ``part``."""
    this_comfyui().require(part)


def has(*parts: Part) -> bool:
    """Whether this ComfyUI can do all of ``parts``."""
    return not any(part in parts for one in this_comfyui().problems for part in one.symbol.parts)


def tell() -> bool:
    """Have the log say, in one line, what is missing. Whether all is there."""
    found = this_comfyui()
    text = found.sentence()
    if text:
        _LOG.log(logging.WARNING if found.problems else logging.INFO, text)
    return not found.problems


def _problem_with(symbol: Symbol, get_module: Importer) -> Problem | None:
    has_module = False
    try:
        value: Any = get_module(symbol.module)
        has_module = True
        for name in symbol.path.split("."):
            if symbol.is_field and inspect.isclass(value) and not hasattr(value, name):
                return None if _sets(value, name) else Problem(symbol)
            value = getattr(value, name)
        # What every class has stands for none.
        lacks = symbol.takes if value is object.__init__ else _lacks(value, symbol.takes)
    except NoServerError:
        return None
    except Exception:
        # A module that fails to be imported is as good as none, whatever it fails with.
        return Problem(symbol, has_module=has_module)
    return Problem(symbol, lacks) if lacks else None


def _sets(kind: type, name: str) -> bool:
    """Whether a class sets a field on its objects, in itself or in what it is made from."""
    methods = [method for one in kind.__mro__ for method in vars(one).values()]
    return any(name in inspect.unwrap(method).__code__.co_names
               for method in methods if inspect.isfunction(method))  # fmt: skip


def _lacks(value: Any, takes: Sequence[str]) -> tuple[str, ...]:
    if not takes:
        return ()
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return ()
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return ()
    return tuple(name for name in takes if name not in parameters)


def _listed(problems: Sequence[Problem]) -> str:
    names = list(dict.fromkeys(map(str, problems)))
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _version() -> str:
    try:
        return str(importlib.import_module("comfyui_version").__version__)
    except Exception:
        return ""


def _number(version: str) -> tuple[int, ...] | None:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else None
