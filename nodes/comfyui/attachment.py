"""What Courier hangs on a model of the core's, once, for all its clones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...offload_core.host import host_limits
from ...offload_core.run import LayerEngine
from ...offload_core.values import Budget, CourierError, DeviceBudgetError, Switches
from .private_weights import PrivateWeights

ATTRIBUTE = "courier"
"""The attribute of the inner model. The engine is held here and nowhere else."""

_AUTOMATIC_HOST_SHARE = 0.6
"""Of what the machine or its container has free. The rest is for text encoders, the page cache of
the files themselves, and everybody else."""


@dataclass(eq=False)
class Attachment:
    """The engine of a model, the user's budget, and what the core would have stored weights in.

    ``stored_dtypes`` names, for each weight by its key in the inner model, the dtype that the
    core's own loader would hold it in; patches are rounded to it.

    ``homes`` are the parameters as loaded, by the same keys: what is clean and stays, wherever
    layers are at the moment.

    ``activation_bytes`` is what the coming run needs beside the weights: the core's estimate for
    its shape, then what was measured for that shape.
    """

    engine: LayerEngine
    budget: Budget
    stored_dtypes: Mapping[str, torch.dtype]
    homes: Mapping[str, torch.nn.Parameter]
    switches: Switches
    measures_activations: bool
    private: PrivateWeights = field(default_factory=PrivateWeights)
    activation_bytes: int = 0
    measured_activations: dict[tuple[int, ...], int] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None

    def budget_within(self, offered_bytes: int | None) -> Budget:
        """The budget to load with when the core offers ``offered_bytes`` for weights (None: all).

        The user's figure is a ceiling and the core's offer another. An offer too small for any
        plan is raised to the smallest one, as the core's own loader would also run then; a user's
        figure that is too small is an error.
        """
        limit = self._device_limit()
        if offered_bytes is not None:
            offer = max(offered_bytes + self.activation_bytes, self._smallest())
            limit = offer if limit is None else min(limit, offer)
        return Budget(limit, self.host_bytes())

    def host_bytes(self) -> int:
        """The user's host figure, or the automatic one for the machine as it is now."""
        if self.budget.host_bytes is not None:
            return self.budget.host_bytes
        memory = self.engine.snapshot().memory
        # What a GPU driver has locked, neither psutil nor a control group counts as used.
        unseen = memory.locked_bytes if self.measures_activations else 0
        return automatic_host_bytes(self.switches, memory.host_bytes, unseen)

    def planned_bytes(self) -> int:
        """Device bytes of weights and slots once loaded as the user asked."""
        try:
            plan = self.engine.plan(Budget(self._device_limit(), 0), self.activation_bytes)
        except DeviceBudgetError as error:
            return error.smallest_bytes
        except CourierError:
            return 0
        return plan.device_bytes

    def expect_shape(self, shape: tuple[int, ...], estimated_bytes: int) -> None:
        """A run with latents of ``shape`` comes next."""
        self.shape = shape
        if self.measures_activations:
            self.activation_bytes = self.measured_activations.get(shape, estimated_bytes)

    def _device_limit(self) -> int | None:
        figures = (self.budget.device_bytes, self.switches.pretend_device_bytes)
        return min((figure for figure in figures if figure is not None), default=None)

    def _smallest(self) -> int:
        try:
            self.engine.plan(Budget(0, 0), self.activation_bytes)
        except DeviceBudgetError as error:
            return error.smallest_bytes
        return 0


def automatic_host_bytes(switches: Switches, held_bytes: int = 0, unseen_bytes: int = 0) -> int:
    """The automatic host budget of this machine, or of its container, as it is now.

    Args:
        held_bytes: what the model holds already, which is its own to keep.
        unseen_bytes: what is locked without the system counting it as used.
    """
    usable = host_limits(driver_locked_bytes=unseen_bytes).available_bytes + held_bytes
    if switches.pretend_host_bytes is not None:
        usable = min(usable, switches.pretend_host_bytes)
    return int(usable * _AUTOMATIC_HOST_SHARE)


def attachment_of(model: Any) -> Attachment | None:
    """The attachment of an inner model, or None if it is not one of ours."""
    found = getattr(model, ATTRIBUTE, None)
    return found if isinstance(found, Attachment) else None
