"""The engine: one model's layers under one pair of budgets.

    attach -> load(budget) -> [run() ... layers stream ... ]* -> unload -> detach

The module works before, between and after: whatever is not on the device is the module's own
parameter, a view on the checkpoint mapping or an ordinary tensor.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..device import DeviceBackend
from ..host import FileMapping, HostLedger, PageLocker
from ..plan import Plan, PlanRequest, find_block_lists, make_plan
from ..values import (
    ENGINE_MOVES,
    Budget,
    DeviceMemoryError,
    EngineConfig,
    EngineSnapshot,
    EngineState,
    StateError,
)
from .courier import Courier
from .occupancy import Occupancy
from .parts import NO_LIMIT_BYTES, EngineParts
from .planning import plan_request, smaller_budget
from .report import Published, snapshot_of
from .source import LayerSource
from .stream import LayerStream
from .weights import take_inventory


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
        self._budget = parts.budget
        self._plan: Plan | None = None
        self._handles: list[RemovableHandle] = []
        self._activation_peak_bytes: int | None = None
        self._notes: tuple[str, ...] = parts.notes
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
        return make_plan(self._request(budget, activation_bytes))

    def load(self, budget: Budget, activation_bytes: int = 0) -> Plan:
        """Bring the device to the plan for ``budget``; what already fits the plan stays.

        When the device refuses memory that the budget allows, one smaller plan is tried and said
        in the notes. A call that is refused (BudgetError, CheckpointChangedError, StateError)
        changes nothing; after any other error nothing is on the device and nothing is locked.

        Raises: BudgetError, DeviceMemoryError, CheckpointChangedError, StateError.
        """
        if self._state not in (EngineState.UNLOADED, EngineState.LOADED):
            raise StateError(f"the engine is {self._state.value}; it cannot be loaded now")
        request = self._request(budget, activation_bytes)
        plan = make_plan(request)
        self._check_files()
        if plan == self._plan and budget == self._budget:
            return plan
        try:
            self._apply(budget, plan)
        except DeviceMemoryError as error:
            smaller = smaller_budget(request, plan)
            if smaller is None:
                raise
            plan = make_plan(smaller)
            note = (
                f"the device had less memory than the budget allows ({error}); a smaller plan runs"
            )
            self._apply(budget, plan)
            self._notes = (*self._parts.notes, note)
        return plan

    def unload(self) -> int:
        """Leave the device and the page locks; the device bytes given back. Idempotent.

        Raises: StateError during a run, or if the courier is stuck; then everything is kept.
        """
        if self._state in (EngineState.UNLOADED, EngineState.DETACHED):
            return 0
        if self._state is EngineState.RUNNING:
            raise StateError("the engine is running; unload it after the run, or cancel the run")
        self._parts.stream.settle_orders()
        before = self._occupancy.device_bytes
        if self._state is EngineState.LOADED:
            self._move(EngineState.UNLOADING)
        # Otherwise a load or an unload failed while it gave back; this call goes on with it.
        with torch.inference_mode(False), torch.no_grad():
            self._occupancy.release()
        self._plan = None
        self._move(EngineState.UNLOADED)
        return before

    @contextlib.contextmanager
    def run(self, interrupt: Callable[[], None] | None = None) -> Iterator[None]:
        """One run of the model (a sampling, or one forward): checks before, cleans up after.

        Args:
            interrupt: called while waiting for the courier; may raise to cancel.
        Raises: CheckpointChangedError before anything ran, if a file changed since it was opened;
            after the run, if the bytes it read were changed meanwhile (its result is not to be
            used). A file that was deleted or replaced meanwhile was still read whole.
        """
        if self._state is not EngineState.LOADED:
            raise StateError(f"the engine is {self._state.value}; load it before a run")
        self._check_files()
        self._move(EngineState.RUNNING)
        self._parts.stream.interrupt = interrupt
        self._parts.backend.start_activation_peak()
        try:
            yield
            self._parts.stream.wind_down()
            for mapping in self._parts.mappings:
                mapping.check_not_rewritten()
        finally:
            # Also for a cancel, which is no Exception and reaches no post-hook.
            with torch.inference_mode(False), torch.no_grad():
                self._parts.stream.finish()
            self._parts.stream.interrupt = None
            peak = self._parts.backend.activation_peak_bytes()
            if peak is not None:
                self._activation_peak_bytes = max(peak, self._activation_peak_bytes or 0)
            self._move(EngineState.LOADED)

    def detach(self) -> None:
        """Unload and take the hooks off, for good. Idempotent."""
        self.unload()
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
                budget=self._budget,
                plan=self._plan,
                resident=self._occupancy.resident,
                resident_bytes=self._occupancy.resident_bytes,
                device_peak_bytes=self._occupancy.peak_bytes,
                activation_peak_bytes=self._activation_peak_bytes,
                block_lists=tuple(block_list.name for block_list in self._parts.block_lists),
                notes=self._notes,
            ),
        )

    def hook_layers(self) -> None:
        """Put the hooks on the layers. Called by ``attach``."""
        for index, group in enumerate(self._parts.inventory.layers):
            assert group.module is not None
            hook = _LayerHook(weakref.ref(self), index)
            self._handles.append(group.module.register_forward_pre_hook(hook.before, prepend=True))
            self._handles.append(group.module.register_forward_hook(hook.after, always_call=True))

    def begin_layer(self, index: int) -> None:
        """Hook: layer ``index`` is about to run."""
        if index in self._occupancy.resident or self._plan is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._parts.stream.acquire(index)

    def end_layer(self, index: int) -> None:
        """Hook: layer ``index`` has issued its work."""
        if index in self._occupancy.resident or self._plan is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._parts.stream.release(index)

    def _apply(self, budget: Budget, plan: Plan) -> None:
        self._parts.stream.settle_orders()
        self._move(EngineState.LOADING)
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._occupancy.settle_into(plan, budget.host_bytes)
        except BaseException as error:
            # The frames below would keep the buffers that were had before the failure.
            traceback.clear_frames(error.__traceback__)
            with torch.inference_mode(False), torch.no_grad():
                self._occupancy.release()
            self._plan = None
            self._move(EngineState.UNLOADED)
            raise
        self._budget, self._plan, self._notes = budget, plan, self._parts.notes
        self._move(EngineState.LOADED)

    def _request(self, budget: Budget, activation_bytes: int) -> PlanRequest:
        return plan_request(
            self._parts.inventory,
            self._parts.sources,
            self._parts.backend,
            self._parts.config,
            budget,
            activation_bytes,
        )

    def _check_files(self) -> None:
        for mapping in self._parts.mappings:
            mapping.check_unchanged()

    def _move(self, state: EngineState) -> None:
        assert state in ENGINE_MOVES[self._state], (self._state, state)
        self._state = state


def attach(
    root: nn.Module,
    backend: DeviceBackend,
    mappings: Sequence[FileMapping] = (),
    config: EngineConfig | None = None,
    name: str = "model",
    notes: Sequence[str] = (),
    budget: Budget | None = None,
) -> LayerEngine:
    """An engine over ``root``; its layers are found, nothing is moved.

    Args:
        root: any module whose weights are on the CPU. Its parameters need no gradient.
        mappings: the checkpoint mappings that some of the weights are views on.
        name: for the courier thread and for messages.
        notes: what the status has to say about this model from the start.
        budget: what the status shows until the first load.
    Raises: ConfigError if a weight has no data or is on another device already.
    """
    config = config or EngineConfig()
    block_lists = find_block_lists(root)
    inventory = take_inventory(root, block_lists, mappings)
    ledger = HostLedger(NO_LIMIT_BYTES)
    locker = PageLocker(backend.page_locker(), ledger)
    sources = tuple(LayerSource(group, locker) for group in inventory.layers)
    courier = Courier(backend, name, config.switches.courier, config.patience_seconds)
    stream = LayerStream(
        inventory.layers,
        sources,
        backend,
        courier,
        config.interrupt_poll_seconds,
        config.switches.poison,
    )
    parts = EngineParts(
        inventory=inventory,
        block_lists=block_lists,
        mappings=tuple(mappings),
        backend=backend,
        ledger=ledger,
        sources=sources,
        base_source=LayerSource(inventory.base, locker),
        courier=courier,
        stream=stream,
        config=config,
        notes=(*config.switches.notes, *notes),
        budget=budget or Budget(),
    )
    engine = LayerEngine(root, parts)
    engine.hook_layers()
    return engine


@dataclass(frozen=True)
class _LayerHook:
    """The two hooks of one layer. Holds the engine weakly: a hook must not keep a model alive."""

    engine: weakref.ref[LayerEngine]
    index: int

    def before(self, module: nn.Module, args: Any) -> None:
        engine = self.engine()
        if engine is not None:
            engine.begin_layer(self.index)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        engine = self.engine()
        if engine is not None:
            engine.end_layer(self.index)


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
