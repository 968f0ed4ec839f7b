"""Import the pack as ComfyUI does and report, as JSON in the file named by the first argument,
what the import did: seconds, threads, text, log records, and changes to ComfyUI's own objects.

Further arguments: the pack's folder, if it is not the usual one; ``--closed-stdout``.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import bootstrap

WATCHED = (
    "comfy.model_patcher",
    "comfy.model_management",
    "comfy.sd",
    "comfy.utils",
    "comfy.ops",
    "comfy.lora",
    "comfy.sample",
    "comfy.samplers",
    "execution",
    "server",
    "folder_paths",
    "nodes",
    "torch.nn.modules.module",
)
IMPORTS = 3


def snapshot(modules: list[ModuleType]) -> dict[str, Any]:
    """Every name of the modules, and of the classes they define, with the object behind it."""
    objects: dict[str, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if not callable(value):
                continue
            objects[f"{module.__name__}.{name}"] = value
            if inspect.isclass(value) and value.__module__ == module.__name__:
                for member, inner in vars(value).items():
                    if callable(inner) or isinstance(inner, (property, staticmethod, classmethod)):
                        objects[f"{module.__name__}.{name}.{member}"] = inner
    return objects


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = before.keys() | after.keys()
    return sorted(name for name in names if before.get(name) is not after.get(name))


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Written:
    """What anybody writes to stdout and stderr meanwhile, also past Python's own objects."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._kept: list[tuple[int, int]] = []
        self.text = ""

    def __enter__(self) -> Written:
        with self._file.open("wb") as sink:
            for descriptor in (1, 2):
                try:
                    self._kept.append((os.dup(descriptor), descriptor))
                except OSError:
                    continue  # a test closed it
                os.dup2(sink.fileno(), descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for copy, descriptor in self._kept:
            os.dup2(copy, descriptor)
            os.close(copy)
        self.text = self._file.read_text(encoding="utf-8", errors="replace")


def import_copies(folder: Path) -> tuple[ModuleType, list[float]]:
    """Import the pack several times, each under another name. Returns: the first, and seconds."""
    seconds, packs = [], []
    for index in range(IMPORTS):
        name = f"{str(folder).replace('.', '_x_')}{'_again' * index}"
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        started = time.perf_counter()
        spec.loader.exec_module(module)
        seconds.append(time.perf_counter() - started)
        packs.append(module)
    return packs[0], seconds


async def node_ids(pack: ModuleType) -> list[str]:
    extension = pack.comfy_entrypoint()
    if inspect.isawaitable(extension):
        extension = await extension
    nodes = await extension.get_node_list()
    return [node.GET_SCHEMA().node_id for node in nodes]


def close_stdout() -> None:
    """As under pythonw, or a service that closed its descriptors."""
    os.close(1)
    sys.stdout = sys.__stdout__ = None  # type: ignore[assignment,misc]


def main() -> None:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    report_file = Path(names[0])
    folder = Path(names[1]) if len(names) > 1 else bootstrap.pack_path()
    if "--closed-stdout" in sys.argv:
        close_stdout()
    bootstrap.load_comfyui()
    # ComfyUI has all of these by the time it looks for custom nodes.
    modules = [importlib.import_module(name) for name in WATCHED]
    importlib.import_module("comfy_api.latest")
    records = Records()
    logging.getLogger().addHandler(records)
    before, threads = snapshot(modules), set(threading.enumerate())
    with Written(report_file.with_suffix(".txt")) as written:
        pack, seconds = import_copies(folder)
    after_import = changes(before, snapshot(modules))
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    logged = list(records.texts)
    ids = asyncio.run(node_ids(pack))
    report = {
        "written": written.text,
        "seconds": seconds,
        "threads": left,
        "logged": logged,
        "changed_by_import": after_import,
        "changed_by_entrypoint": changes(before, snapshot(modules)),
        "core_by_plain_name": "offload_core" in sys.modules,
        "nodes": ids,
    }
    report_file.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
