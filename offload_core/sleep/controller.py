"""The order to sleep, or to wake, as a transaction over several models.

    awake -> falling asleep -> asleep -> waking -> awake

All or nothing: when one model fails, those before it go back to what they were, each by itself, so
that one that cannot does not keep the others from it. What could not be undone is FAILED and says
so; it is neither lost nor locked: the opposite order tries again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..host import give_back_freed
from ..values import AsleepError, ConfigError, CourierError
from .records import Held, MachineRecord, ModelReceipt, Receipt, SleepState
from .sentences import with_result
from .sleepers import LEVELS, Sleeper

Progress = Callable[[int, int, str], None]
"""Called with how many of how many models are done and the name of the next; may raise to cancel,
which undoes what was done."""


class OrderError(CourierError):
    """An order failed. ``undone``: everything is as it was; ``receipt`` says what is where."""

    def __init__(self, message: str, undone: bool, receipt: Receipt) -> None:
        super().__init__(message)
        self.undone = undone
        self.receipt = receipt


@dataclass
class _Rest:
    """How a model sleeps. Guarded by the controller's turn, read by any."""

    state: SleepState = SleepState.AWAKE
    level: int | None = None
    wakes_on_use: bool = False
    problem: str = ""


class SleepController:
    """Carries out one order at a time; a second one waits for its turn.

    Threads: any, but never one that runs a model. ``roster`` and ``measure`` are called by them.
    """

    def __init__(
        self,
        roster: Callable[[], Sequence[Sleeper]],
        measure: Callable[[], MachineRecord],
        foreign: Callable[[], Sequence[str]] = tuple,
        place: str = "the card",
        is_ram: bool = False,
    ) -> None:
        """
        Args:
            roster: the models there are now, each with an id of its own.
            measure: the machine now.
            foreign: memory that no order can free, in words.
            place: what sentences call the device's memory.
            is_ram: it is the host's own: what leaves it and stays in RAM gives nothing back.
        """
        self._roster = roster
        self._measure = measure
        self._foreign = foreign
        self._place = place
        self._is_ram = is_ram
        self._turn = threading.RLock()
        self._rests: dict[str, _Rest] = {}

    def state_of(self, sleeper: Sleeper) -> SleepState:
        """Where it stands. Any thread, without waiting."""
        return self._rest(sleeper).state

    def level_of(self, sleeper: Sleeper) -> int | None:
        """The level at which it sleeps, or None. Any thread, without waiting."""
        return self._rest(sleeper).level

    def problem_of(self, sleeper: Sleeper) -> str:
        """What an order left behind that failed; "" for none. Any thread, without waiting."""
        return self._rest(sleeper).problem

    def refuses_use(self, sleeper: Sleeper) -> bool:
        """Whether ``before_use`` would raise. Any thread, without waiting."""
        return sleeper.is_asleep and not self._rest(sleeper).wakes_on_use

    def sleep(
        self,
        ids: Iterable[str] | None = None,
        level: int = 1,
        wakes_on_use: bool = False,
        progress: Progress | None = None,
    ) -> Receipt:
        """Put these models to sleep, or all. A model that sleeps already may sleep deeper.

        Args:
            wakes_on_use: what ``before_use`` does; the last order's word counts.
        Raises: ConfigError for a level or an id that there is not; OrderError, with everything put
            back that could be.
        """
        if level not in LEVELS:
            raise ConfigError(f"sleep level {level!r} does not exist; choose 1 or 2")
        with self._turn:
            chosen = self._chosen(ids)

            def fall_asleep(sleeper: Sleeper) -> None:
                rest = self._rests[sleeper.id]
                deeper = max(level, rest.level or 0)
                rest.state = SleepState.FALLING_ASLEEP
                # Before it sleeps: whoever would use it in the next moment is told what was asked.
                rest.wakes_on_use = wakes_on_use
                sleeper.fall_asleep(deeper)
                rest.state, rest.level, rest.problem = SleepState.ASLEEP, deeper, ""

            awake = {sleeper.id for sleeper in chosen if not sleeper.is_asleep}
            is_other_word = any(
                s.id not in awake and self._rests[s.id].wakes_on_use is not wakes_on_use
                for s in chosen
            )
            receipt = self._carry_out("sleep", chosen, fall_asleep, self._wake_one, awake, progress)
            if is_other_word:
                now = "wakes it" if wakes_on_use else "is refused"
                receipt = replace(
                    receipt, message=f"{receipt.message} From now on, use of a sleeping one {now}."
                )
            return receipt

    def set_wakes_on_use(self, ids: Iterable[str], wakes_on_use: bool) -> None:
        """What ``before_use`` does from now on. Ids of nobody are passed over."""
        with self._turn:
            for rest in (self._rests.get(model_id) for model_id in ids):
                if rest is not None:
                    rest.wakes_on_use = wakes_on_use

    def wake(self, ids: Iterable[str] | None = None, progress: Progress | None = None) -> Receipt:
        """Wake these models, or all that sleep.

        Raises: ConfigError for an id that there is not; OrderError, with everything put back that
            could be.
        """
        with self._turn:
            chosen, left = self._chosen(ids), ""
            if ids is None:
                asleep_now = [sleeper for sleeper in chosen if sleeper.is_asleep]
                # One that nobody can wake must not keep the others asleep.
                chosen = [sleeper for sleeper in asleep_now if not sleeper.obstacle]
                left = " ".join(
                    f"{sleeper.name} stays asleep: {sleeper.obstacle}."
                    for sleeper in asleep_now
                    if sleeper not in chosen
                )
            levels = {sleeper.id: self._rests[sleeper.id].level or 1 for sleeper in chosen}

            def sleep_again(sleeper: Sleeper) -> None:
                rest = self._rests[sleeper.id]
                sleeper.fall_asleep(levels[sleeper.id])
                rest.state, rest.level = SleepState.ASLEEP, levels[sleeper.id]

            asleep = {sleeper.id for sleeper in chosen if sleeper.is_asleep}
            receipt = self._carry_out("wake", chosen, self._wake_one, sleep_again, asleep, progress)
            if not left:
                return receipt
            return replace(receipt, ok=False, message=f"{receipt.message} {left}")

    def before_use(self, model_id: str) -> None:
        """Whoever is about to use a model calls this first: it wakes it, or refuses.

        Raises: AsleepError with a sentence; OrderError if it cannot be woken.
        """
        with self._turn:
            found = [sleeper for sleeper in self._roster() if sleeper.id == model_id]
            if not found or not found[0].is_asleep:
                return
            if self.refuses_use(found[0]):
                raise AsleepError(asleep_text(found[0]))
            self.wake([model_id])

    def _wake_one(self, sleeper: Sleeper) -> None:
        rest = self._rests[sleeper.id]
        rest.state = SleepState.WAKING
        sleeper.wake()
        rest.state, rest.level, rest.problem = SleepState.AWAKE, None, ""

    def _rest(self, sleeper: Sleeper) -> _Rest:
        rest = self._rests.get(sleeper.id)
        if rest is None or (rest.state is SleepState.AWAKE and sleeper.is_asleep):
            # Put to sleep by somebody else.
            return _Rest(SleepState.ASLEEP if sleeper.is_asleep else SleepState.AWAKE)
        if rest.state is SleepState.ASLEEP and not sleeper.is_asleep:
            return _Rest()
        return rest

    def _chosen(self, ids: Iterable[str] | None) -> list[Sleeper]:
        everybody = {sleeper.id: sleeper for sleeper in self._roster()}
        self._rests = {key: self._rest(sleeper) for key, sleeper in everybody.items()}
        if ids is None:
            return list(everybody.values())
        wanted = list(dict.fromkeys(ids))
        missing = [model_id for model_id in wanted if model_id not in everybody]
        if missing:
            raise ConfigError(f"there is no model {missing[0]!r}")
        return [everybody[model_id] for model_id in wanted]

    def _carry_out(
        self,
        action: str,
        chosen: Sequence[Sleeper],
        do: Callable[[Sleeper], None],
        undo: Callable[[Sleeper], None],
        undoable: set[str],
        progress: Progress | None,
    ) -> Receipt:
        """Do it to one after the other; on any error, undo it for those that it changed."""
        started, before = time.monotonic(), self._measure()
        held = {sleeper.id: sleeper.held() for sleeper in chosen}
        asleep = {sleeper.id: sleeper.is_asleep for sleeper in chosen}
        rests = {sleeper.id: replace(self._rests[sleeper.id]) for sleeper in chosen}

        def receipt(ok: bool, message: str) -> Receipt:
            models = tuple(
                self._model_receipt(s, held[s.id], s.is_asleep is not asleep[s.id]) for s in chosen
            )
            seconds, after = time.monotonic() - started, self._measure()
            foreign = tuple(self._foreign())
            return Receipt(action, ok, message, seconds, models, before, after, foreign)

        at, asking = "", False
        try:
            for number, sleeper in enumerate(chosen):
                at, asking = sleeper.name, True
                if progress is not None:
                    progress(number, len(chosen), sleeper.name)
                asking = False
                do(sleeper)
        except BaseException as error:
            touched = [s for s in chosen if s.is_asleep is not asleep[s.id] and s.id in undoable]
            problems = self._undo(touched, undo, rests, chosen)
            if asking or not isinstance(error, Exception):
                raise  # a cancel is nobody's failure
            text = f"{action} failed at {at}: {error}. "
            text += " ".join(problems) or "Everything is as it was."
            raise OrderError(text, not problems, receipt(False, text)) from error
        if self._is_ram or any(s.held().copied_bytes < held[s.id].copied_bytes for s in chosen):
            give_back_freed()
        return with_result(receipt(True, ""), self._place, self._is_ram)

    def _undo(
        self,
        touched: Sequence[Sleeper],
        undo: Callable[[Sleeper], None],
        rests: dict[str, _Rest],
        chosen: Sequence[Sleeper],
    ) -> list[str]:
        """What could not be undone, in words. The last touched first."""
        failed = {}
        for sleeper in reversed(touched):
            error = _error_of(undo, sleeper)
            if error is not None:
                where = "asleep" if sleeper.is_asleep else "awake"
                failed[sleeper.id] = f"{sleeper.name} is still {where}: {error}."
        for sleeper in chosen:
            if sleeper.id in failed:
                self._rests[sleeper.id].state = SleepState.FAILED
                self._rests[sleeper.id].problem = failed[sleeper.id]
            else:
                self._rests[sleeper.id] = rests[sleeper.id]
        return list(failed.values())

    def _model_receipt(self, sleeper: Sleeper, before: Held, changed: bool) -> ModelReceipt:
        rest, after = self._rest(sleeper), sleeper.held()
        return ModelReceipt(
            id=sleeper.id,
            name=sleeper.name,
            kind=sleeper.kind,
            state=rest.state,
            level=rest.level,
            changed=changed or before != after,
            before=before,
            after=after,
            kept=sleeper.kept() if sleeper.is_asleep else (),
        )


def asleep_text(sleeper: Sleeper) -> str:
    """Why a model cannot be used, and what to do."""
    return (
        f"{sleeper.name} ({sleeper.kind}) is asleep. Wake it with POST /courier/v1/wake, or with a "
        "node Wake Model in this workflow (without links it runs first); or put models to sleep "
        "with on_use = wake: then their next use wakes them"
    )


def _error_of(call: Callable[[Sleeper], None], sleeper: Sleeper) -> Exception | None:
    try:
        call(sleeper)
    except Exception as error:
        return error
    return None
