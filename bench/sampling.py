"""One call of ComfyUI's own sampler, timed step by step. Runs where ComfyUI is importable."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.comfy_program import node
from bench.records import SETTLING_STEPS
from bench.units import Latent

CONDITIONING_TOKENS = 512
"""What Wan's text encoder gives for any prompt."""


@dataclass(frozen=True)
class Sampled:
    """A latent (float32, on the CPU), seconds by step, and a counter's figure after each step.

    ``step_seconds[0]`` counts from the call of the sampler. Each step ends with a synchronised
    device, so what runs ahead of a step is seen in the figures of the step before it.
    """

    latent: torch.Tensor
    step_seconds: list[float]
    total_seconds: float
    counts: list[int]

    def count_per_step(self) -> int | None:
        """Mean growth of the counter over the steady steps."""
        steady = self.counts[SETTLING_STEPS - 1 :]
        if len(steady) < 2:
            steady = self.counts
        if len(steady) < 2:
            return None
        return (steady[-1] - steady[0]) // (len(steady) - 1)


def sample(
    model: Any,
    latent: Latent,
    steps: int,
    count: Callable[[], int] = int,
    tokens: int = CONDITIONING_TOKENS,
    cfg: float = 1.0,
) -> Sampled:
    """euler, simple, batch 1; noise and conditioning are seeded and made on the CPU.

    Args:
        count: called after each step, such as the bytes shipped so far.
    """
    import bootstrap
    import comfy.sample

    shape = (1, model.model.latent_format.latent_channels, *_sizes(latent))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    positive = bootstrap.conditioning(model, 0, tokens)
    negative = positive if cfg == 1.0 else bootstrap.conditioning(model, 1, tokens)
    times: list[float] = []
    counts: list[int] = []

    def step_done(*_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        counts.append(count())

    started = time.perf_counter()
    with node():
        found = comfy.sample.sample(
            model, noise, steps, cfg, "euler", "simple", positive, negative, torch.zeros(shape),
            seed=0, disable_pbar=True, callback=step_done,
        )  # fmt: skip
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    total = time.perf_counter() - started
    seconds = [after - before for before, after in itertools.pairwise([started, *times])]
    return Sampled(found.detach().float().cpu().clone(), seconds, total, counts)


def _sizes(latent: Latent) -> tuple[int, int, int]:
    return latent.frames, latent.height, latent.width
