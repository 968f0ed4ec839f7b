"""One pair of figures for several models of one device: what they hold together stays under it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence

from ..plan import Plan
from ..values import (
    Budget,
    BudgetError,
    CourierError,
    DeviceBudgetError,
    EngineState,
    StateError,
)
from .engine import LayerEngine


class SharedBudget:
    """Gives each engine what the others leave, and has the least recently used give way.

    Only what is loaded counts: activations are one model's at a time. A model that is running
    never gives way. Engines are held weakly; whoever is gone holds nothing.

    Threads: the compute thread.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._members: list[weakref.ref[LayerEngine]] = []

    def take(self, engine: LayerEngine, wanted: Budget, activation_bytes: int) -> Budget:
        """The budget to load ``engine`` with, after others have made room for it.

        Args:
            wanted: what the engine would load with if it were alone.
            activation_bytes: what its run needs beside the weights.
        """
        others = self._use(engine)
        device = _smaller(self.budget.device_bytes, wanted.device_bytes)
        host = _smaller(self.budget.host_bytes, wanted.host_bytes)
        if self.budget.device_bytes is not None:
            need = _planned_device_bytes(engine, Budget(device, host), activation_bytes)
            excess = need + sum(other.device_bytes for other in others) - self.budget.device_bytes
            _make_room(others, excess, give_up_device)
            held = sum(other.device_bytes for other in others)
            device = _smaller(device, max(0, self.budget.device_bytes - held))
        if self.budget.host_bytes is not None:
            need = _planned_host_bytes(engine, Budget(device, host), activation_bytes)
            excess = need + sum(map(promised_host_bytes, others)) - self.budget.host_bytes
            _make_room(others, excess, give_up_host)
            promised = sum(map(promised_host_bytes, others))
            # 0 means "lock nothing", and so it should where copies and runs of others take all.
            host = _smaller(host, max(0, self.budget.host_bytes - promised))
        return Budget(device, host)

    def _use(self, engine: LayerEngine) -> list[LayerEngine]:
        """Make ``engine`` the most recently used; the others that live, the least recent first."""
        living = [(ref, member) for ref in self._members if (member := ref()) is not None]
        others = [(ref, member) for ref, member in living if member is not engine]
        self._members = [ref for ref, _ in others] + [weakref.ref(engine)]
        return [member for _, member in others]


def _make_room(
    others: Sequence[LayerEngine], excess_bytes: int, give_up: Callable[[LayerEngine, int], int]
) -> None:
    """``others``: the least recently used first."""
    for other in others:
        if excess_bytes > 0:
            excess_bytes -= give_up(other, excess_bytes)


def promised_host_bytes(engine: LayerEngine) -> int:
    """What it holds on the host, or what the plan that is loaded may come to hold."""
    loaded = engine.loaded_with
    promised = 0 if loaded is None else _host_bytes(loaded[1])
    # Locks that are larger than the plan's are kept where there is room; copies are always.
    return max(promised, engine.snapshot().memory.host_bytes)


def give_up_device(engine: LayerEngine, size_bytes: int) -> int:
    """Free at least that many device bytes if there are so many; what was freed.

    Nothing while a run is on. With a smaller plan where one exists, else by unloading.
    """
    loaded = engine.loaded_with
    if engine.state is not EngineState.LOADED or loaded is None:
        return 0
    budget, plan = loaded
    before = engine.device_bytes
    target = max(0, before - size_bytes + plan.activation_bytes)
    _load_smaller(engine, Budget(target, budget.host_bytes), plan)
    return before - engine.device_bytes


def give_up_host(engine: LayerEngine, size_bytes: int) -> int:
    """Free at least that many host bytes if page locks and staging come to so many; what was freed.

    Nothing while a run is on. Copies stay: there is no other place for them. A model that sleeps
    gives up the locks that it kept for its waking, all of them.
    """
    before = promised_host_bytes(engine)
    loaded = engine.loaded_with
    if engine.state is EngineState.ASLEEP:
        engine.sleep(keep_locks=False)
    elif engine.state is EngineState.LOADED and loaded is not None:
        budget, plan = loaded
        target = max(plan.copied_bytes, before - size_bytes)
        _load_smaller(engine, Budget(budget.device_bytes, target), plan)
    return before - promised_host_bytes(engine)


def _load_smaller(engine: LayerEngine, budget: Budget, plan: Plan) -> None:
    try:
        engine.load(budget, plan.activation_bytes)
    except CourierError:
        # Too small for any plan, or its file changed: whoever needs the room is not to blame.
        with contextlib.suppress(StateError):  # a stuck courier: then it gives nothing
            engine.unload()


def _planned_device_bytes(engine: LayerEngine, budget: Budget, activation_bytes: int) -> int:
    """What ``load`` with these figures would hold and leave for activations, at least what the
    smallest plan does."""
    try:
        plan = engine.plan(budget, activation_bytes)
    except DeviceBudgetError as error:
        return error.smallest_bytes
    except BudgetError:
        return _planned_device_bytes(engine, Budget(budget.device_bytes, 0), activation_bytes)
    return plan.device_bytes + plan.activation_bytes


def _planned_host_bytes(engine: LayerEngine, budget: Budget, activation_bytes: int) -> int:
    """What ``load`` with these figures may come to hold on the host; 0 where it is refused."""
    try:
        return _host_bytes(engine.plan(budget, activation_bytes))
    except BudgetError:
        return 0


def _host_bytes(plan: Plan) -> int:
    return plan.copied_bytes + plan.lock_bytes + plan.staging_bytes


def _smaller(one: int | None, other: int | None) -> int | None:
    """The smaller of two limits; None is none."""
    return min((limit for limit in (one, other) if limit is not None), default=None)
