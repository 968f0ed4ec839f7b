#!/usr/bin/env python3
"""ComfyUI-Courier without a browser: a command, and the clients for Python programs.

    python courier.py run workflow.json
    from courier import CourierClient

Runs from any working folder. Needs neither ComfyUI nor torch; ``plan`` needs torch.
"""

import importlib
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what a type checker may look at; it finds "nodes" beside this file
    from nodes.headless import *  # noqa: F403

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until the command is loaded there is nothing to put in order, and a traceback says nothing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# The pack's folder as a package under a name of our own: its __init__ is ComfyUI's door, and its
# "nodes" must never be found by that name, which is ComfyUI's own.
_ALIAS = "_comfyui_courier_files"
if _ALIAS not in sys.modules:
    _package = ModuleType(_ALIAS)
    _package.__path__ = [str(Path(__file__).resolve().parent)]
    sys.modules[_ALIAS] = _package
_headless = importlib.import_module(f"{_ALIAS}.nodes.headless")

globals().update({name: getattr(_headless, name) for name in _headless.__all__})
__all__ = list(_headless.__all__)

if __name__ == "__main__":
    sys.exit(importlib.import_module(f"{_ALIAS}.nodes.headless.cli.command").main(sys.argv[1:]))
