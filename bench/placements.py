"""Samples one Wan-shaped model through ComfyUI's own sampler under several budgets.

Usage: placements.py MODEL.safetensors [--steps N]

Run with COURIER_TEST_COMFYUI, COURIER_TEST_BASE, COURIER_TEST_PACK and PYTHONPATH set as
tests/comfyui/bootstrap.py says. Each row is compared bit for bit with the core's own loader, and
its step time is given as a ratio to it, both from this one run. Sizes are GiB.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bootstrap
import torch

GIB = 2**30
MIB = 2**20
ACTIVATION_ROOM_BYTES = GIB if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class Run:
    """Seconds by step, and the latent."""

    latent: torch.Tensor
    seconds: list[float]

    @property
    def first(self) -> float:
        return self.seconds[0]

    @property
    def step(self) -> float:
        return statistics.median(self.seconds[1:])


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sample(model: Any, steps: int, **latent: int) -> Run:
    import comfy.sample

    shape = bootstrap.latent_shape(model, **latent)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    positive = bootstrap.conditioning(model, 0)
    times = [time.perf_counter()]

    def step_done(*_: Any) -> None:
        synchronize()
        times.append(time.perf_counter())

    out = comfy.sample.sample(
        model, noise, steps, 1.0, "euler", "simple", positive, positive, torch.zeros(shape),
        seed=0, disable_pbar=True, callback=step_done,
    )  # fmt: skip
    return Run(out, [after - before for before, after in itertools.pairwise(times)])


def used_bytes() -> int:
    """Driver-level memory in use on the card; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def budgets(values: Any, size_bytes: int) -> list[tuple[str, Any]]:
    part = int(size_bytes * 0.4) + ACTIVATION_ROOM_BYTES
    small = int(size_bytes * 0.15) + ACTIVATION_ROOM_BYTES
    return [
        ("all resident", values.Budget(None, 0)),
        ("40 % of the card, rest pinned", values.Budget(part, size_bytes)),
        ("40 %, rest mapped, 64 MiB of RAM", values.Budget(part, 64 * MIB)),
        ("40 %, rest mapped, no RAM", values.Budget(part, 0)),
        ("40 %, half of the rest pinned", values.Budget(part, int(size_bytes * 0.3))),
        ("15 %, rest pinned", values.Budget(small, size_bytes)),
    ]


def measure(name: str, model: Any, load_seconds: float, want: Run, steps: int) -> str:
    import comfy.model_management

    before = used_bytes()
    first = sample(model, steps, **LATENT)
    second = sample(model, steps, **LATENT)
    equal = torch.equal(first.latent, want.latent) and torch.equal(second.latent, want.latent)
    snapshot = model.courier_engine.snapshot()
    memory, limit = snapshot.memory, snapshot.budget.device_bytes
    counts = {p: sum(r.placement.value == p for r in snapshot.layers) for p in PLACEMENTS}
    taken, peak = used_bytes() - before, memory.activation_peak_bytes
    row = [
        name,
        "yes" if equal else "NO",
        f"{load_seconds:.2f}",
        f"{first.first:.2f}",
        f"{second.step:.4f}",
        f"{second.step / want.step:.2f}",
        "auto" if limit is None else f"{limit / GIB:.2f}",
        f"{memory.device_peak_bytes / GIB:.2f}",
        "-" if peak is None else f"{peak / GIB:.2f}",
        f"{taken / GIB:.2f}",
        f"{memory.locked_bytes / GIB:.2f}",
        " / ".join(str(counts[p]) for p in PLACEMENTS),
    ]
    comfy.model_management.unload_all_models()
    return "| " + " | ".join(row) + " |"


PLACEMENTS = ("resident", "pinned", "mapped")
LATENT = {"size": 80, "frames": 5} if torch.cuda.is_available() else {"size": 16, "frames": 1}
HEAD = (
    "| plan | equal | load s | first step s | s/step | vs core | device budget | weights, peak "
    "| activations | driver | locked | resident / pinned / mapped |\n" + "|---" * 12 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    pack = bootstrap.load_pack()
    import comfy.model_management
    import comfy.sd
    import folder_paths

    loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
    values = bootstrap.submodule(pack, "offload_core.values")
    host = bootstrap.submodule(pack, "offload_core.host")
    folder_paths.add_model_folder_path("diffusion_models", str(options.model.parent.resolve()))
    started = time.perf_counter()
    stock = comfy.sd.load_diffusion_model(str(options.model))
    stock_load = time.perf_counter() - started
    sample(stock, 1, **LATENT)
    want = sample(stock, options.steps, **LATENT)
    size_bytes = options.model.stat().st_size
    print(f"{options.model.name}: {size_bytes / GIB:.2f} GiB, {LATENT}, {options.steps} steps")
    print(f"the core's own loader: load {stock_load:.2f} s, {want.step:.4f} s/step\n\n{HEAD}")
    comfy.model_management.unload_all_models()
    del stock
    for name, budget in budgets(values, size_bytes):
        gc.collect()
        comfy.model_management.soft_empty_cache()
        anonymous = host.process_memory().rss_anon_bytes
        started = time.perf_counter()
        model = loading.load_diffusion_model(options.model.name, "default", budget)
        row = measure(name, model, time.perf_counter() - started, want, options.steps)
        grown = host.process_memory().rss_anon_bytes - anonymous
        print(f"{row} RssAnon {grown / MIB:+.0f} MiB", flush=True)
        del model


if __name__ == "__main__":
    main()
