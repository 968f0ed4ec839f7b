"""A device whose shipments are answered later, by another thread, in another order than given."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from offload_core.device import CopyPiece, DeviceEvent, FakeBackend
from offload_core.run import LayerEngine, attach
from offload_core.values import (
    Budget,
    EngineConfig,
    EngineState,
    LayerState,
    StateError,
    TransferError,
)

Over = Callable[..., LayerEngine]
Config = Callable[..., EngineConfig]

ORDERS: Sequence[Sequence[int] | None] = (
    None,
    [0, 1, 3, 4],
    None,
    [0, 1, 4],
    [4, 3, 2, 1, 0],
    [1, 1, 0, 1, 2, 3, 4],
    [],
    None,
)


@dataclass(eq=False)
class Shipment:
    """One that was given and not answered yet."""

    number: int
    pieces: Sequence[CopyPiece]
    after: DeviceEvent | None
    future: Future[DeviceEvent] = field(default_factory=Future)


class LaneLike(FakeBackend):
    """The copies of a shipment are issued by a thread of its own, which then answers.

    It takes the shipments as ``choose`` says: given those that wait, the place of the next, or
    None to wait for more. ``answered`` are their numbers in the order of the answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.choose: Callable[[list[Shipment]], int | None] = lambda waiting: 0
        self.fail: Callable[[Shipment], None] = lambda shipment: None
        self.answered: list[int] = []
        self.given = 0
        self.changed = threading.Condition()
        self.waiting: list[Shipment] = []
        self._ended = False
        self._thread: threading.Thread | None = None

    def ship(self, pieces: Sequence[CopyPiece], after: DeviceEvent | None) -> Future[DeviceEvent]:
        if self.on_ship is not None:
            self.on_ship(pieces)
        with self.changed:
            assert not self._ended
            self.given += 1
            shipment = Shipment(self.given, list(pieces), after)
            self.waiting.append(shipment)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="lanes", daemon=True)
                self._thread.start()
            self.changed.notify_all()
        return shipment.future

    def poke(self) -> None:
        """Have ``choose`` asked again."""
        with self.changed:
            self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self._ended = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(60)
            assert not self._thread.is_alive()

    def _work(self) -> None:
        while (shipment := self._next()) is not None:
            self._issue(shipment)
            del shipment

    def _next(self) -> Shipment | None:
        with self.changed:
            while True:
                place = self.choose(self.waiting) if self.waiting else None
                if place is not None:
                    return self.waiting.pop(place)
                if self._ended:
                    return None
                self.changed.wait()

    def _issue(self, shipment: Shipment) -> None:
        gate, self.on_ship = self.on_ship, None
        try:
            self.fail(shipment)
            answer = super().ship(shipment.pieces, shipment.after).result(0)
        except BaseException as error:
            self.answered.append(shipment.number)
            shipment.future.set_exception(error)
            # Or the frames that the error keeps would keep the pieces.
            shipment.pieces = ()
        else:
            self.answered.append(shipment.number)
            shipment.future.set_result(answer)
        finally:
            self.on_ship = gate


@pytest.fixture
def lanes() -> Iterator[LaneLike]:
    made = LaneLike()
    yield made
    made.choose = lambda waiting: 0
    made.end()


def inversions(numbers: Sequence[int]) -> int:
    """How many were answered before one that was given earlier."""
    return sum(
        later < number for place, number in enumerate(numbers) for later in numbers[place + 1 :]
    )


@pytest.mark.parametrize("hundredths", [30, 50, 70])
@pytest.mark.parametrize("slots", [2, 3])
def test_every_order_is_exact_when_the_last_that_was_given_is_answered_first(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    lanes: LaneLike,
    hundredths: int,
    slots: int,
) -> None:
    tiny = make_tiny(5, deep=True)
    engine = engine_over(tiny, lanes, config=poisoned(slots, margin_bytes=0))
    engine.load(Budget(share_of(engine, hundredths) + 100, None))
    lanes.answered.clear()
    polls = [0]

    def choose(waiting: list[Shipment]) -> int | None:
        # One alone is held until the model has asked for it again and again: another may come.
        if len(waiting) < 2 and polls[0] < 4:
            return None
        polls[0] = 0
        return len(waiting) - 1

    def interrupt() -> None:
        polls[0] += 1
        lanes.poke()

    lanes.choose = choose
    for order in ORDERS:
        with engine.run(interrupt):
            assert tiny.is_exact(order)
    lanes.choose = lambda waiting: 0
    assert inversions(lanes.answered) > 5


@pytest.mark.parametrize("seed", range(4))
def test_random_answers_through_loads_runs_corrections_and_unloads_stay_exact(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    lanes: LaneLike,
    seed: int,
) -> None:
    chance = random.Random(seed)
    tiny = make_tiny(5, deep=True)
    lanes.choose = lambda waiting: chance.randrange(len(waiting))
    lanes.activations_bytes = 0
    engine = engine_over(tiny, lanes, config=poisoned(1 + seed % 3, margin_bytes=0))
    shares = random.Random(seed)
    for _ in range(40):
        budget = Budget(share_of(engine, shares.randrange(101)) + 30_000, shares.choice([None, 0]))
        planned = engine.load(budget, shares.randrange(30_000))
        assert engine.snapshot().memory.device_bytes == planned.device_bytes
        lanes.activations_bytes = shares.randrange(30_000)
        with engine.run():
            for _ in range(shares.randrange(4)):
                assert tiny.is_exact(shares.choice(ORDERS))
                engine.end_pass()
        if shares.random() < 0.2:
            engine.unload()
            assert tiny.is_exact()


def test_a_load_has_all_its_shipments_out_before_it_waits_for_the_first(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    lanes: LaneLike,
) -> None:
    tiny = make_tiny(5, deep=True)
    engine = engine_over(tiny, lanes, config=poisoned(margin_bytes=0))
    budget = Budget(share_of(engine, 60), 0)
    coming = 1 + sum(layer.resident_bytes > 0 for layer in engine.plan(budget).layers)
    assert coming == 6
    remaining = [coming]

    def all_then_backwards(waiting: list[Shipment]) -> int | None:
        if len(waiting) < remaining[0]:
            return None
        remaining[0] -= 1
        return len(waiting) - 1

    lanes.choose = all_then_backwards
    engine.load(budget)
    assert lanes.answered == [6, 5, 4, 3, 2, 1]
    lanes.choose = lambda waiting: 0
    with engine.run():
        assert tiny.is_exact()


@pytest.mark.parametrize("kind", [OSError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("which", range(1, 7))
def test_a_shipment_of_a_load_that_fails_late_leaves_nothing(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    lanes: LaneLike,
    kind: type[BaseException],
    which: int,
) -> None:
    tiny = make_tiny(5, deep=True)
    engine = engine_over(tiny, lanes, config=poisoned(margin_bytes=0))
    budget = Budget(share_of(engine, 60), 0)
    error = kind("the drive was away")

    def fail(shipment: Shipment) -> None:
        if shipment.number == which:
            raise error

    lanes.fail = fail
    lanes.choose = lambda waiting: len(waiting) - 1
    with pytest.raises(kind, match="the drive was away") as caught:
        engine.load(budget)
    assert caught.value is error
    assert engine.state is EngineState.UNLOADED
    assert lanes.allocated_bytes == 0
    assert lanes.waiting == []
    assert tiny.is_exact()
    engine.load(budget)
    with engine.run():
        assert tiny.is_exact()


@pytest.mark.parametrize("kind", [OSError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", range(5))
def test_an_error_that_comes_late_surfaces_with_layer_and_file_and_the_next_run_works(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    lanes: LaneLike,
    kind: type[BaseException],
    call: int,
) -> None:
    tiny = make_tiny(3, deep=True)
    engine = engine_over(tiny, lanes, config=poisoned(margin_bytes=0))
    engine.load(Budget(share_of(engine, 40), 0))
    first = lanes.given + 1
    error = kind("no")

    def fail(shipment: Shipment) -> None:
        if shipment.number == first + call:
            raise error

    lanes.fail = fail
    text = rf"layer blocks\.{call % 3} could not .* from deep3-64-0\.safetensors: {kind.__name__}"
    with pytest.raises(TransferError, match=text) as caught, engine.run():
        tiny.module(tiny.x, [0, 1, 2] * 3)
    assert caught.value.__cause__ is error
    with engine.run():
        assert tiny.is_exact()
    assert lanes.violations == []


class Cancel(BaseException):
    """As ComfyUI's interrupt: no Exception."""


@pytest.mark.parametrize("order", [None, [3], [2, 1], [0]])
def test_what_was_out_when_a_run_was_cancelled_lands_nowhere_else(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    lanes: LaneLike,
    order: Sequence[int] | None,
) -> None:
    tiny = make_tiny(4, deep=True)
    engine = engine_over(tiny, lanes, config=poisoned(margin_bytes=0))
    engine.load(Budget(share_of(engine, 40), 0))

    def interrupt() -> None:
        with lanes.changed:
            if len(lanes.waiting) == 2:
                raise Cancel

    for answer in (0, -1):
        lanes.choose = lambda waiting: None
        with pytest.raises(Cancel), engine.run(interrupt):
            tiny.module(tiny.x)
        assert engine.state is EngineState.LOADED
        states = [layer.state for layer in engine.snapshot().layers[:2]]
        assert states == [LayerState.LOADING] * 2

        def answer_one(waiting: list[Shipment], place: int = answer) -> int:
            return place % len(waiting)

        lanes.choose = answer_one

        def poke() -> None:
            lanes.poke()

        with engine.run(poke):
            assert tiny.is_exact(order)
        with engine.run():
            assert tiny.is_exact()


def test_an_order_of_a_cancelled_run_that_failed_late_is_not_the_next_runs_error(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    lanes: LaneLike,
) -> None:
    tiny = make_tiny(4, deep=True)
    engine = engine_over(tiny, lanes, config=poisoned(margin_bytes=0))
    engine.load(Budget(share_of(engine, 40), 0))
    last = lanes.given

    def fail(shipment: Shipment) -> None:
        if shipment.number <= last + 2:
            raise OSError("the drive was away")

    def interrupt() -> None:
        with lanes.changed:
            if len(lanes.waiting) == 2:
                raise Cancel

    lanes.fail = fail
    lanes.choose = lambda waiting: None
    with pytest.raises(Cancel), engine.run(interrupt):
        tiny.module(tiny.x)
    lanes.choose = lambda waiting: len(waiting) - 1
    with engine.run(lanes.poke):
        assert tiny.is_exact()


def test_unloading_waits_for_what_is_out_and_gives_up_with_everything_kept(
    make_tiny: Callable[..., Any],
    engine_over: Over,
    poisoned: Config,
    share_of: Callable[..., int],
    lanes: LaneLike,
) -> None:
    tiny = make_tiny(4, deep=True)
    engine = engine_over(tiny, lanes, config=poisoned(margin_bytes=0, patience_seconds=0.01))
    engine.load(Budget(share_of(engine, 40), 0))
    held = lanes.allocated_bytes

    def interrupt() -> None:
        with lanes.changed:
            if len(lanes.waiting) == 2:
                raise Cancel

    lanes.choose = lambda waiting: None
    with pytest.raises(Cancel), engine.run(interrupt):
        tiny.module(tiny.x)
    for call in (engine.unload, engine.detach, lambda: engine.load(Budget())):
        with pytest.raises(StateError, match=r"did not end its copy within 0\.01 s"):
            call()
        assert lanes.allocated_bytes == held
    lanes.choose = lambda waiting: 0
    with engine.run(lanes.poke):
        assert tiny.is_exact()
    engine.unload()
    assert tiny.is_exact()


def test_an_engine_dropped_while_shipments_are_out_waits_for_them_and_frees_everything(
    make_tiny: Callable[..., Any],
    poisoned: Config,
    share_of: Callable[..., int],
    lanes: LaneLike,
) -> None:
    tiny = make_tiny(4, deep=True)
    engine = attach(tiny.module, lanes, [tiny.mapping], poisoned(margin_bytes=0))
    engine.load(Budget(share_of(engine, 40), None))

    def interrupt() -> None:
        with lanes.changed:
            if len(lanes.waiting) == 2:
                raise Cancel

    lanes.choose = lambda waiting: None
    with pytest.raises(Cancel), engine.run(interrupt):
        tiny.module(tiny.x)

    def open_up() -> None:
        lanes.choose = lambda waiting: len(waiting) - 1
        lanes.poke()

    opener = threading.Thread(target=open_up)
    opener.start()
    del engine
    opener.join()
    gc.collect()
    assert lanes.waiting == []
    assert lanes.allocated_bytes == 0
    assert lanes.locker.locked == {}
    assert lanes.violations == []
    assert tiny.is_exact()
