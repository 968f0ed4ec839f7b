"""While an order works, ComfyUI answers everybody at once, and no prompt begins."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from devtools.comfyui_host import ComfyUIHost
from devtools.comfyui_install import link_pack
from devtools.paths import PACK_NAME, Paths
from devtools.small_workflows import node

PACK = Path(__file__).parent / "scripts" / "gated_pack.py"
AT_ONCE_SECONDS = 5.0
"""An order stands still as long as the test wants, so that this is for a busy machine only."""
LOADS, RUNS = node("GatedModel", loads=True), node("GatedModel", loads=False)


@pytest.fixture
def gated(
    server_factory: Callable[..., ComfyUIHost], courier_checkout: Paths, tmp_path: Path
) -> Iterator[ComfyUIHost]:
    packs = tmp_path / "custom_nodes"
    packs.mkdir()
    link_pack(courier_checkout.root, packs / PACK_NAME)
    shutil.copyfile(PACK, packs / PACK.name)
    server = server_factory(base=tmp_path)
    server.client.timeout_seconds = AT_ONCE_SECONDS
    yield server
    server.stop()


async def first_message(address: str) -> Any:
    """What a page is told when it connects."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{address}/ws?clientId=late") as socket,
    ):
        return await socket.receive_json(timeout=AT_ONCE_SECONDS)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def test_everybody_is_answered_while_a_sleep_stands_still(gated: ComfyUIHost) -> None:
    client = gated.client
    client.run({"1": LOADS})
    receipts: list[Any] = []
    ordering = threading.Thread(
        target=lambda: receipts.append(client.request("/courier/v1/sleep", {}))
    )
    client.timeout_seconds = 60
    ordering.start()
    until(lambda: bool(client.request("/gated")["is_leaving"]))
    client.timeout_seconds = AT_ONCE_SECONDS
    try:
        prompt_id = client.queue({"1": RUNS})
        queue = client.request("/queue")
        assert [entry[1] for entry in queue["queue_pending"]] == [prompt_id]
        assert queue["queue_running"] == []
        assert client.request("/prompt")["exec_info"]["queue_remaining"] == 1
        assert client.request("/courier/v1/status")["models"] == []
        (order,) = client.request("/courier/v1/models")["orders"]
        assert (order["action"], order["waits"]) == ("sleep", False)
        client.request("/free", {"unload_models": True, "free_memory": True})
        client.request("/history")
        message = asyncio.run(first_message(client.address))
        assert message["data"]["status"]["exec_info"]["queue_remaining"] == 1
        assert client.request("/gated") == {"is_leaving": True, "ran": 1}, "no prompt has begun"
        assert receipts == []
    finally:
        client.request("/gated", {})
    ordering.join(60)
    assert receipts[0]["ok"]
    client.follow(prompt_id, timeout_seconds=60)
    assert client.request("/gated")["ran"] == 2


async def hear_orders(gated: ComfyUIHost, orders: int) -> tuple[list[int], int]:
    """What a page hears of so many orders beside a client that reads nothing, and how much is on
    its way to that one at the end beyond what it had."""
    client = gated.client
    async with aiohttp.ClientSession() as session:
        slow = await session.ws_connect(f"{client.address}/ws?clientId=slow")
        page = await session.ws_connect(f"{client.address}/ws?clientId=page")
        for name in ("slow", "page"):
            asks = {"Courier-Client": name}
            async with session.get(f"{client.address}/courier/v1/status", headers=asks) as answer:
                assert answer.status == 200
        # Its own end reads ahead otherwise.
        slow._conn.protocol.transport.pause_reading()  # type: ignore[union-attr]
        before = (await asyncio.to_thread(client.request, "/gated/fill?client=slow", {}))["unsent"]
        done: list[int] = []
        for _ in range(orders):
            receipt = await asyncio.to_thread(client.request, "/courier/v1/sleep", {})
            assert receipt["ok"]
            count = len(done)
            while len(done) == count:
                message = await page.receive_json(timeout=AT_ONCE_SECONDS)
                if message["type"] == "courier.status":
                    done.append(message["data"]["orders_done"])
        after = (await asyncio.to_thread(client.request, "/gated/fill?client=slow", {}))["unsent"]
        await page.close()
        slow._conn.protocol.transport.abort()  # type: ignore[union-attr]
    return done, after - before - (32 << 20)


def test_a_client_that_does_not_read_is_sent_nothing_and_the_others_hear_everything(
    gated: ComfyUIHost,
) -> None:
    gated.client.timeout_seconds = 60
    gated.client.run({"1": RUNS})
    done, more = asyncio.run(hear_orders(gated, 6))
    assert len(set(done)) >= 5
    assert more <= 0


def test_what_a_run_tells_of_its_failure_names_no_folder(gated: ComfyUIHost) -> None:
    """Everybody may read it."""
    client = gated.client
    run = client.request("/courier/v1/runs", {"prompt": {"1": node("BadFile")}})
    until(lambda: bool(client.request(f"/courier/v1/runs/{run['id']}")["error"]))
    error = client.request(f"/courier/v1/runs/{run['id']}")["error"]
    assert "No such file or directory: '.../wan.safetensors'" in error["message"]
    assert "/no/such" not in str(client.request("/courier/v1/runs"))
