"""The plan in force, and how it becomes another one, between runs and within them."""

from __future__ import annotations

import traceback
from dataclasses import replace

import torch

from ..plan import Plan, make_plan
from ..values import Budget, DeviceBudgetError, DeviceMemoryError
from .occupancy import Occupancy
from .parts import EngineParts
from .passes import PassMeter
from .planning import Planner


class Holding:
    """What an engine holds the device by: a plan, the budget that it was made for, what there is to
    say about them, and the measurement that corrects them.

    Threads: the compute thread; ``plan``, ``budget`` and ``notes`` may be read by any.
    """

    def __init__(self, parts: EngineParts, occupancy: Occupancy, planner: Planner) -> None:
        self.plan: Plan | None = None
        self.budget = parts.budget
        self.notes: tuple[str, ...] = parts.notes
        self.meter = PassMeter(parts.backend, parts.config.margin_bytes)
        self.keeps_locks = False
        """Whether a plan that cannot be had leaves the page locks as they are."""
        self._parts = parts
        self._occupancy = occupancy
        self._planner = planner

    def say(self, *more: str) -> None:
        """These notes, besides those that were always true, in place of all others."""
        self.notes = (*self._parts.notes, *more)

    def occupy(self, plan: Plan, budget: Budget) -> None:
        """Bring the device to ``plan``; after an error nothing is on it and no plan is in force."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._occupancy.settle_into(plan, budget.host_bytes)
        except BaseException as error:
            # The frames below would keep the buffers that were had before the failure.
            traceback.clear_frames(error.__traceback__)
            self.vacate()
            raise
        self.plan = plan

    def vacate(self) -> None:
        """Leave the device, and the page locks but where they are to be kept."""
        with torch.inference_mode(False), torch.no_grad():
            self._occupancy.release(self.keeps_locks)
        self.plan = None

    def adopt(self, budget: Budget) -> None:
        """Correct the plan by this budget from now on. What was held under another one says nothing
        about it, and beside a smaller figure would look like a breach."""
        if budget.device_bytes != self.budget.device_bytes:
            self._occupancy.restart_peak()
        self.budget = budget

    def serves(self, wanted: Plan, budget: Budget) -> bool:
        """Whether what is loaded is as good as ``wanted``: the figures that the core offers change
        a little from run to run, and moving weights for a little costs more than it brings."""
        now = self.plan
        if now is None:
            return False
        if now == wanted and budget == self.budget:
            return True
        limit = budget.device_bytes
        fits = limit is None or now.device_bytes + wanted.activation_bytes <= limit
        gain = wanted.device_bytes - now.device_bytes
        return (
            fits
            and budget.host_bytes == self.budget.host_bytes
            and gain <= now.device_bytes // 64
            and bool(now.streamed)
            and bool(wanted.streamed)
        )

    def keep_for(self, wanted: Plan, budget: Budget) -> Plan:
        """The plan in force serves: what it leaves, and whether that is too little, is reckoned by
        what was asked for last."""
        assert self.plan is not None
        self.adopt(budget)
        self.say(*self._planner.notes(budget))
        self.plan = replace(self.plan, activation_bytes=wanted.activation_bytes)
        return self.plan

    def correct(self) -> None:
        """Settle into the plan for what passes were measured to take, if it is worth it.

        Raises: DeviceMemoryError if even the plan of before cannot be had again.
        """
        before, activation_bytes = self.plan, self.meter.need_bytes
        assert before is not None
        held = None
        if activation_bytes is None or activation_bytes == before.activation_bytes:
            return
        if activation_bytes < before.activation_bytes:
            if not before.streamed or not self.meter.may_grow(before.activation_bytes):
                return
            # Fuller, the device's allocator needs more for the same: what the next pass takes then
            # must still fit.
            activation_bytes += self._parts.config.growth_margin_bytes
            if activation_bytes >= before.activation_bytes:
                return
            # What is there stays where it is: bringing it anew would take as long as a pass.
            held = self._occupancy.held(before)
        try:
            request = self._planner.request(self.budget, activation_bytes)
            plan = make_plan(replace(request, held=held))
        except DeviceBudgetError as error:
            self.say(f"the run takes more than the budget: {error}")
            return
        if 0 <= plan.device_bytes - before.device_bytes < before.device_bytes // 128:
            return  # not worth the move
        try:
            self._settle(plan)
        except DeviceMemoryError as error:
            # Others hold what the budget promises.
            self._settle_smaller(plan, before)
            self.say(shortage_note(error))

    def make_room(self) -> bool:
        """Settle into a smaller plan, since the device was full; whether there was one."""
        smaller = None if self.plan is None else self._planner.give_way(self.budget, self.plan)
        if smaller is None:
            return False
        with torch.inference_mode(False), torch.no_grad():
            self._parts.stream.finish()
        self._settle(smaller)
        self.say(*self._planner.notes(self.budget))
        return True

    def lend(self, freed_bytes: int) -> int:
        """Leave so much of the device to others until the run ends; the bytes that were freed.
        Between two passes."""
        if self.plan is None:
            return 0
        smaller = self._planner.shrunk(self.budget, self.plan, freed_bytes)
        if smaller is None:
            return 0
        before = self._occupancy.device_bytes
        with torch.inference_mode(False), torch.no_grad():
            self._parts.stream.finish()
        self._settle(smaller)
        return before - self._occupancy.device_bytes

    def _settle_smaller(self, plan: Plan, before: Plan) -> None:
        """Half-way between the plan that ran until now and one that turned out too large; the
        former, which still fits, if that is too large too."""
        try:
            self._settle(self._planner.half_way(self.budget, plan, before))
        except (DeviceMemoryError, DeviceBudgetError):
            self._settle(before)

    def _settle(self, plan: Plan) -> None:
        """Go from plan to plan in the middle of a run, between two passes."""
        self._parts.stream.settle_orders()
        self.occupy(plan, self.budget)
        self.meter.restart()


def shortage_note(error: DeviceMemoryError) -> str:
    """The device had less than the budget says."""
    return f"the device had less memory than the budget allows ({error}); a smaller plan runs"
