"""What the small measurements of one model share: their options, and a ComfyUI with the model."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import comfy_program, machine
from bench.rows import budget_bytes
from bench.units import Latent
from devtools.comfyui_install import ensure_base
from devtools.paths import checkout


def build_parser(program: str, doc: str | None, steps: int, rounds: int) -> argparse.ArgumentParser:
    """The options, with these defaults."""
    parser = argparse.ArgumentParser(prog=program, description=doc)
    parser.add_argument("model", type=Path)
    parser.add_argument("--comfyui", type=Path, default=checkout().comfyui)
    parser.add_argument("--latent", type=Latent.parse, default=Latent(1, 60, 104))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--comfyui-args", default="", help="for ComfyUI's command line")
    parser.add_argument("--device-gib", type=float, help="Courier's budget; left out: automatic")
    parser.add_argument("--host-gib", type=float, help="Courier's budget; left out: automatic")
    return parser


@contextmanager
def loaded_model(
    options: argparse.Namespace, by_core: bool = False, dynamic: bool = False
) -> Iterator[Any]:
    """The model of the options in this process; once in a process.

    Args:
        by_core: by ComfyUI's own loader, and not by Courier's.
        dynamic: with ComfyUI's dynamic VRAM, which comfy-aimdo must be there for.
    """
    paths = checkout()
    with tempfile.TemporaryDirectory(prefix="courier-bench-") as folder:
        base = ensure_base(paths, Path(folder).resolve() / "base")
        ground = machine.Ground(paths.root, base, options.comfyui.resolve(), sys.executable)
        os.environ.update(ground.environment(False, os.environ))
        sys.path.insert(0, str(paths.root / "tests" / "comfyui"))
        model_file = machine.offer_model(base, options.model)
        comfy_program.start(options.comfyui_args, dynamic)
        comfy_program.touch_device()
        budget = budget_bytes(options.device_gib), budget_bytes(options.host_gib)
        with comfy_program.node():
            loaded = [
                comfy_program.load_core(model_file)
                if by_core
                else comfy_program.load_courier(model_file, *budget)
            ]
        yield loaded.pop()  # held by whoever asked, and by nobody else
