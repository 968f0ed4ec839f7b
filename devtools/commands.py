"""What dev.py does once it runs inside the environment; ``bench`` it starts itself."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from devtools.paths import Paths
from devtools.prepared import prepare


def run_command(paths: Paths, options: argparse.Namespace, rest: list[str]) -> int:
    # Imported one by one: they need packages, and lint need not wait for torch.
    if options.command == "lint":
        from devtools.lint import lint

        return lint(paths)
    if options.command == "test":
        from devtools.testing import run_tests

        _announce_choice(options)
        return run_tests(paths, prepare(paths, options), rest)
    from devtools.demo import run_demo

    prepared = prepare(paths, options)
    return run_demo(paths, prepared, options.workflow, options.serve, options.port)


def _announce_choice(options: argparse.Namespace) -> None:
    """The tests choose their ComfyUI by themselves, from the same words in the environment."""
    choice = {
        "COMFYUI_PATH": options.comfyui and str(Path(options.comfyui).expanduser().resolve()),
        "COMFYUI_PYTHON": options.comfyui_python,
        "COMFYUI_FRONT_END_ROOT": options.front_end_root,
        "COMFYUI_ARGS": options.comfyui_args,
    }
    os.environ.update({name: value for name, value in choice.items() if value})
