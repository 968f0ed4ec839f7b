"""The self-check names what a broken transfer changed, and is quiet about what is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from offload_core.device import CopyPiece, DeviceEvent, FakeBackend
from offload_core.run import LayerEngine
from offload_core.values import Budget, EngineConfig, Switches, TransferError

Over = Callable[..., LayerEngine]


class FlippingBackend(FakeBackend):
    """After ``flip_at`` shipments, one byte of each arrives changed: ``where`` from its start."""

    def __init__(self) -> None:
        super().__init__()
        self.flip_at: int | None = None
        self.where = 0

    def ship(self, pieces: Sequence[CopyPiece], after: DeviceEvent | None) -> Future[DeviceEvent]:
        if self.flip_at is not None:
            self.flip_at -= 1
            if self.flip_at < 0:
                first = pieces[0]
                broken = first.source.clone()
                broken[self.where] ^= 1
                pieces = [CopyPiece(first.destination, broken, False), *pieces[1:]]
        return super().ship(pieces, after)


@pytest.fixture
def checked() -> EngineConfig:
    switches = Switches(poison=True, self_check=True)
    return EngineConfig(interrupt_poll_seconds=0.001, switches=switches)


@pytest.mark.parametrize("where", [0, 1, 63])
@pytest.mark.parametrize("kind", ["streamed", "resident"])
def test_a_changed_byte_stops_the_run_and_names_layer_and_weight(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    budget_for: Callable[..., Budget],
    checked: EngineConfig,
    where: int,
    kind: str,
) -> None:
    tiny, fake = make_tiny(3), FlippingBackend()
    fake.where = where
    engine = engine_over(tiny, fake, config=checked)
    streaming = budget_for(engine, "mapped")
    text = r"layer blocks\.\d: weight blocks\.\d\.[\w.]+ arrived on the device with other bytes"
    if kind == "resident":
        fake.flip_at = 1  # the base goes first
        with pytest.raises(TransferError, match=text):
            engine.load(Budget())
        assert fake.allocated_bytes == 0
    else:
        engine.load(streaming)
        with engine.run():
            assert tiny.is_exact()
        fake.flip_at = 0
        with engine.run():
            for _ in range(2):  # the second time too: what was found broken is not used
                with pytest.raises(TransferError, match=text):
                    tiny.is_exact([0, 1, 2, 0, 1, 2])
    fake.flip_at = None
    engine.load(streaming)
    with engine.run():
        assert tiny.is_exact()


def test_what_is_rounded_on_arrival_passes_the_check(
    mapped: Callable[..., Any], make_dit: Callable[[int], Any], checked: EngineConfig,
    engine_over: Over,
) -> None:  # fmt: skip
    model = make_dit(3).to(torch.bfloat16)
    mapping = mapped(model)
    for block in model.blocks:
        block.shift = block.shift.to(torch.float16)
    names = [name for name, _ in model.named_parameters()]
    from offload_core.run import attach

    fake = FakeBackend()
    engine = attach(
        model, fake, [mapping], checked, device_dtypes=dict.fromkeys(names, torch.float16)
    )
    whole = engine.plan(Budget()).device_bytes
    x = torch.randn(2, 64, dtype=torch.float16)
    for budget in (Budget(), Budget(whole - 1, None), Budget(whole * 2 // 3, 0)):
        engine.load(budget)
        with engine.run():
            model(x)
    engine.detach()
    assert fake.violations == []


def test_a_layer_is_locked_when_it_is_first_shipped_and_not_before(
    make_tiny: Callable[..., Any], engine_over: Over, budget_for: Callable[..., Budget]
) -> None:
    tiny, fake = make_tiny(5), FakeBackend()
    engine = engine_over(tiny, fake)
    engine.load(budget_for(engine, "pinned"))
    assert fake.locker.locked == {}, "a model that does not run locks nothing"
    with engine.run():
        assert fake.locker.locked == {}
        assert tiny.is_exact()
        assert len(fake.locker.locked) == 5
    engine.unload()
    assert fake.locker.locked == {}
