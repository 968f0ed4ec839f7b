"""One contender in a fresh process: loads the model one way, samples, and says what it took.

Started by bench.suite with the environment that bench.comfy_program needs. Says ``ready`` once its
CUDA context is there, waits for ``go`` (the parent sets the free memory meanwhile), and answers
with one line of JSON: ``{"contender": ...}`` as in ``records.ContenderRecord``, or
``{"error": ...}``.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench import comfy_program
from bench.records import ContenderRecord, CourierRecord, PeakRecord, RunRecord
from bench.rows import Kind, budget_bytes
from bench.units import Latent

FULLY_LOADED = 0.99
"""Share of a model's bytes on the card from which it counts as resident."""


class ContenderError(Exception):
    """The contender did not do what its row says; its figures would mislead."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.contender", description=__doc__)
    parser.add_argument("--kind", type=Kind, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--latent", type=Latent.parse, required=True)
    parser.add_argument("--also-latent", type=Latent.parse, action="append", default=[])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--cfg", type=float, default=1.0)
    parser.add_argument("--lora-rank", type=int, default=0, help="0: none")
    parser.add_argument("--device-gib", type=float, help="Courier's budget; left out: automatic")
    parser.add_argument("--host-gib", type=float, help="Courier's budget; left out: automatic")
    parser.add_argument("--dynamic-vram", action="store_true")
    parser.add_argument("--comfyui-args", default="", help='such as "--reserve-vram 2"')
    parser.add_argument("--latent-file", type=Path, required=True, help="the start of its name")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Loaded:
    """A model, and the two things that are asked of it besides sampling."""

    model: Any
    shipped_bytes: Callable[[], int]
    courier: Callable[[], CourierRecord | None]


def measure(options: argparse.Namespace) -> ContenderRecord:
    """Load and sample as asked; every figure of it."""
    import torch

    from bench.watch import Peaks

    with Peaks(torch) as peaks:
        started = time.perf_counter()
        with comfy_program.node():
            loaded = load(options)
        seconds = time.perf_counter() - started
        load_peak = PeakRecord(**peaks.take())
        runs = []
        for latent in (options.latent, *options.also_latent):
            for number in range(options.runs):
                run = measure_run(options, loaded, latent, number)
                runs.append(dataclasses.replace(run, peak=PeakRecord(**peaks.take())))
        versions = comfy_program.versions()
        versions["model dtype"] = str(loaded.model.model.get_dtype()).removeprefix("torch.")
        del loaded
        again = measure_again(options)
    return ContenderRecord(
        load_seconds=seconds,
        load_peak=load_peak,
        free_bytes_before=peaks.free_bytes_before,
        anon_bytes_before=peaks.anon_bytes_before,
        versions=versions,
        runs=runs,
        again_seconds=again,
    )


def measure_again(options: argparse.Namespace) -> float:
    """Seconds of the loader node and the first step, anew, in a process that has run the model: so
    without what a process's first run spends on its libraries."""
    from bench.sampling import sample

    comfy_program.let_go()
    started = time.perf_counter()
    with comfy_program.node():
        loaded = load(options)
    seconds = time.perf_counter() - started
    return seconds + sample(loaded.model, options.latent, 2, cfg=options.cfg).step_seconds[0]


def load(options: argparse.Namespace) -> Loaded:
    """The model by the loader of this kind."""
    if options.kind is not Kind.COURIER:
        model = patched(options, comfy_program.load_core(options.model))
        return Loaded(model, int, lambda: None)
    model = comfy_program.load_courier(
        options.model, budget_bytes(options.device_gib), budget_bytes(options.host_gib)
    )
    engine = model.courier_engine
    return Loaded(
        patched(options, model),
        lambda: engine.snapshot().traffic.shipped_bytes,
        lambda: courier_record(engine),
    )


def patched(options: argparse.Namespace, model: Any) -> Any:
    """With the LoRA, if one was asked for."""
    if not options.lora_rank:
        return model
    from bench.lora import random_lora, with_lora

    return with_lora(model, (random_lora(options.model, options.lora_rank, 1), 1.0))


def measure_run(
    options: argparse.Namespace, loaded: Loaded, latent: Latent, number: int
) -> RunRecord:
    """One call of the sampler; the latent goes to a file of its own."""
    import torch

    from bench.sampling import sample

    sampled = sample(loaded.model, latent, options.steps, loaded.shipped_bytes, cfg=options.cfg)
    if options.kind is Kind.RESIDENT:
        check_resident(loaded.model)
    file = options.latent_file.with_name(f"{options.latent_file.name}-{latent}-{number}.pt")
    torch.save(sampled.latent, file)
    streamed = (
        sampled.count_per_step()
        if options.kind is Kind.COURIER
        else max(0, int(loaded.model.model_size() - loaded.model.loaded_size()))
    )
    return RunRecord(
        latent=str(latent),
        step_seconds=sampled.step_seconds,
        total_seconds=sampled.total_seconds,
        streamed_bytes=streamed,
        sha256=hashlib.sha256(sampled.latent.contiguous().numpy().tobytes()).hexdigest(),
        finite=bool(sampled.latent.isfinite().all()),
        latent_file=file.name,
        courier=loaded.courier(),
    )


def check_resident(model: Any) -> None:
    """Raises: ContenderError if the core left a part of the model off the card."""
    loaded, size = model.loaded_size(), model.model_size()
    if loaded < FULLY_LOADED * size:
        raise ContenderError(
            f"the core put {loaded} of the model's {size} bytes on the card: it is not resident"
        )


def courier_record(engine: Any) -> CourierRecord:
    """The engine's own figures now."""
    snapshot = engine.snapshot()
    memory = snapshot.memory
    placements: dict[str, int] = {}
    for layer in snapshot.layers:
        placements[layer.placement.value] = placements.get(layer.placement.value, 0) + 1
    return CourierRecord(
        device_peak_bytes=memory.device_peak_bytes,
        activation_peak_bytes=memory.activation_peak_bytes,
        locked_bytes=memory.locked_bytes,
        staging_bytes=memory.staging_bytes,
        copied_bytes=memory.copied_bytes,
        placements=placements,
        notes=list(snapshot.notes),
    )


def private_stdout() -> IO[str]:
    """The real stdout, for the parent alone; whatever else is printed goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    channel = private_stdout()

    def say(line: str) -> None:
        channel.write(line + "\n")
        channel.flush()

    try:
        comfy_program.start(options.comfyui_args, options.dynamic_vram)
        if options.kind is Kind.COURIER:
            comfy_program.load_pack()
        comfy_program.touch_device()
        say("ready")
        if sys.stdin.readline().strip() != "go":
            return 1  # the parent is gone, or has changed its mind
        say(json.dumps({"contender": dataclasses.asdict(measure(options))}))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        say(json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
