"""What dev.py does once it runs inside the environment."""

from __future__ import annotations

import argparse
import os
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


def run_command(paths: Paths, options: argparse.Namespace, rest: list[str]) -> int:
    # Imported one by one: they need packages, and lint need not wait for torch.
    if options.command == "lint":
        from devtools.lint import lint

        return lint(paths)
    if options.command == "test":
        from devtools.testing import run_tests

        _announce_choice(options)
        return run_tests(paths, prepare(paths, options), rest)
    if options.command == "demo":
        from devtools.demo import run_demo

        prepared = prepare(paths, options)
        return run_demo(paths, prepared, options.workflow, options.serve, options.port)
    from devtools.bench import run_bench

    return run_bench(paths, prepare(paths, options), steps=options.steps)


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


def _announce_choice(options: argparse.Namespace) -> None:
    """The tests choose their ComfyUI by themselves, from the same words in the environment."""
    choice = {
        "COMFYUI_PATH": options.comfyui and str(Path(options.comfyui).expanduser().resolve()),
        "COMFYUI_PYTHON": options.comfyui_python,
        "COMFYUI_FRONT_END_ROOT": options.front_end_root,
        "COMFYUI_ARGS": options.comfyui_args,
    }
    os.environ.update({name: value for name, value in choice.items() if value})
