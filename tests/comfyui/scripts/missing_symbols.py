"""A ComfyUI without one of the names that the pack uses, one after the other.

Prints ``ok   PART: ...`` and ``FAIL PART: ...``: the nodes come up, and what cannot work says why.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import bootstrap

bootstrap.load_comfyui()
import execution  # noqa: E402, F401
import folder_paths  # noqa: E402
import server  # noqa: E402, F401

_numbers = itertools.count()
_MISSING = object()
NODES = {
    "CourierBudget", "CourierLoadCLIP", "CourierLoadCheckpoint", "CourierLoadDiffusionModel",
    "CourierLoadDualCLIP", "CourierLoadQuadrupleCLIP", "CourierLoadTripleCLIP", "CourierLoadVAE",
    "CourierSleepModel", "CourierStatus", "CourierWakeModel",
}  # fmt: skip
LINES: list[str] = []


class Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LINES.append(record.getMessage())


def copy_of_pack() -> Any:
    """The pack anew, as ComfyUI loads it at its start."""
    name = f"courier_without_{next(_numbers)}"
    root = bootstrap.pack_path()
    spec = importlib.util.spec_from_file_location(
        name, root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def without_attribute(module: str, path: str) -> Iterator[None]:
    owner: Any = importlib.import_module(module)
    *outer, last = path.split(".")
    for name in outer:
        owner = getattr(owner, name)
    before = vars(owner)[last]
    delattr(owner, last)
    try:
        yield
    finally:
        setattr(owner, last, before)


@contextmanager
def without_module(name: str) -> Iterator[None]:
    parent, _, child = name.rpartition(".")
    before = sys.modules.get(name, _MISSING)
    sys.modules[name] = None  # type: ignore[assignment]
    owner = sys.modules.get(parent)
    attribute = vars(owner).pop(child, _MISSING) if owner is not None else _MISSING
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not _MISSING:
            sys.modules[name] = before  # type: ignore[assignment]
        if attribute is not _MISSING:
            setattr(owner, child, attribute)


def say(part: str, text: str, is_so: bool) -> None:
    print(f"{'ok  ' if is_so else 'FAIL'} {part}: {text}", flush=True)


def look(part: str, text: str, parts: set[str]) -> None:
    """Load the pack and use each node. ``parts``: names of what has to say that it cannot."""
    LINES.clear()
    pack = copy_of_pack()
    try:
        extension = asyncio.run(pack.comfy_entrypoint())
        nodes = {n.define_schema().node_id: n for n in asyncio.run(extension.get_node_list())}
    except Exception as error:
        say(part, f"{text}: the nodes come up ({type(error).__name__}: {error})", False)
        return
    say(part, f"{text}: the nodes come up", nodes.keys() == NODES)
    told = [line for line in LINES if text in line]
    say(part, f"{text}: the log has one line of it", len(told) == 1)
    kind = importlib.import_module(f"{pack.__name__}.nodes.requests.records").NotWithThisComfyError
    name = folder_paths.get_filename_list("diffusion_models")[0]
    calls: dict[str, Callable[[], Any]] = {
        "LOAD": lambda: nodes["CourierLoadDiffusionModel"].execute(
            unet_name=name, weight_dtype="default"
        ),
        "SLEEP": lambda: nodes["CourierWakeModel"].execute(),
    }
    for which in parts & calls.keys():
        say(part, f"{text}: {which} says why ({(error := error_of(calls[which]))!r})",
            isinstance(error, kind) and text in str(error))  # fmt: skip


def error_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def main() -> int:
    logger = logging.getLogger("courier")
    logger.addHandler(Keep())
    logger.setLevel(logging.INFO)
    symbols = importlib.import_module(f"{copy_of_pack().__name__}.nodes.comfyui.symbols")
    for symbol in symbols.SYMBOLS:
        parts = {part.name for part in symbol.parts}
        # An enumeration gives nothing away, LoadedModel.model is no method, and this script itself
        # needs the folders.
        kept = symbol.path.startswith(("VRAMState.", "NodeState.", "LoadedModel.model"))
        if symbol.is_field or kept or symbol.module == "folder_paths":
            continue
        with without_attribute(symbol.module, symbol.path):
            look("symbols", symbol.name, parts)
    for module in dict.fromkeys(symbol.module for symbol in symbols.SYMBOLS):
        if module in ("folder_paths", "comfy.model_management", "comfy.cli_args", "comfy.utils"):
            continue  # the comfyui of this script itself needs them
        parts = {part.name for one in symbols.SYMBOLS if one.module == module for part in one.parts}
        with without_module(module):
            look("modules", module, parts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
