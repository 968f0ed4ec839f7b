"""The kernel that merges LoRAs, on a real card: torch's own bits, or torch itself."""

from __future__ import annotations

import itertools

import pytest
import torch

from offload_core.device import LowRank, Term, backend_for
from offload_core.device.cuda import _LOW_RANK
from offload_core.device.low_rank import add_low_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WEIGHTS = (torch.bfloat16, torch.float16)
SUMS = (torch.float32, torch.float16)
FACTORS = (torch.float32, torch.bfloat16, torch.float16)


def updates(
    shape: tuple[int, ...], ranks: tuple[int, ...], weight: torch.dtype, via: torch.dtype,
    factor: torch.dtype, seed: int = 0,
) -> LowRank:  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(seed)

    def numbers(*sizes: int, scale: float) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda") * scale

    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    terms = tuple(
        Term(
            numbers(rows, rank, scale=0.1).to(factor),
            numbers(rank, columns, scale=0.1).to(factor),
            0.7 - index,
        )
        for index, rank in enumerate(ranks)
    )
    return LowRank(numbers(*shape, scale=0.02).to(weight), terms, via)


def cloned(update: LowRank) -> LowRank:
    return LowRank(update.weight.clone(), update.terms, update.via)


def compiled() -> None:
    """Wait for the threads that compile."""
    for kernels in _LOW_RANK.values():
        for thread in kernels._compiling.values():
            thread.join(60)


@pytest.mark.parametrize(
    ("weight", "via", "factor"), list(itertools.product(WEIGHTS, SUMS, FACTORS))
)
@pytest.mark.parametrize("ranks", [(64,), (16, 7)])
def test_every_kind_has_torchs_bits_before_and_after_the_kernel_is_there(
    weight: torch.dtype, via: torch.dtype, factor: torch.dtype, ranks: tuple[int, ...]
) -> None:
    backend = backend_for(torch.device("cuda"))
    shapes = [(1024, 1536), (1536, 1024), (640, 320, 3, 3), (100, 260), (3, 5)]
    for round_number in range(3):
        given = [
            updates(shape, ranks, weight, via, factor, seed)
            for seed, shape in enumerate(shapes * 2)
        ]
        wanted = [cloned(update) for update in given]
        add_low_rank(wanted)
        before = [update.weight.clone() for update in given]
        backend.add_low_rank(given)
        for update, want, old in zip(given, wanted, before, strict=True):
            assert torch.equal(update.weight, want.weight), (round_number, update.weight.shape)
            assert not torch.equal(update.weight, old)
        compiled()


def test_the_kernel_is_what_does_the_large_ones() -> None:
    backend = backend_for(torch.device("cuda"))
    update = updates((5120, 5120), (64,), torch.bfloat16, torch.float32, torch.bfloat16)
    for _ in range(3):
        backend.add_low_rank([cloned(update)])
        compiled()
    kernels = _LOW_RANK[torch.cuda.current_device()]
    shapes = {(s.rows, s.columns): ok for s, ok in kernels._proved.items()}
    assert shapes[5120, 5120] is True
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    again = cloned(update)
    backend.add_low_rank([again])
    # Nothing but the weight itself: torch's way takes two copies in float32.
    assert torch.cuda.max_memory_allocated() - held <= again.weight.nbytes + (1 << 20)


def test_more_weights_than_one_launch_takes_are_all_done() -> None:
    backend = backend_for(torch.device("cuda"))
    given = [
        updates((1024, 1024), (8,), torch.float16, torch.float32, torch.float16, seed)
        for seed in range(60)
    ]
    wanted = [cloned(update) for update in given]
    add_low_rank(wanted)
    for _ in range(2):
        tried = [cloned(update) for update in given]
        backend.add_low_rank(tried)
        compiled()
    for update, want in zip(tried, wanted, strict=True):
        assert torch.equal(update.weight, want.weight)


def test_numbers_that_are_no_numbers_come_out_as_torchs() -> None:
    backend = backend_for(torch.device("cuda"))
    update = updates((1024, 1024), (16,), torch.bfloat16, torch.float16, torch.float32)
    for _ in range(2):
        backend.add_low_rank([cloned(update)])
        compiled()
    update.weight[0, :4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 6e4])
    update.terms[0].down[0, 8] = float("nan")
    update.terms[0].down[0, 9] = 1e30
    want, got = cloned(update), cloned(update)
    add_low_rank([want])
    backend.add_low_rank([got])
    assert torch.equal(got.weight.isnan(), want.weight.isnan())
    assert torch.equal(got.weight.nan_to_num(), want.weight.nan_to_num())
