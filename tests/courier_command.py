"""``courier.py`` as tests import it: no server, no ComfyUI."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

COMMAND = Path(__file__).resolve().parents[1] / "courier.py"
_FILES = "_comfyui_courier_files"
"""The name under which it has the pack's folder."""


def load_courier() -> ModuleType:
    """``courier.py`` as ``import courier`` gives it."""
    spec = importlib.util.spec_from_file_location("courier_of_the_tests", COMMAND)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def headless_module(name: str) -> ModuleType:
    """One of the modules behind it."""
    if _FILES not in sys.modules:
        load_courier()
    return importlib.import_module(f"{_FILES}.nodes.headless.{name}")
