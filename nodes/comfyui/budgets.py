"""Budgets of the models in a running ComfyUI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import comfy.model_management
import torch

from ...offload_core.plan import Plan
from ...offload_core.run import LayerEngine
from ...offload_core.values import Budget, CheckpointError, EngineSnapshot, EngineState
from ..models.attachment import Attachment
from ..models.registry import AskedBy, get_service
from ..requests.budget import BudgetService
from .host import device_room_bytes
from .orders import at_rest, belongings_of, get_orders
from .sleeping import listed_patcher


class CourierModel:
    """A model of ours; see ``requests.budget.Budgeted``. Not kept: it holds the model."""

    def __init__(
        self, name: str, engine: LayerEngine, attachment: Attachment, patcher: Any
    ) -> None:
        self.name = name
        self._engine = engine
        self._attachment = attachment
        self._patcher = patcher

    @property
    def asked(self) -> Budget:
        """As the node or an order gave it."""
        return self._attachment.budget

    @property
    def is_loaded(self) -> bool:
        """By the engine's own state."""
        return self._engine.state is EngineState.LOADED

    def snapshot(self) -> EngineSnapshot:
        """The engine's own."""
        return self._engine.snapshot()

    def plan(self, budget: Budget) -> Plan:
        """Within what the device has, where no figure bounds it."""
        device = self._patcher.load_device
        held = self._engine.device_bytes
        return self._attachment.preview(budget, device_room_bytes(device, held, False))

    def ask(self, budget: Budget) -> Callable[[], None]:
        """It stays with the loaded model; the loader makes another one with its own budget."""
        attachment = self._attachment
        before = attachment.budget, attachment.asked_by

        def take_back() -> None:
            attachment.budget, attachment.asked_by = before

        attachment.budget, attachment.asked_by = budget, AskedBy.ORDER
        return take_back

    def apply(self) -> None:
        """By the core's own load, which makes room and keeps its books."""
        model = self._patcher.model
        patcher = listed_patcher(model) or self._patcher
        try:
            with torch.inference_mode():
                comfy.model_management.load_models_gpu([patcher])
        except CheckpointError as error:
            text = self._engine.file_problem() or "its file could not be read"
            raise type(error)(text) from error


class ComfyBudgets:
    """See ``requests.budget.BudgetHost``."""

    def budgeted(self, model_id: str) -> CourierModel | None:
        """From the registry."""
        for known_id, name, engine in get_service().engines():
            if known_id == model_id:
                attachment, patcher = belongings_of(engine)
                if attachment is not None and patcher is not None:
                    return CourierModel(name, engine, attachment, patcher)
        return None

    def nothing_runs(self, wait: bool, check: Callable[[], None]) -> AbstractContextManager[None]:
        """As for orders."""
        return at_rest(wait, check)


_budgets: BudgetService | None = None
_making = threading.Lock()


def get_budgets() -> BudgetService:
    """The one of this process. Threads: any."""
    global _budgets
    with _making:
        if _budgets is None:
            _budgets = BudgetService(ComfyBudgets(), get_orders().under_way)
        return _budgets
