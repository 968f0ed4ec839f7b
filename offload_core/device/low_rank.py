"""Adding products of thin matrices to a weight, with the roundings of merged LoRAs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Term:
    """``scale * (up @ down)``.

    Attributes:
        up: shape (rows, rank), contiguous, floating, on the device of the weight.
        down: shape (rank, columns), contiguous, of the dtype of ``up``.
    """

    up: torch.Tensor
    down: torch.Tensor
    scale: float


@dataclass(frozen=True)
class LowRank:
    """``weight`` is to become the sum of itself and ``terms``, in place.

    Attributes:
        weight: shape (rows, ...), contiguous, floating, on the device; each row has as many
            elements as the terms have columns.
        terms: one or more, added one after the other.
        via: the dtype in which sums are made. A product is always one of float32 matrices; it is
            scaled in float32 and rounded to ``via``. The weight is rounded to ``via``, each sum is,
            and the last one to the weight's own dtype.
    """

    weight: torch.Tensor
    terms: tuple[Term, ...]
    via: torch.dtype


def add_low_rank(updates: Iterable[LowRank]) -> None:
    """By torch's operators, on any device. Takes a float32 product of the weight's size meanwhile,
    and a copy of the weight where there are several roundings."""
    for one in updates:
        is_single = len(one.terms) == 1 and one.via is torch.float32
        total = one.weight if is_single else one.weight.to(one.via, copy=True)
        for term in one.terms:
            product = torch.mm(term.up.to(torch.float32), term.down.to(torch.float32))
            product *= term.scale
            # In place torch sums in the wider dtype of the two, and rounds once.
            total += product.view(total.shape).to(one.via)
        if not is_single:
            one.weight.copy_(total)
