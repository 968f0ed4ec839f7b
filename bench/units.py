"""Sizes and latent shapes as command lines write them. Pure, standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Latent:
    """Frames, height and width of a video latent; batch and channels are the model's."""

    frames: int
    height: int
    width: int

    @staticmethod
    def parse(text: str) -> Latent:
        """``"5x60x104"``. Raises: ValueError, in words."""
        return Latent(*_three(text, "a latent"))

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


@dataclass(frozen=True)
class ModelShape:
    """A Wan 2.1 t2v transformer; ``width`` is a multiple of 128."""

    depth: int
    width: int
    ffn: int

    @staticmethod
    def parse(text: str) -> ModelShape:
        """``"40x5120x13824"``. Raises: ValueError, in words."""
        return ModelShape(*_three(text, "a model shape"))

    def __str__(self) -> str:
        return f"{self.depth}x{self.width}x{self.ffn}"


def _three(text: str, what: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text.strip())
    if found is None:
        raise ValueError(f"{what} is three counts such as 5x60x104, not {text!r}")
    first, second, third = (int(count) for count in found.groups())
    return first, second, third


def gib(count_bytes: float) -> str:
    """``count_bytes`` in GiB with two decimals, without the unit."""
    return f"{count_bytes / GIB:.2f}"
