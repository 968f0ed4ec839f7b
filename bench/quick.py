"""Time and memory of a 1.1 GB model in a real ComfyUI: the stock loader against courier's budgets.

The suite under ``bench`` at a size for any machine; see docs/benchmarks.md for the real thing. On a
CPU there is no device to copy to: what counts there is the process's memory, and that streaming
costs little time.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from bench.big_model import ModelFileError
from bench.options import Settings
from bench.processes import ChildError
from bench.suite import run_suite
from bench.tables import problem_lines, short_table
from bench.units import Latent, ModelShape
from devtools.console import DevError, say
from devtools.paths import Paths
from devtools.prepared import Prepared

BIG_FILE = "courier_wan_bench_bf16.safetensors"
BIG_SHAPE = ModelShape(28, 1024, 5632)
LATENT = Latent(1, 16, 16)
DEVICE_GIB = 0.6
ROWS = ("resident", "courier-ample", "courier-chunks", "courier-0")
ROW_SECONDS = 300.0


def run_bench(paths: Paths, prepared: Prepared, steps: int) -> int:
    """Measure and print. Returns: 1 if a contender failed.

    Raises: DevError without the model, such as on a full disk.
    """
    settings = settings_for(paths, prepared, steps)
    try:
        report = run_suite(settings, f"python3 dev.py bench --steps {steps}")
    except (ChildError, ModelFileError) as error:
        raise DevError(f"the benchmark could not be run: {error}") from None
    say("")
    for line in short_table(report.rows, str(LATENT)):
        say(line)
    failed = [row for row in report.rows if row.detail]
    for line in problem_lines(failed):
        say(line)
    say(f"\nThe whole table, and its JSON: {settings.out}")
    return 1 if failed else 0


def settings_for(paths: Paths, prepared: Prepared, steps: int) -> Settings:
    """Nobody's card is held: a budget alone makes the model stream."""
    return Settings(
        model=model_file(prepared.base / "models"),
        shape=BIG_SHAPE,
        comfyui=prepared.program.path,
        python=str(prepared.program.python),
        comfyui_args=shlex.join(prepared.program.extra_args),
        newer=None,
        newer_python="",
        only=ROWS,
        latents=(LATENT,),
        steps=steps,
        runs=2,
        cfg=1.0,
        lora_rank=0,
        free_gib=0.0,
        device_gib=DEVICE_GIB,
        budgets_gib=(),
        host_available_gib=0.0,
        row_seconds=ROW_SECONDS,
        stop_after_seconds=None,
        merge=(),
        out=paths.state / "bench",
        name="small",
    )


def model_file(models: Path) -> Path:
    """Where the model is written, and kept for the next time."""
    return models / "diffusion_models" / BIG_FILE
