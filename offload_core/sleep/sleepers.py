"""What can sleep: the part that a model plays in an order."""

from __future__ import annotations

import weakref
from typing import Protocol

from ..run import LayerEngine
from ..values import Budget, CheckpointError, EngineState, size_text
from .records import Held

KEEPS_HOST, GIVES_HOST_BACK = 1, 2
LEVELS = (KEEPS_HOST, GIVES_HOST_BACK)
"""Sleep level 1 keeps page locks and copies on the host, level 2 gives back what the file has."""


class Sleeper(Protocol):
    """One model. Threads: whoever carries out an order, one at a time; the properties any."""

    id: str
    name: str
    kind: str
    """For people: "diffusion model", "text encoder", ..."""

    @property
    def is_asleep(self) -> bool:
        """It has left the device, and nothing brings it back but ``wake``."""

    @property
    def obstacle(self) -> str:
        """Why it cannot be woken at all; "" if it can."""

    def held(self) -> Held:
        """What it holds now."""

    def kept(self) -> tuple[str, ...]:
        """What of it stays on the host while it sleeps, and why; for people."""

    def fall_asleep(self, level: int) -> None:
        """Leave the device; with GIVES_HOST_BACK also what the file can give again. Idempotent.

        After an error it is awake as before, or at worst not loaded.
        """

    def wake(self) -> None:
        """Be as before. Idempotent. After an error it is asleep as before."""


class EngineSleeper:
    """A model of ours. Holds its engine weakly: an order must not keep a model alive."""

    def __init__(self, engine: LayerEngine, model_id: str, name: str, kind: str) -> None:
        self.id = model_id
        self.name = name
        self.kind = kind
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> LayerEngine | None:
        """The engine; None once it is gone."""
        return self._engine()

    @property
    def is_asleep(self) -> bool:
        """By the engine's own state."""
        engine = self._engine()
        return engine is not None and engine.state is EngineState.ASLEEP

    @property
    def obstacle(self) -> str:
        """A file that is no longer the one that was opened."""
        engine = self._engine()
        return "" if engine is None else engine.file_problem()

    def held(self) -> Held:
        """By the engine's own ledgers."""
        engine = self._engine()
        if engine is None:
            return Held(0)
        memory = engine.snapshot().memory
        return Held(
            memory.device_bytes, memory.locked_bytes, memory.copied_bytes, memory.staging_bytes
        )

    def kept(self) -> tuple[str, ...]:
        """Locks while they are held, and copies, which no file can give again as they are."""
        held, reasons = self.held(), []
        if held.locked_bytes:
            reasons.append(
                f"{size_text(held.locked_bytes)} of its file stay page-locked, so that waking need "
                "not lock them again; level 2 gives them back"
            )
        if held.copied_bytes:
            reasons.append(
                f"{size_text(held.copied_bytes)} are copies: the file does not have these weights "
                "in the form in which they are used"
            )
        return tuple(reasons)

    def fall_asleep(self, level: int) -> None:
        """Raises: StateError during a run."""
        engine = self._engine()
        if engine is not None:
            engine.sleep(keep_locks=level < GIVES_HOST_BACK)

    def wake(self) -> None:
        """Raises: as ``LayerEngine.wake``, without folders: others may read a receipt."""
        engine = self._engine()
        if engine is None:
            return
        try:
            engine.wake(self.budget_to_wake_in(engine))
        except CheckpointError as error:
            raise type(error)(engine.file_problem() or "its file could not be read") from error

    def budget_to_wake_in(self, engine: LayerEngine) -> Budget | None:
        """In place of the one that the engine fell asleep with; None for that one."""
        return None
