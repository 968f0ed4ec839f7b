"""What Courier hangs on a model of the core's, once, for all its clones."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...offload_core.host import host_limits
from ...offload_core.plan import Plan
from ...offload_core.run import BASE_NAME, LayerEngine, PatchedWeight, SharedBudget
from ...offload_core.values import (
    Budget,
    CourierError,
    DeviceBudgetError,
    EngineState,
    Switches,
    size_text,
)
from ..default_budget import AUTOMATIC_HOST_SHARE
from .private_weights import PrivateWeights
from .registry import AskedBy, Origin

ATTRIBUTE = "courier"
"""The attribute of the inner model. The engine is held here and nowhere else."""

_GUESS_FACTOR = 1.5
_GUESS_MORE_BYTES = 640 << 20
"""The core's estimate leaves out workspaces and what its allocator rounds up."""
_SLOT_ROUNDING_BYTES = 8 << 20


@dataclass(eq=False)
class Attachment:
    """The engine of a model, the user's budget, and what the core would have stored weights in.

    ``stored_dtypes`` names, for each weight by its key in the inner model, the dtype that the
    core's own loader would hold it in; patches are rounded to it.

    ``homes`` are the parameters as loaded, by the same keys: what is clean and stays, wherever
    layers are at the moment.

    ``activation_bytes`` is what the coming run needs beside the weights: what was measured for its
    shape, or before that a guess well above the core's own.
    """

    engine: LayerEngine
    budget: Budget
    stored_dtypes: Mapping[str, torch.dtype]
    homes: Mapping[str, torch.nn.Parameter]
    switches: Switches
    measures_activations: bool
    share: SharedBudget | None = None
    private: PrivateWeights = field(default_factory=PrivateWeights)
    arrivals: dict[str, PatchedWeight] = field(default_factory=dict)
    """By key: the patches that the engine merges where a weight arrives."""
    unload_after_run: bool = False
    """ComfyUI dropped the model in the middle of its run."""
    run_lock: threading.RLock = field(default_factory=threading.RLock)
    """Held by the thread that runs the model; another one waits."""
    arrivals_of: object = None
    """The set of patches that they were made from, as ComfyUI numbers it."""
    root: torch.nn.Module | None = None
    """What the engine works on where that is not the model itself; it lives as long as this."""
    origin: Origin = field(default_factory=Origin)
    """The loader that made the model, and what it was given."""
    model_id: str = ""
    """In the status, and in orders."""
    before_use: Callable[[str], None] | None = None
    """Asked before anything is loaded; wakes the model, or refuses."""
    asked_by: AskedBy = AskedBy.NODE
    loaded_for: Budget | None = None
    """The user's budget at the last load; another one than ``budget`` waits for the next."""
    remarks: tuple[str, ...] = ()
    """What there was to say about the user's figures at the last load."""
    activation_bytes: int = 0
    measured_activations: dict[tuple[int, ...], int] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    told: str = ""
    """What the log said of the last load."""

    def budget_within(self, offered_bytes: int | None, room_bytes: int | None = None) -> Budget:
        """The budget to load with when the core offers ``offered_bytes`` for weights (None: all).

        The user's figure is a ceiling and the core's offer another. An offer too small for any
        plan is raised to the smallest one, as the core's own loader would also run then; a user's
        figure that is too small is an error.

        Args:
            room_bytes: what the device has for weights and activations together, where that is
                known. Then it counts instead of the offer: the core keeps back at least 1.2 GiB for
                activations, whatever they really take.
        """
        limit = self._device_limit()
        if offered_bytes is not None:
            room = room_bytes if room_bytes is not None else offered_bytes + self.activation_bytes
            offer = max(room, self._smallest())
            limit = offer if limit is None else min(limit, offer)
        return Budget(limit, self.host_bytes())

    def load(self, offered_bytes: int | None, room_bytes: int | None = None) -> None:
        """Load the engine with what the user allows and the core offers (see ``budget_within``).
        Raises: CourierError."""
        budget = self.budget_within(offered_bytes, room_bytes)
        if self.share is not None:
            activation_bytes = self.activations_within(budget.device_bytes)
            budget = self.share.take(self.engine, budget, activation_bytes)
        self.engine.load(budget, self.activations_within(budget.device_bytes))
        self.loaded_for = self.budget
        self.remarks = self._remarks(budget.host_bytes)

    @property
    def is_asked_anew(self) -> bool:
        """Whether the user asked for another budget since the last load. Any thread."""
        return self.loaded_for is not None and self.loaded_for != self.budget

    def preview(self, budget: Budget, room_bytes: int | None) -> Plan:
        """The plan that a load under the user's ``budget`` would settle into, once the run has been
        measured. Changes nothing; any thread.

        Args:
            room_bytes: what the device has for this model where no figure bounds it; None if that
                is not known.
        Raises: BudgetError naming the smallest that works.
        """
        trial = dataclasses.replace(self, budget=budget)
        shared = None if self.share is None else self.share.budget
        device = [trial._device_limit(), room_bytes if budget.device_bytes is None else None]
        host = [trial.host_bytes()]
        if shared is not None:
            device.append(shared.device_bytes)
            host.append(shared.host_bytes)
        limit = _smallest_of(device)
        need = self.measured_activations.get(self.shape) if self.shape is not None else None
        if need is None:
            need = trial._guess_within(limit)
        return self.engine.plan(Budget(limit, _smallest_of(host)), need)

    def ask_before_use(self) -> None:
        """Raises: AsleepError if the model sleeps, and is not to be woken by its use."""
        if self.before_use is not None and self.engine.state is EngineState.ASLEEP:
            self.before_use(self.model_id)

    def end_pass(self) -> None:
        """Let the engine correct its plan, within what others leave of a shared budget now."""
        if self.share is not None:
            wanted = Budget(self._device_limit(), self.host_bytes())
            need = self.engine.activation_need_bytes or 0
            self.engine.allow(self.share.take(self.engine, wanted, need))
        self.engine.end_pass()

    def activations_within(self, limit_bytes: int | None) -> int:
        """What to leave for activations under that device budget.

        What was measured; a budget too small for it is an error. Where nothing was, the guess, but
        no more than streaming everything through two slots can do without: it is no more than a
        guess, and after one pass it is measured.
        """
        if limit_bytes is None or self.shape in self.measured_activations:
            return self.activation_bytes
        if not self.measures_activations:
            return self.activation_bytes
        whole = self.engine.plan(Budget(None, 0)).device_bytes
        if whole + self.activation_bytes <= limit_bytes:
            return self.activation_bytes
        layers = [r for r in self.engine.snapshot().layers if r.name != BASE_NAME]
        second_slot = max((record.size_bytes for record in layers), default=0)
        most = limit_bytes - self._smallest(0) - second_slot - _SLOT_ROUNDING_BYTES
        return max(0, min(self.activation_bytes, most))

    def _guess_within(self, limit_bytes: int | None) -> int:
        """As ``activations_within``, with the guess itself where nothing was measured; it gives way
        to the smallest plan, because it is no more than a guess."""
        if limit_bytes is None or self.shape in self.measured_activations:
            return self.activation_bytes
        return max(0, min(self.activation_bytes, limit_bytes - self._smallest(0)))

    def host_bytes(self) -> int:
        """The user's host figure, or the automatic one for the machine as it is now.

        A figure beyond all that the machine has is none: locking that much would take the memory
        of every other program, until the system ends one of them.
        """
        asked = asked_host_bytes(self.budget, self.switches)
        if asked is not None:
            return asked
        memory = self.engine.snapshot().memory
        # What a GPU driver has locked, neither psutil nor a control group counts as used.
        unseen = memory.locked_bytes if self.measures_activations else 0
        return automatic_host_bytes(self.switches, memory.host_bytes, unseen)

    def planned_bytes(self) -> int:
        """Device bytes of weights and slots once loaded as the user asked, and measured."""
        try:
            limit = self._device_limit()
            plan = self.engine.plan(Budget(limit, 0), self._guess_within(limit))
        except DeviceBudgetError as error:
            return error.smallest_bytes
        except CourierError:
            return 0
        return plan.device_bytes

    def expect_shape(self, shape: tuple[int, ...], estimated_bytes: int) -> None:
        """A run with latents (and conditionings) of ``shape`` comes next."""
        self.shape = shape
        if self.measures_activations:
            guess = int(estimated_bytes * _GUESS_FACTOR) + _GUESS_MORE_BYTES
            self.activation_bytes = self.measured_activations.get(shape, guess)

    def _device_limit(self) -> int | None:
        return _smallest_of((self.budget.device_bytes, self.switches.pretend_device_bytes))

    def _remarks(self, host_bytes: int | None) -> tuple[str, ...]:
        asked = self.budget.host_bytes
        is_taken = asked_host_bytes(self.budget, self.switches) is not None
        if asked is None or is_taken or host_bytes is None:
            return ()
        total = host_total_bytes(self.switches)
        return (
            f"the RAM budget of {size_text(asked)} is more than the {size_text(total)} that this "
            f"machine has; {size_text(host_bytes)} are used, a share of what is free",
        )

    def _smallest(self, activation_bytes: int | None = None) -> int:
        if activation_bytes is None:
            activation_bytes = self.activation_bytes
        try:
            self.engine.plan(Budget(0, 0), activation_bytes)
        except DeviceBudgetError as error:
            return error.smallest_bytes
        return 0


def _smallest_of(limits: Iterable[int | None]) -> int | None:
    """None is no limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def asked_host_bytes(budget: Budget, switches: Switches) -> int | None:
    """The user's host figure; None where there is none, or one beyond all that the machine has."""
    asked = budget.host_bytes
    return asked if asked is not None and asked <= host_total_bytes(switches) else None


@functools.cache
def _machine_host_bytes() -> int:
    """Read once: under a shared budget it is asked for after each pass of a model."""
    return host_limits().total_bytes


def host_total_bytes(switches: Switches) -> int:
    """All memory of this machine, or of its container."""
    total = _machine_host_bytes()
    pretended = switches.pretend_host_bytes
    return total if pretended is None else min(total, pretended)


def automatic_host_bytes(switches: Switches, held_bytes: int = 0, unseen_bytes: int = 0) -> int:
    """The automatic host budget of this machine, or of its container, as it is now.

    Args:
        held_bytes: what the model holds already, which is its own to keep.
        unseen_bytes: what is locked without the system counting it as used.
    """
    usable = host_limits(driver_locked_bytes=unseen_bytes).available_bytes + held_bytes
    if switches.pretend_host_bytes is not None:
        usable = min(usable, switches.pretend_host_bytes)
    return int(usable * AUTOMATIC_HOST_SHARE)


def attachment_of(model: Any) -> Attachment | None:
    """The attachment of an inner model, or None if it is not one of ours."""
    found = getattr(model, ATTRIBUTE, None)
    return found if isinstance(found, Attachment) else None
