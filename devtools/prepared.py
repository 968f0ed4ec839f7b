"""What every command that needs a ComfyUI makes first."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from devtools.comfyui_install import ComfyUIProgram, choose_program, ensure_base
from devtools.console import Progress
from devtools.paths import Paths


@dataclass(frozen=True)
class Prepared:
    """All that a run against ComfyUI needs.

    Attributes:
        models: the small models' files by key.
    """

    program: ComfyUIProgram
    base: Path
    models: dict[str, Path]


def prepare(paths: Paths, options: argparse.Namespace) -> Prepared:
    """ComfyUI, its base directory and the small models; quick when they are there."""
    from devtools.small_models import small_model_set, write_all

    program = choose_program(
        paths,
        options.comfyui,
        options.comfyui_python,
        options.front_end_root,
        options.comfyui_args,
    )
    base = ensure_base(paths)
    with Progress("Small models", len(small_model_set(paths.models))) as progress:
        models = write_all(paths.models, progress)
    return Prepared(program, base, models)
