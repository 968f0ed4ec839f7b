"""Orders as nodes and routes give them: their answers, their refusals, ready for JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class Bed:
    """A model that is nothing but its state."""

    id: str
    held_by: Any
    name: str = "it"
    kind: str = "diffusion model"
    is_asleep: bool = False
    fails: bool = False
    obstacle: str = ""

    def held(self) -> Any:
        return self.held_by(0 if self.is_asleep else 8)

    def kept(self) -> tuple[str, ...]:
        return ("its copies",)

    def fall_asleep(self, level: int) -> None:
        if self.fails:
            raise RuntimeError("it will not")
        self.is_asleep = True

    def wake(self) -> None:
        self.is_asleep = False


@dataclass
class Host:
    """A ComfyUI in which a prompt runs, or not."""

    module: Any
    beds: list[Bed] = field(default_factory=list)
    runs: bool = False
    entered: list[bool] = field(default_factory=list)
    while_waiting: Callable[[], Any] = lambda: None

    def sleepers(self) -> list[Bed]:
        return self.beds

    @contextmanager
    def nothing_runs(self, wait: bool, check: Any) -> Iterator[None]:
        self.entered.append(wait)
        if self.runs and not wait:
            raise self.module.busy_error()
        self.while_waiting()
        check()
        yield

    def is_busy(self) -> bool:
        return self.runs

    def measure(self) -> Any:
        return self.module.MachineRecord(anon_bytes=5)

    def foreign(self) -> tuple[str, ...]:
        return ("1 GiB of others",)

    def place(self) -> str:
        return "the device"

    def is_ram(self) -> bool:
        return False


@pytest.fixture
def module(pack: Any) -> Any:
    return pack.module("nodes.requests.sleep")


@pytest.fixture
def control(pack: Any) -> Any:
    return pack.module("nodes.requests.records")


@pytest.fixture
def host(module: Any) -> Host:
    made = Host(module)
    made.beds = [Bed("a", module.Held), Bed("b", module.Held)]
    return made


@pytest.fixture
def orders(module: Any, host: Host) -> Any:
    return module.SleepService(host)


def test_a_receipt_is_json_with_bytes_before_and_after(
    orders: Any, control: Any, host: Host
) -> None:
    receipt = orders.sleep(control.SleepOrder(("a",), 2))
    json.dumps(receipt, allow_nan=False)
    assert (receipt["ok"], receipt["action"], receipt["not_ours"]) == (
        True,
        "sleep",
        ["1 GiB of others"],
    )
    (model,) = receipt["models"]
    assert (model["id"], model["state"], model["level"], model["kept"]) == (
        "a",
        "asleep",
        2,
        ["its copies"],
    )
    assert model["before"]["device_bytes"] == 8 > model["after"]["device_bytes"] == 0
    assert receipt["machine"]["before"]["anon_bytes"] == 5
    told = orders.models()
    json.dumps(told, allow_nan=False)
    assert [m["state"] for m in told] == ["asleep", "awake"]
    assert [m["on_use"] for m in told] == ["refuse", None]
    assert orders.last_order == receipt
    assert "of the device" in receipt["message"]
    assert orders.wake(control.WakeOrder())["models"][0]["id"] == "a"
    assert [bed.is_asleep for bed in host.beds] == [False, False]


def test_orders_are_refused_or_wait_while_a_prompt_runs(
    orders: Any, control: Any, host: Host
) -> None:
    host.runs = True
    for give in (
        lambda: orders.sleep(control.SleepOrder()),
        lambda: orders.wake(control.WakeOrder()),
    ):
        with pytest.raises(control.BusyError, match="a prompt runs; nothing was changed"):
            give()
    assert not any(bed.is_asleep for bed in host.beds)
    orders.sleep(control.SleepOrder(when=control.When.IDLE))
    assert all(bed.is_asleep for bed in host.beds)
    assert host.entered == [False, False, True]
    orders.wake_here(control.WakeOrder())
    assert host.entered == [False, False, True], "from a node there is nobody to wait for"


def test_what_goes_wrong_has_a_name_and_a_receipt(orders: Any, control: Any, host: Host) -> None:
    with pytest.raises(control.UnknownModelError, match="no model 'x'; GET /courier/v1/models"):
        orders.sleep(control.SleepOrder(("x",)))
    host.beds[1].fails = True
    with pytest.raises(control.OrderFailedError, match="it will not") as caught:
        orders.sleep(control.SleepOrder())
    assert [m["state"] for m in caught.value.receipt["models"]] == ["awake", "awake"]
    assert not caught.value.receipt["ok"]
    assert not any(bed.is_asleep for bed in host.beds)


def test_the_use_of_what_sleeps_is_refused_or_wakes_it(
    orders: Any, control: Any, host: Host, pack: Any
) -> None:
    orders.sleep(control.SleepOrder(("a",)))
    assert orders.refusal(["b"]) is None
    assert "is asleep" in orders.refusal(["b", "a"])
    with pytest.raises(pack.module("offload_core.values").AsleepError):
        orders.before_use("a")
    orders.sleep(control.SleepOrder(("a",), on_use=control.OnUse.WAKE))
    assert orders.refusal(["a"]) is None
    orders.before_use("a")
    assert not host.beds[0].is_asleep


def test_only_what_people_ask_for_counts_as_activity(orders: Any, control: Any) -> None:
    orders.sleep(control.SleepOrder(), counts=False)
    orders.models()
    assert orders.orders_given == 0
    orders.wake(control.WakeOrder())
    orders.sleep(control.SleepOrder())
    assert orders.orders_given == 2


def test_an_order_that_waits_is_listed_and_can_be_cancelled(
    orders: Any, control: Any, host: Host
) -> None:
    seen: list[Any] = []

    def cancel() -> None:
        seen.extend(orders.under_way.listed())
        seen.append(orders.under_way.cancel())

    host.while_waiting = cancel
    with pytest.raises(control.CancelledError, match="cancelled while it waited; nothing was done"):
        orders.sleep(control.SleepOrder(when=control.When.IDLE))
    assert not any(bed.is_asleep for bed in host.beds)
    assert seen == [
        {
            "action": "sleep", "waits": True, "done": 0, "total": 0, "name": "", "cancelled": False
        },
        {"cancelled": 1, "message": "1 order is told to stop."},
    ]  # fmt: skip
    assert orders.under_way.listed() == []
    assert orders.under_way.cancel()["cancelled"] == 0


def test_an_order_that_is_cancelled_half_way_is_undone(
    orders: Any, control: Any, host: Host
) -> None:
    listed: list[Any] = []
    fall_asleep = host.beds[0].fall_asleep

    def cancel_then_sleep(level: int) -> None:
        orders.under_way.cancel()
        listed.extend(orders.under_way.listed())
        fall_asleep(level)

    host.beds[0].fall_asleep = cancel_then_sleep  # type: ignore[method-assign]
    with pytest.raises(control.CancelledError):
        orders.sleep(control.SleepOrder())
    assert [bed.is_asleep for bed in host.beds] == [False, False]
    assert [(o["done"], o["total"], o["waits"]) for o in listed] == [(0, 2, False)]
