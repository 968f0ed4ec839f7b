"""Sleep and wake for nodes, routes and headless runs: orders in, receipts out, ready for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ...offload_core.sleep import (
    Held,
    MachineRecord,
    OrderError,
    Progress,
    Receipt,
    SleepController,
    Sleeper,
    asleep_text,
)
from ...offload_core.values import ConfigError
from .pending import OrderList
from .records import (
    BusyError,
    OnUse,
    OrderFailedError,
    SleepOrder,
    UnknownModelError,
    WakeOrder,
    When,
)

_BUSY_TEXT = (
    "a prompt runs; nothing was changed. Try again when the queue is empty, or ask with "
    '"when": "idle", which waits for that'
)


class Host(Protocol):
    """What orders need to know of ComfyUI. Threads: any."""

    def sleepers(self) -> Sequence[Sleeper]:
        """All models, ours first."""

    def nothing_runs(self, wait: bool, check: Callable[[], None]) -> AbstractContextManager[None]:
        """While it is entered no prompt begins. Raises on entering: BusyError, and what ``check``
        raises, which is called now and then while it waits."""

    def is_busy(self) -> bool:
        """Whether a prompt runs or waits. Does not wait for anything."""

    def measure(self) -> MachineRecord:
        """The machine now."""

    def foreign(self) -> Sequence[str]:
        """Memory that no order frees, in words."""

    def place(self) -> str:
        """What sentences call the device's memory."""

    def is_ram(self) -> bool:
        """Whether the device's memory is the host's own."""


class SleepService:
    """Answers ``ModelControl``. Threads: any; see SleepController."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.orders_given = 0
        """Orders that people and programs gave; see ``sleep``."""
        self.orders_done = 0
        """How often ``last_order`` was another one."""
        self.last_order: dict[str, Any] | None = None
        """The receipt of the last order, or of its failure; None before the first."""
        self.under_way = OrderList()
        self.controller = SleepController(
            host.sleepers, host.measure, host.foreign, host.place(), host.is_ram()
        )

    def is_busy(self) -> bool:
        """See ModelControl."""
        return self._host.is_busy()

    def models(self) -> list[dict[str, Any]]:
        """Every model as it is now."""
        return [self._model_json(sleeper) for sleeper in self._host.sleepers()]

    def sleep(self, order: SleepOrder, counts: bool = True) -> dict[str, Any]:
        """See ModelControl. Not from the thread that runs prompts: see ``sleep_here``.

        Args:
            counts: as activity; the idle watch's own orders do not.
        """
        self.orders_given += int(counts)
        return self._outside_prompts(
            "sleep", order.when, lambda progress: self.sleep_here(order, progress)
        )

    def wake(self, order: WakeOrder) -> dict[str, Any]:
        """See ModelControl. Not from the thread that runs prompts: see ``wake_here``."""
        self.orders_given += 1
        return self._outside_prompts(
            "wake", order.when, lambda progress: self.wake_here(order, progress)
        )

    def sleep_here(self, order: SleepOrder, progress: Progress | None = None) -> dict[str, Any]:
        """As ``sleep``, from the thread that runs prompts: between two nodes nothing else runs."""
        wakes = order.on_use is OnUse.WAKE
        return self._answered(
            lambda: self.controller.sleep(order.models, order.level, wakes, progress)
        )

    def wake_here(self, order: WakeOrder, progress: Progress | None = None) -> dict[str, Any]:
        """As ``wake``, from the thread that runs prompts."""
        return self._answered(lambda: self.controller.wake(order.models, progress))

    def before_use(self, model_id: str) -> None:
        """See SleepController."""
        self.controller.before_use(model_id)

    def refusal(self, model_ids: Sequence[str]) -> str | None:
        """The sentence that a prompt gets which uses any of these; None: it may use them."""
        for sleeper in self._host.sleepers():
            if sleeper.id in model_ids and self.controller.refuses_use(sleeper):
                return asleep_text(sleeper)
        return None

    def _outside_prompts(
        self, action: str, when: When, carry_out: Callable[[Progress], dict[str, Any]]
    ) -> dict[str, Any]:
        with (
            self.under_way.entered(action) as order,
            self._host.nothing_runs(when is When.IDLE, order.check),
        ):
            return carry_out(order.step)

    def _answered(self, carry_out: Callable[[], Receipt]) -> dict[str, Any]:
        try:
            return self._note(carry_out())
        except ConfigError as error:
            raise UnknownModelError(f"{error}; GET /courier/v1/models lists them") from error
        except OrderError as error:
            raise OrderFailedError(str(error), self._note(error.receipt)) from error

    def _note(self, receipt: Receipt) -> dict[str, Any]:
        self.last_order = noted = receipt_json(receipt)
        self.orders_done += 1
        return noted

    def _model_json(self, sleeper: Sleeper) -> dict[str, Any]:
        return {
            "id": sleeper.id,
            "name": sleeper.name,
            "kind": sleeper.kind,
            "state": self.controller.state_of(sleeper).value,
            "level": self.controller.level_of(sleeper),
            "on_use": _on_use(self.controller, sleeper),
            "problem": self.controller.problem_of(sleeper),
            "held": held_json(sleeper.held()),
        }


def _on_use(controller: SleepController, sleeper: Sleeper) -> str | None:
    if not sleeper.is_asleep:
        return None
    refuses = controller.refuses_use(sleeper)
    return (OnUse.REFUSE if refuses else OnUse.WAKE).value


def busy_error() -> BusyError:
    """A prompt runs."""
    return BusyError(_BUSY_TEXT)


def receipt_json(receipt: Receipt) -> dict[str, Any]:
    """A receipt as the HTTP API and the nodes give it."""
    return {
        "ok": receipt.ok,
        "action": receipt.action,
        "message": receipt.message,
        "seconds": round(receipt.seconds, 4),
        "models": [
            {
                "id": model.id,
                "name": model.name,
                "kind": model.kind,
                "state": model.state.value,
                "level": model.level,
                "changed": model.changed,
                "before": held_json(model.before),
                "after": held_json(model.after),
                "kept": list(model.kept),
            }
            for model in receipt.models
        ],
        "machine": {
            "before": dataclasses.asdict(receipt.before),
            "after": dataclasses.asdict(receipt.after),
        },
        "not_ours": list(receipt.not_ours),
    }


def held_json(held: Held) -> dict[str, int]:
    """What a model holds, in bytes."""
    return dataclasses.asdict(held)
