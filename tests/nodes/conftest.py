"""The pack loaded as ComfyUI loads it, and tiny models on a fake device. No ComfyUI is needed."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
_numbers = itertools.count()


@dataclass(frozen=True)
class Pack:
    """One copy of the pack, with its own core, under a name of its own."""

    name: str

    def module(self, path: str) -> ModuleType:
        """``module("nodes.models.status_json")``."""
        return importlib.import_module(f"{self.name}.{path}")


def load_pack() -> Pack:
    name = f"custom_nodes_test_copy_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Pack(name)


@pytest.fixture(scope="session")
def pack() -> Pack:
    return load_pack()


@pytest.fixture(scope="session")
def other_pack() -> Pack:
    """A second copy, as when its folder is there twice."""
    return load_pack()


@pytest.fixture
def service(pack: Pack) -> Any:
    return pack.module("nodes.models.registry").CourierService()


@pytest.fixture
def backend(pack: Pack) -> Any:
    return pack.module("offload_core.device").FakeBackend(capacity_bytes=1 << 20)


class TinyModel(nn.Module):
    """``blocks`` of one 8 x 8 linear each, and a head outside of them."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))
        self.head = nn.Linear(8, 2)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FakeControl:
    """Keeps the orders it got and answers at once; ``fail_with`` is raised instead."""

    last_order: dict[str, Any] | None = None

    def __init__(self, unknown_model_error: type[Exception], under_way: Any) -> None:
        self.under_way = under_way
        self.orders: list[Any] = []
        self.fail_with: BaseException | None = None
        self.ok = True
        self.sleeping: list[str] = []
        self._unknown_model_error = unknown_model_error

    def is_busy(self) -> bool:
        return False

    def models(self) -> list[dict[str, Any]]:
        return [self._model("wan-1"), self._model("sd3-2")]

    def sleep(self, order: Any) -> dict[str, Any]:
        named = self._take(order)
        self.sleeping = sorted({*self.sleeping, *named})
        return self._receipt("sleep")

    def wake(self, order: Any) -> dict[str, Any]:
        named = self._take(order)
        self.sleeping = [model for model in self.sleeping if model not in named]
        return self._receipt("wake")

    def _model(self, model_id: str) -> dict[str, Any]:
        state = "asleep" if model_id in self.sleeping else "awake"
        return {"id": model_id, "name": model_id, "kind": "diffusion model", "state": state}

    def _take(self, order: Any) -> list[str]:
        if self.fail_with is not None:
            raise self.fail_with
        known = [model["id"] for model in self.models()]
        for model_id in order.models or ():
            if model_id not in known:
                raise self._unknown_model_error("no model has this id")
        self.orders.append(order)
        return list(known if order.models is None else order.models)

    def _receipt(self, action: str) -> dict[str, Any]:
        message = f"{action} is done"
        return {"ok": self.ok, "action": action, "message": message, "seconds": 0.1, "models": []}


class FakeBudgets:
    """Keeps the budgets it was asked about; ``fail_with`` is raised instead."""

    def __init__(self, unknown_model_error: type[Exception]) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.fail_with: BaseException | None = None
        self._unknown_model_error = unknown_model_error

    def plan(self, order: Any) -> dict[str, Any]:
        return self._answer("plan", order)

    def set_budget(self, order: Any) -> dict[str, Any]:
        return {**self._answer("budget", order), "applied": "now"}

    def _answer(self, name: str, order: Any) -> dict[str, Any]:
        if self.fail_with is not None:
            raise self.fail_with
        if order.model != "wan-1":
            raise self._unknown_model_error("no model has this id")
        self.asked.append((name, order))
        figures = {"device_bytes": None, "host_bytes": None}
        return {
            "model": order.model, "fits": True, "message": "it fits", "asked": figures,
            "smallest": figures, "planned": {}, "counts": {}, "bytes": {}, "changes": 0,
            "layers": [],
        }  # fmt: skip


@pytest.fixture
def budgets(pack: Pack) -> FakeBudgets:
    return FakeBudgets(pack.module("nodes.requests.records").UnknownModelError)


@pytest.fixture
def control(pack: Pack) -> FakeControl:
    return FakeControl(
        pack.module("nodes.requests.records").UnknownModelError,
        pack.module("nodes.requests.pending").OrderList(),
    )


@pytest.fixture
def make_engine(pack: Pack, backend: Any) -> Callable[..., Any]:
    """``make_engine(blocks=4)``: an engine over a tiny model. Only the caller keeps it alive."""

    def make(blocks: int = 4) -> Any:
        return pack.module("offload_core.run").attach(TinyModel(blocks), backend)

    return make
