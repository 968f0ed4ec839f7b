"""One pair of figures for several models of one device: what they hold together stays under it."""

from __future__ import annotations

import weakref

from ..values import Budget
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
            need = engine.planned_device_bytes(Budget(device, host), activation_bytes)
            excess = need + sum(other.device_bytes for other in others) - self.budget.device_bytes
            for other in others:  # the least recently used first
                if excess > 0:
                    excess -= other.give_up(excess)
            held = sum(other.device_bytes for other in others)
            device = _smaller(device, max(0, self.budget.device_bytes - held))
        if self.budget.host_bytes is not None:
            promised = sum(other.promised_host_bytes for other in others)
            # 0 would mean "lock nothing", and so it should where the others have taken all.
            host = _smaller(host, max(0, self.budget.host_bytes - promised))
        return Budget(device, host)

    def _use(self, engine: LayerEngine) -> list[LayerEngine]:
        """Make ``engine`` the most recently used; the others that live, the least recent first."""
        living = [(ref, member) for ref in self._members if (member := ref()) is not None]
        others = [(ref, member) for ref, member in living if member is not engine]
        self._members = [ref for ref, _ in others] + [weakref.ref(engine)]
        return [member for _, member in others]


def _smaller(one: int | None, other: int | None) -> int | None:
    """The smaller of two limits; None is none."""
    return min((limit for limit in (one, other) if limit is not None), default=None)
