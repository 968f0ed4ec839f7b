"""The engine: one model's layers under one pair of budgets.

    attach -> load(budget) -> [run() ... layers stream ... ]* -> unload -> detach

The module works before, between and after: whatever is not on the device is the module's own
parameter, a view on the checkpoint mapping or an ordinary tensor.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..device import DeviceBackend
from ..plan import Plan, PlanRequest, make_plan
from ..values import (
    ENGINE_MOVES,
    AsleepError,
    Budget,
    CheckpointError,
    CourierError,
    DeviceBudgetError,
    DeviceMemoryError,
    EngineSnapshot,
    EngineState,
    StateError,
)
from .courier import Courier
from .holding import Holding, shortage_note
from .hooks import put_hooks, refuse_new_weights
from .occupancy import Occupancy
from .parts import EngineParts
from .patches import PatchedWeight
from .planning import Planner, smaller_budget
from .report import Published, snapshot_of

_LOG = logging.getLogger("courier")


class LayerEngine:
    """Loads, streams and unloads the layers of one module. Made by ``attach``.

    The engine holds the module's blocks; the module's hooks hold the engine weakly, so dropping
    the last reference to the engine frees everything without a garbage collection.

    Threads: the thread that runs the model. ``snapshot`` and ``plan`` from any.
    """

    def __init__(self, root: nn.Module, parts: EngineParts) -> None:
        self._parts = parts
        self._occupancy = Occupancy(root, parts)
        self._state = EngineState.UNLOADED
        self._handles: list[RemovableHandle] = []
        self._gave_way = False
        self._entered: set[int] = set()
        """Layers that run. One that an exception left without a word stays until the pass ends."""
        self._slept_with: tuple[Budget, int] | None = None
        self._planner = Planner(parts)
        self._holding = Holding(parts, self._occupancy, self._planner)
        self._sites = {
            (site.module, site.attribute): weight
            for group in (parts.inventory.base, *parts.inventory.layers)
            for weight in group.weights
            if weight.wrapper is None
            for site in weight.sites
        }
        self._shutdown = weakref.finalize(
            self, _shut_down, parts.courier, self._occupancy, self._handles, parts.backend
        )
        # The interpreter's end frees everything anyway; only the courier is waited for, shortly.
        self._shutdown.atexit = False

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""
        return self._state

    def plan(self, budget: Budget, activation_bytes: int = 0) -> Plan:
        """What ``load`` with these figures would do; touches nothing. Raises: BudgetError."""
        return make_plan(self._planner.request(budget, activation_bytes))

    def load(self, budget: Budget, activation_bytes: int = 0) -> Plan:
        """Bring the device to the plan for ``budget``; what already fits the plan stays.

        When the device refuses memory that the budget allows, one smaller plan is tried and said
        in the notes. A call that is refused (BudgetError, CheckpointChangedError, StateError)
        changes nothing; after any other error nothing is on the device and nothing is locked.

        Raises: BudgetError, DeviceMemoryError, CheckpointChangedError, StateError.
        """
        self._refuse_asleep()
        if self._state not in (EngineState.UNLOADED, EngineState.LOADED):
            raise StateError(f"the engine is {self._state.value}; it cannot be loaded now")
        request, plan = self._planned(budget, activation_bytes)
        self._check_files()
        if self._holding.serves(plan, budget):
            plan = self._holding.keep_for(plan, budget)
        else:
            plan = self._apply_or_smaller(request, budget, plan)
        self._prepare_renewal()
        return plan

    def patch(self, by_site: Mapping[tuple[nn.Module, str], PatchedWeight]) -> None:
        """Patch weights where they arrive on the device from now on, by these and no others.

        What streams is patched on each arrival. What stays is brought anew where its patch is
        another object than before: what belongs to no layer by the next ``load``, a layer when it
        runs next. Only weights that ``patchable`` knows.

        Between two passes of a run too: the next has them.

        Raises: StateError while a layer runs; ValueError for a place that holds no such weight.
        """
        at_rest = self._state in (EngineState.UNLOADED, EngineState.LOADED)
        if not at_rest and not self.is_between_passes:
            raise StateError(f"the engine is {self._state.value}; it cannot be patched now")
        by_weight = {}
        for (module, attribute), patched in by_site.items():
            weight = self._sites.get((module, attribute))
            if weight is None:
                raise ValueError(f"{type(module).__name__}.{attribute} is no weight to be patched")
            by_weight[weight] = patched
        self._parts.stream.settle_orders()
        self._occupancy.patch(by_weight)
        if self._state is EngineState.RUNNING:
            with torch.inference_mode(False), torch.no_grad():
                self._occupancy.prepare_renewal()

    def patchable(self, module: nn.Module, attribute: str) -> torch.dtype | None:
        """What ``patch`` would work on: the dtype that the weight has on the device; None if it
        cannot be patched there. Any thread."""
        weight = self._sites.get((module, attribute))
        # One that two modules share would be patched for both.
        return None if weight is None or len(weight.sites) > 1 else weight.device_dtype

    def file_problem(self) -> str:
        """Why nothing can be loaded from the files any more, as ``load`` would say, but without
        their folders; "" if it can. Any thread."""
        try:
            self._check_files()
        except CheckpointError as error:
            text = str(error)
            for mapping in self._parts.mappings:
                text = text.replace(str(mapping.header.path), mapping.header.path.name)
            return text
        return ""

    def unload(self) -> int:
        """Leave the device and the page locks; the device bytes given back. Idempotent. A model
        that sleeps has left the device, and stays as it is.

        Raises: StateError during a run, or if the courier is stuck; then everything is kept.
        """
        return self._unload(keep_locks=False)

    def sleep(self, keep_locks: bool = True) -> None:
        """Leave the device until ``wake``, which brings back what is there now. Idempotent.

        Nothing is copied: every weight has its home on the host. A load or a run is refused
        meanwhile.

        Args:
            keep_locks: keep the page locks that are held, so that waking need not take them again;
                of a model that sleeps already they may still be given up, but not be had again.
        Raises: StateError during a run, or if the courier is stuck; then nothing has changed. After
            any other error what was loaded is loaded again if that can be, and else nothing is.
        """
        if self._state is EngineState.ASLEEP:
            if not keep_locks:
                self._occupancy.release_locks()
            return
        if self._state is EngineState.DETACHED:
            raise StateError("the engine is detached; there is nothing to put to sleep")
        plan = self._holding.plan
        loaded = None if plan is None else (self._holding.budget, plan.activation_bytes)
        try:
            self._unload(keep_locks)
            self._slept_with = loaded
            self._move(EngineState.ASLEEP)
        except StateError:
            raise
        except BaseException:
            # Whatever it was, Ctrl-C too: either all of it sleeps or none.
            if self.state is not EngineState.ASLEEP:
                self._slept_with = None
                self._load_again(loaded)
            raise

    @property
    def slept_with(self) -> tuple[Budget, int] | None:
        """The budget and the activations of what ``wake`` brings back; None: it brings nothing."""
        return self._slept_with

    def wake(self, budget: Budget | None = None) -> None:
        """Undo ``sleep``: what was on the device is there again. Idempotent.

        Args:
            budget: in place of the one of before; None for that one.
        Raises: as ``load``; the model is still asleep then, and holds what it held.
        """
        if self._state is not EngineState.ASLEEP:
            return
        self._check_files()
        try:
            self._move(EngineState.UNLOADED)
            if self._slept_with is not None:
                self._holding.keeps_locks = True
                before, activation_bytes = self._slept_with
                self.load(budget or before, activation_bytes)
        except BaseException:
            # A wake that any error ended leaves a model that sleeps, and can be woken again.
            if self.state is EngineState.UNLOADED:
                self._move(EngineState.ASLEEP)
            raise
        finally:
            self._holding.keeps_locks = False
        self._slept_with = None

    @property
    def device_bytes(self) -> int:
        """Held on the device now: resident weights, buffers and slots. Any thread."""
        return self._occupancy.device_bytes

    @property
    def loaded_with(self) -> tuple[Budget, Plan] | None:
        """The budget and the plan in force; None while nothing is loaded. Any thread."""
        plan = self._holding.plan
        return None if plan is None else (self._holding.budget, plan)

    def allow(self, budget: Budget) -> None:
        """Correct the plan by this budget from now on; the plan itself stays until then."""
        self._holding.adopt(budget)

    @contextlib.contextmanager
    def run(self, interrupt: Callable[[], None] | None = None) -> Iterator[None]:
        """One run of the model (a sampling, or one forward): checks before, cleans up after.

        Args:
            interrupt: called while waiting for the courier; may raise to cancel.
        Raises: CheckpointChangedError before anything ran, if a file changed since it was opened;
            after the run, if the bytes it read were changed meanwhile (its result is not to be
            used). A file that was deleted or replaced meanwhile was still read whole.
        """
        self._refuse_asleep()
        if self._state is not EngineState.LOADED:
            raise StateError(f"the engine is {self._state.value}; load it before a run")
        self._check_files()
        try:
            self._move(EngineState.RUNNING)
            self._parts.stream.interrupt = interrupt
            self._holding.meter.begin()
            self._entered.clear()
            self._gave_way = False
            yield
            self._parts.stream.wind_down()
            self._occupancy.settle_renewal()
            for mapping in self._parts.mappings:
                mapping.check_not_rewritten()
            self._holding.meter.end()
        finally:
            # Also for a cancel, which is no Exception and reaches no post-hook.
            self._end_run()

    def end_pass(self) -> None:
        """One forward of the model is over: correct the plan by what it took.

        After early passes the device budget is filled, after later ones the plan only ever gets
        smaller. Whoever runs the model calls this between two passes of a run; outside one it does
        nothing. Raises: DeviceMemoryError if even the plan of before cannot be had again.
        """
        if self._state is not EngineState.RUNNING:
            return
        self._entered.clear()
        self._parts.patches.end_pass()
        if self._occupancy.has_borrowed_staging:
            self._parts.stream.settle_orders()
            self._occupancy.end_renewal()
        if not self._holding.meter.end_pass():
            return
        if self._occupancy.lacks_staging:
            self._parts.stream.settle_orders()
            self._occupancy.stage_what_was_refused()
        self._holding.meter.measure()
        self._holding.correct()

    @property
    def activation_need_bytes(self) -> int | None:
        """What a run like the last needs beside the weights; None if it could not be measured."""
        return self._holding.meter.need_bytes

    @property
    def is_between_passes(self) -> bool:
        """Whether a run is under way and no layer of it: what others ask for can be done now."""
        return self._state is EngineState.RUNNING and not self._entered

    def lend(self, freed_bytes: int) -> int:
        """Leave device bytes to another model that is loaded in the middle of a run; how many.

        Nothing while a layer runs, or outside a run (load a smaller plan then). The next run may
        have them again.
        """
        return self._holding.lend(freed_bytes) if self.is_between_passes else 0

    def give_way(self, error: BaseException) -> bool:
        """Run a smaller plan after a pass ended in ``error``; whether to try that pass again.

        Only when the device was full, only once in a run, and only where a smaller plan exists.
        """
        if self._gave_way or self._state is not EngineState.RUNNING:
            return False
        if not self._parts.backend.is_out_of_memory(error):
            return False
        # The frames of the pass that failed hold its activations.
        traceback.clear_frames(error.__traceback__)
        self._gave_way = self._holding.make_room()
        return self._gave_way

    def detach(self) -> None:
        """Unload and take the hooks off, for good. Idempotent."""
        self.unload()
        if self._state is EngineState.ASLEEP:
            self._move(EngineState.UNLOADED)
        while self._handles:
            self._handles.pop().remove()
        self._shutdown()
        if self._state is not EngineState.DETACHED:
            self._move(EngineState.DETACHED)

    def snapshot(self) -> EngineSnapshot:
        """Everything about this engine at this moment. Lock-free; safe from any thread."""
        return snapshot_of(
            self._parts.inventory,
            self._parts.sources,
            self._parts.stream,
            Published(
                state=self._state,
                budget=self._holding.budget,
                plan=self._holding.plan,
                layer_bytes=self._occupancy.layer_bytes,
                staging_bytes=self._occupancy.staging_bytes,
                resident_bytes=self._occupancy.resident_bytes,
                device_peak_bytes=self._occupancy.peak_bytes,
                activation_peak_bytes=self._holding.meter.peak_bytes,
                block_lists=tuple(block_list.name for block_list in self._parts.block_lists),
                notes=self._holding.notes,
            ),
        )

    def _end_run(self) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._parts.stream.finish()
        finally:
            # Whatever the sweep met: what it left is swept by the next run, or when it is unloaded.
            self._parts.stream.interrupt = None
            self._planner.forget_loan()
            if self._state is EngineState.RUNNING:
                self._move(EngineState.LOADED)
            if self._holding.plan is None:
                # A correction failed and left nothing on the device.
                self._move(EngineState.UNLOADING)
                self._move(EngineState.UNLOADED)

    def _unload(self, keep_locks: bool) -> int:
        if self._state is EngineState.UNLOADED and not keep_locks:
            self._occupancy.release_locks()  # an interrupt may have left some
        if self._state in (EngineState.UNLOADED, EngineState.ASLEEP, EngineState.DETACHED):
            return 0
        if self._state is EngineState.RUNNING:
            raise StateError("the engine is running; unload it after the run, or cancel the run")
        self._parts.stream.settle_orders()
        before = self._occupancy.device_bytes
        if self._state is EngineState.LOADED:
            self._move(EngineState.UNLOADING)
        # Otherwise a load or an unload failed while it gave back; this call goes on with it.
        with torch.inference_mode(False), torch.no_grad():
            self._occupancy.release(keep_locks)
        self._holding.plan = None
        self._move(EngineState.UNLOADED)
        return before

    def _load_again(self, loaded: tuple[Budget, int] | None) -> None:
        """After an error stopped an unload half-way: the state before, or nothing loaded."""
        try:
            self._unload(keep_locks=True)
            if loaded is not None:
                self.load(*loaded)
        except CourierError as problem:
            _LOG.warning("%s; the model is %s, its next run loads it", problem, self._state.value)

    def _refuse_asleep(self) -> None:
        if self._state is EngineState.ASLEEP:
            raise AsleepError("the model is asleep; wake it before it is used")

    def hook_layers(self) -> None:
        """Put the hooks on the layers. Called by ``attach``."""
        modules = [group.module for group in self._parts.inventory.layers]
        self._handles.extend(put_hooks(self, modules))
        inventory = self._parts.inventory
        mapped = (
            site.module
            for group in (inventory.base, *inventory.layers)
            for weight in group.weights
            if weight.mapping is not None
            for site in weight.sites
        )
        self._handles.extend(refuse_new_weights(dict.fromkeys(mapped)))

    def begin_layer(self, index: int) -> None:
        """Hook: layer ``index`` is about to run."""
        self._entered.add(index)
        if self._occupancy.is_renewing:
            with torch.inference_mode(False), torch.no_grad():
                self._occupancy.renew(index)
        if self._parts.stream.streams(index):
            with torch.inference_mode(False), torch.no_grad():
                self._parts.stream.acquire(index)

    def end_layer(self, index: int) -> None:
        """Hook: layer ``index`` has issued its work."""
        self._entered.discard(index)
        if self._parts.stream.streams(index):
            with torch.inference_mode(False), torch.no_grad():
                self._parts.stream.release(index)

    def _apply(self, budget: Budget, plan: Plan) -> None:
        self._parts.stream.settle_orders()
        try:
            self._move(EngineState.LOADING)
            self._holding.occupy(plan, budget)
            self._holding.adopt(budget)
            self._holding.say(*self._planner.notes(budget))
            self._move(EngineState.LOADED)
        except BaseException:
            # Nothing is to be on the device after any error, a Ctrl-C beside the work too.
            if self._state is EngineState.LOADING:
                if self._holding.plan is not None:
                    self._holding.vacate()
                self._move(EngineState.UNLOADED)
            raise

    def _planned(self, budget: Budget, activation_bytes: int) -> tuple[PlanRequest, Plan]:
        self._parts.patches.take_memory()
        request = self._planner.request(budget, activation_bytes)
        try:
            return request, make_plan(request)
        except DeviceBudgetError:
            if not self._parts.patches.do_without_memory():
                raise
        request = self._planner.request(budget, activation_bytes)
        return request, make_plan(request)

    def _apply_or_smaller(self, request: PlanRequest, budget: Budget, plan: Plan) -> Plan:
        try:
            self._apply(budget, plan)
        except DeviceMemoryError as error:
            smaller = smaller_budget(request, plan)
            if smaller is None:
                raise
            plan = make_plan(smaller)
            note = shortage_note(error)
            self._apply(budget, plan)
            self._holding.say(note)
        return plan

    def _prepare_renewal(self) -> None:
        self._parts.stream.settle_orders()
        try:
            self._move(EngineState.LOADING)
            with torch.inference_mode(False), torch.no_grad():
                self._occupancy.prepare_renewal()
            self._move(EngineState.LOADED)
        except BaseException:
            if self._state is EngineState.LOADING:
                self._holding.vacate()
                self._move(EngineState.UNLOADED)
            raise

    def _check_files(self) -> None:
        for mapping in self._parts.mappings:
            mapping.check_unchanged()

    def _move(self, state: EngineState) -> None:
        assert state in ENGINE_MOVES[self._state], (self._state, state)
        self._state = state


def _shut_down(
    courier: Courier,
    occupancy: Occupancy,
    handles: list[RemovableHandle],
    backend: DeviceBackend,
) -> None:
    """End the thread, then free what it used and give the module its own parameters back."""
    if courier.is_current_thread():
        # A garbage collection on the courier thread found its own engine: the thread cannot wait
        # for itself, so another one does.
        threading.Thread(
            target=_shut_down,
            args=(courier, occupancy, handles, backend),
            name="courier-shut-down",
            daemon=True,
        ).start()
        return
    courier.close()
    with torch.inference_mode(False), torch.no_grad():
        occupancy.release()
    while handles:
        handles.pop().remove()
    backend.close()
