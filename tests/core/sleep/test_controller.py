"""Orders over several models: all or nothing, truthful, and never stuck."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from offload_core.device import FakeBackend
from offload_core.run import LayerEngine
from offload_core.sleep import (
    EngineSleeper,
    Held,
    MachineRecord,
    OrderError,
    SleepController,
    SleepState,
)
from offload_core.values import AsleepError, Budget, ConfigError, EngineState

Over = Callable[..., LayerEngine]
MIB = 1 << 20


@dataclass
class Bed:
    """A model that is nothing but its bytes; ``fails`` names the calls that raise, once each."""

    id: str
    level: int | None = None
    fails: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    stays: int = 0
    kind: str = "diffusion model"
    obstacle: str = ""

    @property
    def name(self) -> str:
        return f"model {self.id}"

    @property
    def is_asleep(self) -> bool:
        return self.level is not None

    def held(self) -> Held:
        if self.level is None:
            return Held(8 * MIB, locked_bytes=4 * MIB)
        return Held(self.stays, locked_bytes=4 * MIB if self.level == 1 else 0)

    def kept(self) -> tuple[str, ...]:
        return ("its locks",) if self.level == 1 else ()

    def fall_asleep(self, level: int) -> None:
        self._do(f"sleep {level}")
        self.level = max(level, self.level or 0)

    def wake(self) -> None:
        self._do("wake")
        self.level = None

    def _do(self, call: str) -> None:
        self.calls.append(call)
        if self.fails and self.fails[0] == call:
            self.fails.pop(0)
            raise RuntimeError(f"{call} of {self.id} went wrong")


def beds(count: int = 3) -> list[Bed]:
    return [Bed(letter) for letter in "abcdefgh"[:count]]


def control(
    roster: Sequence[Any], measure: Callable[[], MachineRecord] = MachineRecord, **more: Any
) -> SleepController:
    return SleepController(lambda: roster, measure, **more)


def levels(roster: Sequence[Bed]) -> list[int | None]:
    return [bed.level for bed in roster]


def states(controller: SleepController, roster: Sequence[Any]) -> list[SleepState]:
    return [controller.state_of(sleeper) for sleeper in roster]


@pytest.mark.parametrize("level", [1, 2])
def test_all_sleep_and_the_set_that_slept_wakes(level: int) -> None:
    roster = beds()
    controller = control(roster, foreign=lambda: ("1 GiB of another process",))
    receipt = controller.sleep(["b"], level)
    assert levels(roster) == [None, level, None]
    (told,) = receipt.models
    assert (told.id, told.name, told.state, told.level) == (
        "b",
        "model b",
        SleepState.ASLEEP,
        level,
    )
    assert (told.changed, told.before.device_bytes, told.after.device_bytes) == (True, 8 * MIB, 0)
    assert told.kept == (("its locks",) if level == 1 else ())
    assert receipt.ok
    ram = "0 B" if level == 1 else "4.00 MiB"
    assert receipt.message.startswith(f"1 model sleeps: 8.00 MiB of the card and {ram} held in RAM")
    assert receipt.not_ours == ("1 GiB of another process",)
    woken = controller.wake()
    assert [model.id for model in woken.models] == ["b"]
    assert woken.message.startswith("1 model is awake: 8.00 MiB of the card")
    assert levels(roster) == [None] * 3
    controller.sleep(level=level)
    assert levels(roster) == [level] * 3
    controller.wake()
    assert levels(roster) == [None] * 3


@dataclass
class Large(Bed):
    """Large enough for the process's own count to be compared."""

    def held(self) -> Held:
        return Held(0 if self.is_asleep else 256 * MIB)


@pytest.mark.parametrize(("left", "is_ok"), [(40, True), (100, True), (200, False)])
def test_what_the_process_keeps_of_the_ram_is_said(left: int, is_ok: bool) -> None:
    moments = iter([300 * MIB, (44 + left) * MIB])
    controller = control(
        [Large("a")], lambda: MachineRecord(anon_bytes=next(moments)), place="RAM", is_ram=True
    )
    receipt = controller.sleep()
    counted = f"{256 - left}.00 MiB"
    assert f"256.00 MiB of RAM (the system counts {counted}) were given back" in receipt.message
    assert receipt.ok is is_ok
    assert receipt.message.endswith("But the process still has most of it.") is not is_ok


def test_freed_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[str] = []
    monkeypatch.setattr(
        "offload_core.sleep.controller.give_back_freed", lambda: trims.append("trim")
    )
    on_a_card = control([Bed("a")])
    on_a_card.sleep()
    on_a_card.wake()
    assert trims == [], "nothing of the heap was freed"
    in_ram = control([Bed("a")], place="RAM", is_ram=True)
    in_ram.sleep()
    assert trims == ["trim"]
    waking = control([Shelved("b")])
    waking.sleep()
    waking.wake()
    assert trims == ["trim", "trim"], "its copies in RAM went"


def test_what_use_of_it_does_is_known_from_the_moment_it_sleeps() -> None:
    """A prompt may come before the order has been answered."""
    roster = beds(1)
    seen: list[bool] = []

    def measure() -> MachineRecord:
        if roster[0].is_asleep:
            seen.append(controller.refuses_use(roster[0]))
        return MachineRecord()

    controller = control(roster, measure)
    controller.sleep(wakes_on_use=True)
    assert seen == [False]
    controller.wake()
    controller.sleep()
    assert seen == [False, False, True]


def test_another_word_about_use_alone_is_told() -> None:
    controller = control(beds(2))
    assert "use of" not in controller.sleep(wakes_on_use=True).message
    assert "use of" not in controller.sleep(wakes_on_use=True).message
    assert controller.sleep(["a"]).message.endswith("use of a sleeping one is refused.")
    message = controller.sleep(wakes_on_use=True).message
    assert message.startswith("Nothing was awake")
    assert message.endswith("2 models sleep. From now on, use of a sleeping one wakes it.")


@dataclass
class Shelved(Bed):
    """As ComfyUI's own models are: asleep, their weights are in RAM."""

    def held(self) -> Held:
        return Held(8 * MIB) if self.level is None else Held(0, copied_bytes=8 * MIB)


def test_what_goes_from_ram_to_ram_gives_nothing_back() -> None:
    roster = [Bed("a"), Shelved("b")]
    words = {"place": "RAM", "is_ram": True}
    controller = control(roster, **words)
    assert controller.sleep(level=2).message.startswith(
        "2 models sleep: 8.00 MiB of RAM and 4.00 MiB of page locks were given back"
    )
    assert controller.wake().message.startswith("2 models are awake: 8.00 MiB of RAM in")
    alone = control([Shelved("b")], **words)
    assert alone.sleep().message.startswith("1 model sleeps: 0 B of RAM were given back")
    on_a_card = control([*beds(1), Shelved("b")])
    assert on_a_card.sleep().message.startswith(
        "2 models sleep: 16.00 MiB of the card and 0 B held"
    )


def test_orders_repeat_without_harm_and_a_deeper_sleep_is_one_more_step() -> None:
    roster = beds(2)
    controller = control(roster)
    assert controller.wake().message == "Nothing was asleep."
    controller.sleep(level=1)
    again = controller.sleep(level=1)
    assert (again.ok, again.message) == (
        True,
        "Nothing was awake: nothing was given back. 2 models sleep.",
    )
    assert [model.changed for model in again.models] == [False, False]
    deeper = controller.sleep(["a"], level=2)
    assert levels(roster) == [2, 1]
    assert deeper.models[0].changed
    controller.sleep(level=1)
    assert levels(roster) == [2, 1], "nobody sleeps less deeply than before"
    controller.wake(["a", "a"])
    assert roster[0].calls.count("wake") == 1


def test_what_there_is_not_is_refused_before_anything_happens() -> None:
    roster = beds(2)
    controller = control(roster)
    with pytest.raises(ConfigError, match="no model 'x'"):
        controller.sleep(["a", "x"])
    with pytest.raises(ConfigError, match="no model 'x'"):
        controller.wake(["x"])
    for level in (0, 3, 99):
        with pytest.raises(ConfigError, match="choose 1 or 2"):
            controller.sleep(["a"], level)
    assert [bed.calls for bed in roster] == [[], []]


@pytest.mark.parametrize("failing", range(4))
def test_a_sleep_that_fails_half_way_is_undone(failing: int) -> None:
    roster = beds(4)
    controller = control(roster)
    controller.sleep(["b"], level=1)
    roster[failing].fails = ["sleep 2" if failing != 1 else "sleep 1"]
    before = levels(roster)
    with pytest.raises(OrderError, match=r"went wrong\. Everything is as it was") as caught:
        controller.sleep(["a", "c", "d", "b"], level=1 if failing == 1 else 2)
    assert caught.value.undone
    assert not caught.value.receipt.ok
    if failing == 1:
        assert levels(roster) == before
    else:
        assert list(levels(roster)) == before
    assert states(controller, roster) == [
        SleepState.ASLEEP if level else SleepState.AWAKE for level in before
    ]
    controller.sleep(level=2)
    assert levels(roster) == [2] * 4


@pytest.mark.parametrize("failing", range(3))
def test_a_wake_that_fails_half_way_is_undone_at_the_level_of_before(failing: int) -> None:
    roster = beds(3)
    controller = control(roster)
    controller.sleep(["a", "b"], level=1)
    controller.sleep(["c"], level=2)
    roster[failing].fails = ["wake"]
    with pytest.raises(OrderError, match=f"wake failed at model {'abc'[failing]}: wake of"):
        controller.wake()
    assert levels(roster) == [1, 1, 2]
    assert states(controller, roster) == [SleepState.ASLEEP] * 3
    controller.wake()
    assert levels(roster) == [None] * 3


def test_one_that_cannot_be_put_back_does_not_keep_the_others_and_has_a_way_on() -> None:
    roster = beds(4)
    controller = control(roster)
    roster[1].fails = ["wake"]
    roster[3].fails = ["sleep 1"]
    with pytest.raises(OrderError, match="model b is still asleep: wake of b went wrong") as caught:
        controller.sleep()
    assert not caught.value.undone
    assert levels(roster) == [None, 1, None, None]
    assert states(controller, roster)[1] is SleepState.FAILED
    assert controller.problem_of(roster[1]) == "model b is still asleep: wake of b went wrong."
    told = {model.id: model.state for model in caught.value.receipt.models}
    assert told["b"] is SleepState.FAILED
    assert told["a"] is told["c"] is told["d"] is SleepState.AWAKE
    with pytest.raises(AsleepError, match=r"model b .* is asleep"):
        controller.before_use("b")
    controller.wake()
    assert states(controller, roster) == [SleepState.AWAKE] * 4
    assert controller.problem_of(roster[1]) == ""


def test_one_that_nobody_can_wake_does_not_keep_the_others_asleep() -> None:
    roster = beds(3)
    controller = control(roster)
    controller.sleep()
    roster[1].obstacle = "its file was replaced"
    receipt = controller.wake()
    assert levels(roster) == [None, 1, None]
    assert not receipt.ok
    assert receipt.message.startswith("2 models are awake")
    assert receipt.message.endswith("model b stays asleep: its file was replaced.")
    assert "wake" not in roster[1].calls
    controller.wake(["b"])
    assert roster[1].calls[-1] == "wake", "asked for by name, it is tried"


class Cancelled(BaseException):
    """As the interrupt of newer ComfyUIs, which is no Exception."""


class CancelledOfOld(Exception):
    """As that of older ones."""


@pytest.mark.parametrize("kind", [Cancelled, CancelledOfOld])
@pytest.mark.parametrize("action", ["sleep", "wake"])
@pytest.mark.parametrize("at", range(3))
def test_a_cancel_between_two_models_undoes_the_first(
    kind: type[BaseException], action: str, at: int
) -> None:
    roster = beds(3)
    controller = control(roster)
    if action == "wake":
        controller.sleep()
    before = levels(roster)
    seen = []

    def progress(done: int, total: int, name: str) -> None:
        seen.append((done, total, name))
        if done == at:
            raise kind

    with pytest.raises(kind):
        getattr(controller, action)(progress=progress)
    assert seen == [(done, 3, f"model {'abc'[done]}") for done in range(at + 1)]
    assert levels(roster) == before
    getattr(controller, action)()
    assert levels(roster) != before


def test_the_use_of_a_sleeping_model_is_refused_or_wakes_it_as_chosen() -> None:
    roster = beds(2)
    controller = control(roster)
    for model_id in ("a", "b", "no such model"):
        controller.before_use(model_id)
    controller.sleep(wakes_on_use=False)
    with pytest.raises(
        AsleepError,
        match=r"model a \(diffusion model\) is asleep\. Wake it with POST /courier/v1/wake",
    ):
        controller.before_use("a")
    controller.sleep(["a"], wakes_on_use=True)
    controller.before_use("a")
    assert levels(roster) == [None, 1]
    with pytest.raises(AsleepError):
        controller.before_use("b")


def test_nothing_is_called_done_that_did_not_come() -> None:
    stubborn = Bed("a", stays=MIB)
    receipt = control([stubborn]).sleep()
    assert not receipt.ok
    assert receipt.message.endswith("Not all of the card was: model a.")
    used = [100 * MIB]
    controller = control([Bed("a")], lambda: MachineRecord(device_used_bytes=used[0]))
    receipt = controller.sleep()
    assert not receipt.ok
    assert receipt.message.endswith("But its driver counts no more free than before.")
    figures = iter((100 * MIB, 92 * MIB))
    honest = control([Bed("a")], lambda: MachineRecord(device_used_bytes=next(figures)))
    receipt = honest.sleep()
    assert receipt.ok
    assert "8.00 MiB of the card (its driver counts 8.00 MiB) and" in receipt.message
    assert receipt.before.device_used_bytes == 100 * MIB
    assert receipt.after.device_used_bytes == 92 * MIB


def test_models_that_come_and_go_are_the_rosters(tiny: Any, engine_over: Over) -> None:
    roster: list[Any] = beds(2)
    controller = control(roster)
    controller.sleep()
    gone = roster.pop(0)
    controller.wake()
    assert gone.level == 1
    roster.append(Bed("c", level=1))
    assert controller.state_of(roster[-1]) is SleepState.ASLEEP, "somebody else put it to sleep"
    controller.wake()
    assert levels(roster) == [None, None]


# With engines


@pytest.fixture
def pair(make_tiny: Callable[..., Any], engine_over: Over) -> list[tuple[Any, LayerEngine]]:
    """Two models of one device."""
    fake = FakeBackend()
    models = [make_tiny(3, seed=seed) for seed in range(2)]
    return [(tiny, engine_over(tiny, fake)) for tiny in models]


def sleepers(pair: Sequence[tuple[Any, LayerEngine]]) -> list[EngineSleeper]:
    return [
        EngineSleeper(engine, str(number), f"model {number}", "diffusion model")
        for number, (_, engine) in enumerate(pair)
    ]


def use(tiny: Any, engine: LayerEngine) -> None:
    if engine.state is EngineState.UNLOADED:
        engine.load(Budget())
    with engine.run():
        assert tiny.is_exact()


@pytest.mark.parametrize("level", [1, 2])
def test_engines_sleep_and_wake_by_order(pair: Any, level: int) -> None:
    roster = sleepers(pair)
    controller = control(roster)
    for tiny, engine in pair:
        engine.load(Budget())
        use(tiny, engine)
    held = [sleeper.held() for sleeper in roster]
    for _ in range(100):
        receipt = controller.sleep(level=level)
        assert receipt.ok
        assert [model.after.device_bytes for model in receipt.models] == [0, 0]
        controller.wake()
        assert [sleeper.held() for sleeper in roster] == held
    for tiny, engine in pair:
        use(tiny, engine)


def test_two_threads_that_swap_two_models_end_exact(pair: Any) -> None:
    roster = sleepers(pair)
    controller = control(roster)
    for _, engine in pair:
        engine.load(Budget())
    errors: list[BaseException] = []
    start = threading.Barrier(2)

    def swap(mine: str, other: str) -> None:
        try:
            start.wait(60)
            for _ in range(200):
                controller.sleep([mine])
                controller.wake([other])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=swap, args=pair_) for pair_ in (("0", "1"), ("1", "0"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert errors == []
    controller.wake()
    for tiny, engine in pair:
        use(tiny, engine)


def test_every_order_of_four_calls_is_answered_truthfully(pair: Any) -> None:
    roster = sleepers(pair[:1])
    controller = control(roster)
    tiny, engine = pair[0]
    chance = random.Random(0)

    def try_to_run() -> None:
        if controller.state_of(roster[0]) is SleepState.ASLEEP:
            with pytest.raises(AsleepError):
                controller.before_use("0")
        else:
            controller.before_use("0")
            use(tiny, engine)

    asleep = False
    for order in itertools.product(["sleep", "wake", "run", "status"], repeat=4):
        for call in order:
            if call == "sleep":
                controller.sleep(level=chance.choice([1, 2]))
                asleep = True
            elif call == "wake":
                controller.wake()
                asleep = False
            elif call == "run":
                try_to_run()
            assert engine.snapshot().state is engine.state
            wanted = SleepState.ASLEEP if asleep else SleepState.AWAKE
            assert controller.state_of(roster[0]) is wanted
            assert (engine.device_bytes == 0) or not asleep
    controller.wake()
    use(tiny, engine)


def test_an_order_keeps_no_model_alive(make_tiny: Callable[..., Any], poisoned: Any) -> None:
    from offload_core.run import attach

    tiny = make_tiny(2)
    engine = attach(tiny.module, FakeBackend(), [tiny.mapping], poisoned())
    roster = [EngineSleeper(engine, "0", "it", "diffusion model")]
    controller = control(roster)
    engine.load(Budget())
    controller.sleep()
    del engine, tiny
    assert roster[0].held() == Held(0)
    assert not roster[0].is_asleep
    controller.wake()
    controller.sleep()
