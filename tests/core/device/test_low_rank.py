"""Merging LoRAs: torch's way is the measure, and a kernel is used once it was seen to agree."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload_core.device import LowRank, Term
from offload_core.device import driver as driver_module
from offload_core.device import low_rank_kernel as kernels_module
from offload_core.device.driver import DriverError
from offload_core.device.low_rank import add_low_rank
from offload_core.device.low_rank_kernel import LowRankKernels
from offload_core.device.nvrtc import compile_cuda

ROWS, COLUMNS = 1024, 1028


def update(
    seed: int = 0, ranks: tuple[int, ...] = (4,), dtype: torch.dtype = torch.bfloat16,
    shape: tuple[int, ...] = (ROWS, COLUMNS),
) -> LowRank:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    columns = torch.Size(shape[1:]).numel()
    terms = tuple(
        Term(
            torch.randn(shape[0], rank, generator=generator),
            torch.randn(rank, columns, generator=generator),
            0.5 + place,
        )
        for place, rank in enumerate(ranks)
    )
    return LowRank(torch.randn(*shape, generator=generator).to(dtype), terms, torch.float32)


def cloned(one: LowRank) -> LowRank:
    return LowRank(one.weight.clone(), one.terms, one.via)


@pytest.mark.parametrize("via", [torch.float32, torch.float16])
def test_the_roundings_are_those_of_a_merged_lora(via: torch.dtype) -> None:
    one = update(ranks=(4, 3), shape=(6, 2, 5))
    one = LowRank(one.weight, one.terms, via)
    want = one.weight.to(via)
    for term in one.terms:
        product = torch.mm(term.up, term.down).reshape(want.shape)
        want = want + (term.scale * product).to(via)
    add_low_rank([one])
    assert torch.equal(one.weight, want.to(torch.bfloat16))


class Card:
    """A driver whose one kernel computes what the items say, wherever they point.

    ``wrong``: it adds a little more. ``compiler`` waits until it is let.
    """

    def __init__(self, wrong: bool = False) -> None:
        self.wrong = wrong
        self.launches: list[int] = []
        self.may_compile = threading.Event()
        self.cuModuleLoadData = Call(lambda *_: 0)
        self.cuModuleGetFunction = Call(lambda *_: 0)
        self.cuLaunchKernel = Call(self._launch)

    def compiler(self, source: str, macros: dict[str, int]) -> bytes:
        assert self.may_compile.wait(30)
        return b"image"

    def _launch(self, *arguments: Any) -> int:
        items = ctypes.cast(arguments[-2][0], ctypes.POINTER(kernels_module._Items))[0]
        tiles = 0
        for item in items.item[: items.count]:
            assert item.first_tile == tiles
            tiles += item.across * -(-item.rows // 128)
            self._perform(item)
        assert arguments[1] == tiles
        self.launches.append(items.count)
        return 0

    def _perform(self, item: Any) -> None:
        terms = tuple(
            Term(
                at(term.up, (item.rows, term.rank), torch.float32),
                at(term.down, (term.rank, item.columns), torch.float32),
                term.scale,
            )
            for term in item.term[: item.count]
        )
        weight = at(item.weight, (item.rows, item.columns), torch.bfloat16)
        add_low_rank([LowRank(weight, terms, torch.float32)])
        if self.wrong:
            weight[0, 0] += 1


class Call:
    """A function that takes attributes, as those of a C library do."""

    def __init__(self, answer: Callable[..., int]) -> None:
        self.answer = answer

    def __call__(self, *arguments: Any) -> int:
        return self.answer(*arguments)


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    buffer = (ctypes.c_ubyte * size).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def opened(monkeypatch: pytest.MonkeyPatch, card: Card) -> LowRankKernels:
    monkeypatch.setattr(driver_module, "_open", lambda name: card)
    return LowRankKernels(card.compiler)


def add(kernels: LowRankKernels, given: list[LowRank], card: Card) -> list[LowRank]:
    """As a backend does it; afterwards everything is compiled."""
    rest = kernels.add(given, 0)
    add_low_rank(rest)
    card.may_compile.set()
    for thread in kernels._compiling.values():
        thread.join(30)
    return rest


def test_a_kernel_is_compiled_meanwhile_then_proved_then_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card()
    kernels = opened(monkeypatch, card)
    left = []
    for _ in range(3):
        given = [update(seed, ranks) for seed in range(2) for ranks in ((4,), (4, 8))]
        wanted = [cloned(one) for one in given]
        add_low_rank(wanted)
        left.append(len(add(kernels, given, card)))
        for one, want in zip(given, wanted, strict=True):
            assert torch.equal(one.weight, want.weight)
    # Torch until it is there; then the first of each shape proves it.
    assert left == [4, 0, 0]
    assert card.launches == [1, 1, 1, 1, 2, 2]


def test_a_kernel_that_disagrees_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(wrong=True)
    kernels = opened(monkeypatch, card)
    for _ in range(3):
        one = update()
        want = cloned(one)
        add_low_rank([want])
        add(kernels, [one], card)
        assert torch.equal(one.weight, want.weight)
    assert card.launches == [1]


def test_more_than_one_launch_takes_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    kernels = opened(monkeypatch, card)
    for _ in range(3):
        add(kernels, [update(seed) for seed in range(50)], card)
    assert card.launches[-3:] == [24, 24, 2]


@pytest.mark.parametrize(
    "one",
    [
        update(shape=(64, 64)),
        update(shape=(1026, 1024)),
        update(shape=(1024, 1025)),
        update(ranks=(4,) * 5),
        update(ranks=(6,)),
        update(dtype=torch.float32),
    ],
    ids=["small", "rows", "columns", "many terms", "rank", "wide"],
)
def test_what_the_kernel_is_not_made_for_is_left(
    monkeypatch: pytest.MonkeyPatch, one: LowRank
) -> None:
    card = Card()
    kernels = opened(monkeypatch, card)
    for _ in range(3):
        assert add(kernels, [one], card) == [one]
    assert card.launches == []


def test_a_compiler_that_refuses_leaves_it_to_torch() -> None:
    def refuses(source: str, macros: dict[str, int]) -> bytes:
        raise DriverError("no compiler")

    kernels, card = LowRankKernels(refuses), Card()
    for _ in range(3):
        one = update()
        assert add(kernels, [one], card) == [one]


def test_a_machine_without_the_compiler_is_reported() -> None:
    with pytest.raises(DriverError, match="compiler cannot be opened"):
        compile_cuda("", "sm_90", {}, "999.0")
