"""Weights that are used in another dtype than the file's: rounded on arrival as ``.to()`` would."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload_core.device import CpuBackend, DeviceBackend, FakeBackend
from offload_core.run import LayerEngine
from offload_core.values import Budget, EngineConfig, Switches

Over = Callable[..., LayerEngine]
Config = Callable[..., EngineConfig]


def halves(tiny: Any) -> dict[str, torch.dtype]:
    """Every weight as fp16, and the plain model and its input to compare with."""
    names = {name: torch.float16 for name, _ in tiny.module.named_parameters()}
    tiny.plain.half()
    for block in tiny.module.blocks:
        block.shift = block.shift.half()
    tiny.x = tiny.x.half()
    return names


def forward_is_exact(tiny: Any, order: Any = None) -> bool:
    with torch.no_grad():
        got = tiny.module(tiny.x, order)
    with torch.no_grad():
        want = tiny.plain(tiny.x, order)
    return torch.equal(got, want)


@pytest.mark.parametrize("hundredths", [0, 30, 60, 90, 100])
@pytest.mark.parametrize("slots", [1, 2])
def test_bf16_weights_used_as_fp16_equal_to_half_bit_for_bit(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    backend: DeviceBackend,
    hundredths: int,
    slots: int,
) -> None:
    tiny = make_tiny(5, deep=True)
    before = hashlib.sha256(tiny.path.read_bytes()).hexdigest()
    homes = dict(tiny.module.named_parameters())
    bits = {name: home.detach().view(torch.int16).clone() for name, home in homes.items()}
    seen: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            weight = module.weight
            assert weight.dtype is torch.float16
            want = homes[f"{name}.weight"].detach().to(torch.float16)
            assert torch.equal(weight.view(torch.int16), want.view(torch.int16))
            assert weight.stride() == want.stride()
            seen.append(name)

        return hook

    for name, module in tiny.module.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(look(name))
    wanted = halves(tiny)
    engine = engine_over(
        tiny, backend, config=poisoned(slots, margin_bytes=0), device_dtypes=wanted
    )
    engine.load(Budget(share_of(engine, hundredths), None))
    for order in (None, [4, 0, 2], [1, 1], None):
        with engine.run():
            for _ in range(2):
                assert forward_is_exact(tiny, order)
                engine.end_pass()
    assert set(seen) >= {"embed", "final", "blocks.0.lin", "blocks.4.more.3"}
    engine.unload()
    after = dict(tiny.module.named_parameters())
    assert all(after[name] is home for name, home in homes.items())
    assert all(torch.equal(home.view(torch.int16), bits[name]) for name, home in homes.items())
    assert hashlib.sha256(tiny.path.read_bytes()).hexdigest() == before


def test_the_same_model_without_the_rounding_is_not_what_is_wanted(
    make_tiny: Callable[..., Any], engine_over: Over
) -> None:
    """That the comparison above can fail."""
    tiny = make_tiny(2)
    engine = engine_over(tiny)
    engine.load(Budget())
    assert tiny.module.embed.weight.dtype is torch.bfloat16
    halves(tiny)
    with engine.run(), pytest.raises(RuntimeError, match="dtype"):
        forward_is_exact(tiny)


def test_some_weights_are_rounded_and_their_neighbours_are_not(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(4, deep=True)
    wanted = {
        name: torch.float16
        for number, (name, _) in enumerate(tiny.module.named_parameters())
        if number % 3 == 0
    }
    homes = {name: home.detach() for name, home in tiny.module.named_parameters()}
    checked: set[str] = set()

    def look(prefix: str) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            for name, weight in module.named_parameters():
                full = f"{prefix}.{name}"
                want = homes[full].to(wanted.get(full, torch.bfloat16))
                assert weight.dtype is want.dtype
                assert torch.equal(weight.view(torch.int16), want.view(torch.int16))
                checked.add(full)

        return hook

    engine = engine_over(tiny, config=poisoned(margin_bytes=0), device_dtypes=wanted)
    for index, block in enumerate(tiny.module.blocks):
        # Behind ours, so that the layer's weights are in place.
        block.register_forward_pre_hook(look(f"blocks.{index}"))

        def no_forward(x: torch.Tensor) -> torch.Tensor:
            return x

        block.forward = no_forward
    for hundredths in (0, 40, 70, 95, 100):
        engine.load(Budget(share_of(engine, hundredths), None))
        for _ in range(2):
            with engine.run():
                for block in tiny.module.blocks:
                    block(tiny.x)
    assert checked == {name for name in homes if name.startswith("blocks.")}


def test_a_layer_that_is_already_there_is_not_rounded_twice(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    """Rounding bytes that are rounded already would read fp16 as bf16: noise."""
    tiny = make_tiny(5, deep=True)
    fake = FakeBackend()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0), device_dtypes=halves(tiny))
    chance = random.Random(0)
    for _ in range(40):
        engine.load(Budget(share_of(engine, chance.randrange(101)) + 20_000, 0))
        fake.activations_bytes = chance.randrange(20_000)
        with engine.run():
            for order in (None, [2, 2, 1], None):
                assert forward_is_exact(tiny, order)
                engine.end_pass()


class Cancel(BaseException):
    pass


def test_a_cancelled_wait_rounds_what_arrives_later_once(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    gate: Any,
) -> None:
    tiny = make_tiny(4, deep=True)
    fake = FakeBackend()
    fake.on_ship = gate
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0), device_dtypes=halves(tiny))
    engine.load(Budget(share_of(engine, 40), 0))
    gate.shut()

    def interrupt() -> None:
        gate.await_courier()
        raise Cancel

    with pytest.raises(Cancel), engine.run(interrupt):
        tiny.module(tiny.x)
    with engine.run(interrupt=gate.open):
        assert forward_is_exact(tiny)
    with engine.run():
        assert forward_is_exact(tiny)


def test_the_self_check_expects_what_was_rounded(
    make_tiny: Callable[..., Any], engine_over: Over, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(4, deep=True)
    config = EngineConfig(margin_bytes=0, switches=Switches(self_check=True, poison=True))
    engine = engine_over(tiny, CpuBackend(), config=config, device_dtypes=halves(tiny))
    for hundredths in (20, 80, 100):
        engine.load(Budget(share_of(engine, hundredths), None))
        with engine.run():
            assert forward_is_exact(tiny)


def test_the_status_shows_the_dtype_of_the_file(
    make_tiny: Callable[..., Any], engine_over: Over
) -> None:
    tiny = make_tiny(2)
    engine = engine_over(tiny, device_dtypes=halves(tiny))
    engine.load(Budget())
    assert {layer.dtypes for layer in engine.snapshot().layers} == {("bfloat16",)}
    assert engine.snapshot().memory.copied_bytes == 0
