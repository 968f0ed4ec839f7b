"""What a LoRA costs a step: Courier without it and with it, against ComfyUI's own with it merged.

``python3 -m bench.lora MODEL --device-gib 12``: all in one process, so the card must have room for
the whole model besides. The LoRA has random matrices for every weight matrix inside the blocks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import comfy_program
from bench.one_model import build_parser, loaded_model
from bench.records import steady
from bench.sampling import Sampled, sample
from bench.units import GIB


@dataclass(frozen=True)
class Row:
    """One run. ``first_seconds`` and ``shipped_bytes`` are those of its first step."""

    name: str
    first_seconds: float
    step_seconds: float
    shipped_bytes: int | None
    is_equal: bool | None
    peak_bytes: int


def random_lora(model: Path, rank: int, seed: int) -> dict[str, Any]:
    """In the form of a LoRA file, in bfloat16 on the CPU: for each matrix of that model."""
    import torch
    from safetensors import safe_open

    generator = torch.Generator().manual_seed(seed)
    found = {}
    with safe_open(model, framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    for name, shape in shapes.items():
        if len(shape) == 2 and name.endswith(".weight") and ".blocks." in f".{name}":
            key = f"diffusion_model.{name.removesuffix('.weight')}"
            rows, columns = shape
            up = torch.randn(rows, rank, generator=generator)
            down = torch.randn(rank, columns, generator=generator)
            found[f"{key}.lora_up.weight"] = (up * 0.01).bfloat16()
            found[f"{key}.lora_down.weight"] = (down * 0.01).bfloat16()
    return found


def with_lora(model: Any, *loras: tuple[dict[str, Any], float]) -> Any:
    """A clone with these LoRAs and strengths, as ComfyUI's own node makes it."""
    import comfy.sd

    for lora, strength in loras:
        model, _ = comfy.sd.load_lora_for_models(model, None, lora, strength, 0)
    return model


def rows(options: argparse.Namespace, courier: Any) -> Iterator[Row]:
    """Each is printed as it comes."""
    engine = courier.courier_engine
    first, second = (random_lora(options.model, options.rank, seed) for seed in (1, 2))
    one, weaker = ((first, 1.0),), ((first, 0.7),)
    two = ((first, 0.7), (second, 1.0))
    wanted: dict[str, Any] = {}
    if not options.courier_only:
        core = comfy_program.load_core(options.model)
        for name, loras in {"one": one, "weaker": weaker, "two": two}.items():
            found = sample(with_lora(core, *loras), options.latent, options.steps)
            wanted[name] = found.latent
            yield _row(f"ComfyUI, all resident, {name}", found)
        del core
        comfy_program.let_go()

    def shipped() -> int:
        return int(engine.snapshot().traffic.shipped_bytes)

    plan = [("no LoRA", (), None)] * 2
    plan += [("one", one, "one")] * 2 + [("weaker", weaker, "weaker")] * 2
    plan += [("two", two, "two")] * 2 + [("one again", one, "one")] + [("no LoRA", (), None)] * 2
    for name, loras, want in plan:
        before = shipped()
        found = sample(with_lora(courier, *loras), options.latent, options.steps, shipped)
        yield _row(
            f"Courier, {name}",
            found,
            found.counts[0] - before,
            wanted.get(want) if want else None,
        )


def _row(name: str, found: Sampled, shipped: int | None = None, want: Any = None) -> Row:
    import torch

    peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    equal = None if want is None else torch.equal(found.latent, want)
    step = steady(found.step_seconds)
    return Row(name, found.step_seconds[0], step, shipped, equal, peak)


def line(row: Row) -> str:
    """Of a table."""
    shipped = "-" if row.shipped_bytes is None else f"{row.shipped_bytes / GIB:.2f}"
    equal = {None: "-", True: "yes", False: "NO"}[row.is_equal]
    return (
        f"| {row.name} | {row.first_seconds:.3f} | {row.step_seconds:.4f} | {shipped} "
        f"| {row.peak_bytes / GIB:.2f} | {equal} |"
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked."""
    parser = build_parser("bench.lora", __doc__, steps=8, rounds=1)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--courier-only", action="store_true", help="without ComfyUI's own rows")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run it and print the table; 1 if a latent differed."""
    options = parse(arguments)
    print("| run | first step s | s/step | GiB in the first step | torch's peak, GiB | equal |")
    print("|---|---|---|---|---|---|")
    found: list[Row] = []
    with loaded_model(options) as courier:
        for row in rows(options, courier):
            found.append(row)
            print(line(row), flush=True)
    plain = [row.step_seconds for row in found if row.name == "Courier, no LoRA"]
    if plain:
        base = statistics.median(plain)
        for name in ("one", "weaker", "two"):
            mine = [row for row in found if row.name == f"Courier, {name}"]
            ratio = statistics.median(row.step_seconds for row in mine) / base
            print(f"{name}: {ratio:.3f} times the step without; first {mine[0].first_seconds:.3f}")
    return 1 if any(row.is_equal is False for row in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
