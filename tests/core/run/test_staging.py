"""Case 39 and staging: what cannot be locked is staged as far as the host budget allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

from offload_core.device import CopyPiece, DeviceEvent, FakeBackend
from offload_core.host import FileMapping
from offload_core.run import LayerEngine
from offload_core.run.shared import promised_host_bytes
from offload_core.run.source import LayerSource
from offload_core.values import Budget, EngineConfig, Placement

Over = Callable[..., LayerEngine]
Config = Callable[..., EngineConfig]

UNIT = 10_000


class StagingBackend(FakeBackend):
    """Has lanes, and sees that they are changed in whole units and while nothing ships."""

    staging_bytes = 4 * UNIT
    staging_unit_bytes = UNIT

    def __init__(self) -> None:
        super().__init__()
        self.staged = 0
        self.history: list[int] = []
        self.shipping = 0
        self.on_stage: Callable[[int], None] = lambda size: None

    def reserve_staging(self, size_bytes: int) -> None:
        assert size_bytes % UNIT == 0
        assert self.shipping == 0
        self.staged = size_bytes
        self.history.append(size_bytes)
        self.on_stage(size_bytes)

    def ship(self, pieces: Sequence[CopyPiece], after: DeviceEvent | None) -> Future[DeviceEvent]:
        self.shipping += 1
        try:
            return super().ship(pieces, after)
        finally:
            self.shipping -= 1

    def close(self) -> None:
        assert self.staged == 0


def pinned(engine: LayerEngine, share_of: Callable[..., int], host: int | None) -> Budget:
    return Budget(share_of(engine, 30), host)


@pytest.mark.parametrize("allowed", range(5))
@pytest.mark.parametrize("units", [0, 1, 3, 9])
def test_locks_refused_from_any_point_on_get_the_staging_that_the_budget_has_left(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    allowed: int,
    units: int,
) -> None:
    tiny = make_tiny(4, deep=True)
    fake = StagingBackend()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    locks = engine.plan(pinned(engine, share_of, None)).lock_bytes
    each = locks // 4
    host = max(locks, allowed * each + units * UNIT)
    limits: list[int] = []
    fake.on_stage = lambda size: limits.append(engine.snapshot().memory.host_bytes)
    fake.locker.refuse_after = allowed
    assert engine.load(pinned(engine, share_of, host)).staging_bytes == 0
    with engine.run():
        for _ in range(4):
            assert tiny.is_exact()
            engine.end_pass()
    snapshot = engine.snapshot()
    assert [layer.in_place for layer in snapshot.layers[:-1]] == [
        index < allowed for index in range(4)
    ]
    assert snapshot.memory.locked_bytes == sum(fake.locker.locked.values())
    if allowed == 4:
        assert (snapshot.notes, fake.staged) == ((), 0)
    else:
        assert fake.staged == min(4, (host - snapshot.memory.locked_bytes) // UNIT) * UNIT
        (note,) = snapshot.notes
        assert note == (
            f"{4 - allowed} layers stream from the file although their pages were to be locked: "
            f"layer blocks.{allowed}: the fake system has no page locks left"
        )
        assert snapshot.layers[allowed].placement is Placement.MAPPED
        assert snapshot.layers[allowed].reason.startswith("not locked: layer blocks.")
    assert snapshot.memory.staging_bytes == fake.staged
    assert max([snapshot.memory.host_bytes, *limits]) <= host
    # A kinder system: the locks are had, and the staging goes back.
    fake.locker.refuse_after = None
    engine.unload()
    assert fake.staged == 0
    engine.load(pinned(engine, share_of, host))
    with engine.run():
        assert tiny.is_exact()
        engine.end_pass()
    assert engine.snapshot().notes == ()
    assert engine.snapshot().memory.locked_bytes == locks
    assert fake.staged == 0


@pytest.mark.parametrize("host", [0, UNIT - 1, UNIT, 2 * UNIT + 5, 5 * UNIT, None])
def test_planned_staging_is_held_while_loaded_and_given_back(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    host: int | None,
) -> None:
    tiny = make_tiny(8, deep=True)
    fake = StagingBackend()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    planned = engine.load(pinned(engine, share_of, host))
    if host is not None:
        assert planned.staging_bytes == min(4, host // UNIT) * UNIT
    with engine.run():
        assert tiny.is_exact()
        engine.end_pass()
    memory = engine.snapshot().memory
    assert memory.staging_bytes == fake.staged == planned.staging_bytes
    assert memory.locked_bytes == planned.lock_bytes
    assert host is None or memory.host_bytes <= host
    assert promised_host_bytes(engine) == planned.lock_bytes + planned.staging_bytes
    engine.unload()
    assert (fake.staged, engine.snapshot().memory.host_bytes) == (0, 0)


def test_a_budget_of_nothing_stages_nothing_for_refused_locks_either(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(4, deep=True)
    fake = StagingBackend()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))
    engine.load(pinned(engine, share_of, 0))
    with engine.run():
        assert tiny.is_exact()
        engine.end_pass()
    assert fake.history == []


@pytest.mark.parametrize("host", [None, 5 * UNIT, UNIT, UNIT - 1, 0])
def test_a_large_load_has_lanes_of_its_own_for_as_long_as_it_takes(
    engine_over: Over,
    mapped: Callable[..., FileMapping],
    monkeypatch: pytest.MonkeyPatch,
    host: int | None,
) -> None:
    model = nn.ModuleList(Heap(1000) for _ in range(4))
    # Small weights that pass for large ones: what is worth lanes is a GiB or so in all.
    monkeypatch.setattr(LayerSource, "unlocked_bytes", lambda *_: 1 << 30)
    mapping = mapped(model)
    fake = StagingBackend()
    held: list[int] = []
    fake.on_ship = lambda pieces: held.append(fake.staged)
    engine = engine_over(model, fake, [mapping])
    planned = engine.load(Budget(None, host))
    want = 4 * UNIT if host is None else min(4, host // UNIT) * UNIT
    assert set(held) == {want}
    assert (planned.staging_bytes, fake.staged) == (0, 0)
    assert engine.snapshot().memory.host_bytes == 0
    for heap in model:
        assert int(heap.weight[-1]) == 7


class Heap(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 7, dtype=torch.uint8), requires_grad=False)


def test_staging_that_the_system_refuses_leaves_nothing_charged(
    make_tiny: Callable[..., Any], engine_over: Over, poisoned: Config, share_of: Callable[..., int]
) -> None:
    tiny = make_tiny(8, deep=True)
    fake = StagingBackend()
    engine = engine_over(tiny, fake, config=poisoned(margin_bytes=0))

    def refuse(size: int) -> None:
        if size:
            raise MemoryError("no chunks")

    fake.on_stage = refuse
    budget = pinned(engine, share_of, 3 * UNIT)
    with pytest.raises(MemoryError, match="no chunks"):
        engine.load(budget)
    fake.staged = 0
    assert engine.snapshot().memory.host_bytes == 0
    assert fake.allocated_bytes == 0
    fake.on_stage = lambda size: None
    engine.load(budget)
    with engine.run():
        assert tiny.is_exact()
    assert engine.snapshot().memory.staging_bytes == 3 * UNIT
