"""The steady step of Courier against ComfyUI's own with everything on the card, in turns.

``python3 -m bench.turns MODEL --device-gib 12``: both models in one process, by turns, so that a
drift of the card's clocks falls on both alike. The card must have room for both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench import comfy_program
from bench.one_model import build_parser, loaded_model
from bench.records import steady
from bench.units import Latent


@dataclass(frozen=True)
class Turns:
    """Steady seconds by round, and whether every latent was the same."""

    core: Sequence[float]
    courier: Sequence[float]
    is_equal: bool

    @property
    def ratios(self) -> list[float]:
        """Courier's step over the core's, round by round."""
        return [ours / theirs for ours, theirs in zip(self.courier, self.core, strict=True)]


def measure(core: Any, courier: Any, latent: Latent, steps: int, rounds: int) -> Turns:
    """One run of each to settle, then ``rounds`` of both."""
    import torch

    from bench.sampling import sample

    want = sample(core, latent, steps).latent
    if core.loaded_size() < core.model_size():
        raise comfy_program.ProgramError(
            "ComfyUI did not load its model whole; free the card, or take a smaller model"
        )
    is_equal = torch.equal(sample(courier, latent, steps).latent, want)
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        for model, found in zip((core, courier), seconds, strict=True):
            sampled = sample(model, latent, steps)
            found.append(steady(sampled.step_seconds))
            is_equal = is_equal and torch.equal(sampled.latent, want)
    return Turns(*seconds, is_equal)


def report_lines(turns: Turns) -> list[str]:
    """A table, and the median ratio."""
    rounds = zip(turns.core, turns.courier, turns.ratios, strict=True)
    return [
        "| round | core, all resident, s/step | Courier, s/step | ratio |",
        "|---|---|---|---|",
        *(f"| {n} | {a:.4f} | {b:.4f} | {c:.3f} |" for n, (a, b, c) in enumerate(rounds, start=1)),
        "",
        f"Courier's steady step is {statistics.median(turns.ratios):.3f} times the core's; every "
        f"latent equal: {'yes' if turns.is_equal else 'NO'}.",
    ]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked."""
    return build_parser("bench.turns", __doc__, steps=10, rounds=4).parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run it and print the table; 1 if a latent differed."""
    options = parse(arguments)
    with loaded_model(options) as courier:
        with comfy_program.node():
            core = comfy_program.load_core(options.model)
        turns = measure(core, courier, options.latent, options.steps, options.rounds)
    print("\n".join(report_lines(turns)), flush=True)
    return 0 if turns.is_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
