"""The suite's command line. Standard library only."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.big_model import DEFAULT_SHAPE, is_ready
from bench.machine import default_python
from bench.records import Report, report_from
from bench.rows import Limits, all_rows, choose
from bench.units import GIB, Latent, ModelShape
from devtools.paths import checkout


@dataclass(frozen=True)
class Settings:
    """What one call of the suite does. See ``parse`` for the meaning of each."""

    model: Path
    shape: ModelShape | None
    comfyui: Path
    python: str
    comfyui_args: str
    newer: Path | None
    newer_python: str
    only: Sequence[str]
    latents: Sequence[Latent]
    steps: int
    runs: int
    cfg: float
    lora_rank: int
    free_gib: float
    device_gib: float | None
    budgets_gib: Sequence[float]
    host_available_gib: float
    row_seconds: float
    stop_after_seconds: float | None
    merge: Sequence[Report]
    out: Path
    name: str

    def limits(self, model_gib: float | None = None) -> Limits:
        """Once the model is there, or with its size."""
        return Limits(
            model_gib=self.model.stat().st_size / GIB if model_gib is None else model_gib,
            device_gib=self.device_gib,
            budgets_gib=self.budgets_gib,
            host_available_gib=self.host_available_gib,
            newer=self.newer is not None,
        )


def parse(arguments: Sequence[str]) -> Settings:
    """Ends the process, with a sentence, for what cannot be meant."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        return settings_from(options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(str(error))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.suite",
        description="Compares ways to run one large model, row by row, each in a fresh process.",
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="written there unless it is there already")
    add("--shape", type=ModelShape.parse, help=f"DEPTHxWIDTHxFFN; default: {DEFAULT_SHAPE}")
    add("--as-is", action="store_true", help="measure the file as it is, whatever it is")
    add("--comfyui", type=Path, help="default: the one that dev.py embeds")
    add("--comfyui-python", default=default_python(), metavar="FILE")
    add("--comfyui-args", default="", metavar="ARGS", help="for both ComfyUIs' command lines")
    add("--newer", type=Path, metavar="PATH", help="a newer ComfyUI, for rows of its own")
    add("--newer-python", metavar="FILE", help="default: that of --comfyui-python")
    add("--only", default="", metavar="NAME[,NAME]", help="rows; patterns such as budget-* too")
    add("--latents", default="5x60x104,1x60x104", help="frames x height x width, by commas")
    add("--steps", type=int, default=8)
    add("--runs", type=int, default=2, help="calls of the sampler for each latent")
    add("--cfg", type=float, default=1.0, help="above 1, both conditionings are run")
    add("--lora-rank", type=int, default=0, help="a random LoRA on every matrix of the blocks")
    add("--free-gib", type=float, default=12.0, help="left on a limited card; 0: not limited")
    add("--device-gib", default="", help="Courier's device budget; default: --free-gib; or auto")
    add("--budgets-gib", default="4,6,8,12", help="device budgets whose peak is measured")
    add("--host-available-gib", type=float, default=35.0, help="RAM left in the low-host rows")
    add("--row-seconds", type=float, default=240.0, help="limit of one row")
    add("--stop-after-seconds", type=float, help="start no row after that, to come back for it")
    add("--merge", type=Path, action="append", default=[], metavar="FILE", help="earlier JSON")
    add("--out", type=Path, help="folder for the results; default: bench/results")
    add("--name", default="suite", help="part of the results' names")
    return parser


def settings_from(options: argparse.Namespace) -> Settings:
    """Raises: ValueError or OSError, in words."""
    paths = checkout()
    comfyui = (options.comfyui or paths.comfyui).expanduser().resolve()
    newer = options.newer.expanduser().resolve() if options.newer else None
    for program in (comfyui, newer):
        if program is not None and not (program / "comfy" / "sd.py").is_file():
            raise ValueError(
                f"{program} is not a ComfyUI; 'python3 dev.py demo' makes the embedded one, or "
                "name another"
            )
    model = options.model.expanduser().absolute()
    if options.steps < 1 or options.runs < 1:
        raise ValueError("at least one step and one run are needed")
    settings = Settings(
        model=model,
        shape=_shape(options, model),
        comfyui=comfyui,
        python=options.comfyui_python,
        comfyui_args=options.comfyui_args,
        newer=newer,
        newer_python=options.newer_python or options.comfyui_python,
        only=_words(options.only),
        latents=[Latent.parse(text) for text in _words(options.latents)],
        steps=options.steps,
        runs=options.runs,
        cfg=options.cfg,
        lora_rank=options.lora_rank,
        free_gib=options.free_gib,
        device_gib=_device_gib(options.device_gib, options.free_gib),
        budgets_gib=[float(text) for text in _words(options.budgets_gib)],
        host_available_gib=options.host_available_gib,
        row_seconds=options.row_seconds,
        stop_after_seconds=options.stop_after_seconds,
        merge=[read_report(file) for file in options.merge],
        out=options.out or paths.root / "bench" / "results",
        name=options.name,
    )
    choose(all_rows(settings.limits(model_gib=0)), settings.only)  # before a model is written
    return settings


def read_report(file: Path) -> Report:
    """Raises: ValueError if ``file`` is no report of the suite; OSError."""
    try:
        return report_from(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no report of this suite ({error!r})") from None


def _shape(options: argparse.Namespace, model: Path) -> ModelShape | None:
    """None: the file as it is. Raises: ValueError where one of another shape would have to go."""
    if options.as_is:
        return None
    if options.shape is None and model.exists() and not is_ready(model, DEFAULT_SHAPE):
        raise ValueError(
            f"{model.name} is there, and is not the default model ({DEFAULT_SHAPE}); name its "
            "--shape, or measure it --as-is"
        )
    return options.shape or DEFAULT_SHAPE


def _device_gib(text: str, free_gib: float) -> float | None:
    if text == "auto":
        return None
    return float(text) if text else free_gib or None


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
