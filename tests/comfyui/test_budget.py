"""Another budget for a model of a running ComfyUI: planned, set, kept over runs, shown as it is."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from devtools.comfyui_client import HttpError, PromptError
from devtools.comfyui_host import ComfyUIHost
from devtools.small_workflows import GIB, LOADER, budget_node, loaded_with, workflow

STATUS, PLAN, BUDGET = "/courier/v1/status", "/courier/v1/plan", "/courier/v1/budget"


class Studio:
    """One model of these tests' own on the server that all share."""

    def __init__(self, server: ComfyUIHost, small_models: Any, file: str) -> None:
        self.server = server
        self.small_models = small_models
        self.file = file
        self.seed = 0

    def prompt(self, seed: int | None = None, steps: int = 2, **loader: Any) -> dict[str, Any]:
        """A workflow that nothing of is cached, but for its loaders."""
        self.seed += 1
        chosen = loaded_with("CourierLoadDiffusionModel", self.file, **loader)
        number = 1000 + self.seed if seed is None else seed
        return workflow(self.small_models, chosen, seed=number, steps=steps)

    def picture(self, prompt: dict[str, Any]) -> bytes:
        (entry,) = self.server.client.run(prompt).images()
        return self.server.client.image(entry)

    def model(self) -> dict[str, Any]:
        models: list[dict[str, Any]] = self.server.client.request(STATUS)["models"]
        return next(model for model in reversed(models) if model["file"] == self.file)

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """(status, answer) of one order to this model."""
        try:
            return 200, self.server.client.request(path, {"model": self.model()["id"], **body})
        except HttpError as error:
            return error.status, error.body

    def smallest(self) -> int:
        status, plan = self.post(PLAN, device_gib=1e-9)
        assert (status, plan["fits"]) == (200, False)
        return int(plan["smallest"]["device_bytes"])


@pytest.fixture(scope="module")
def studio(server: ComfyUIHost, small_models: Any) -> Iterator[Studio]:
    original = small_models["wan"]
    file = original.with_name("budgeted.safetensors")
    shutil.copyfile(original, file)
    server.client.request("/object_info/CourierLoadDiffusionModel")  # it lists the file now
    yield Studio(server, small_models, file.name)
    file.unlink()


def placements(layers: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    return [(layer["name"], layer["placement"], layer["resident_bytes"]) for layer in layers]


def test_a_budget_that_was_set_holds_over_runs_and_is_shown_as_it_is(studio: Studio) -> None:
    want = studio.picture(studio.prompt(seed=1))
    before = studio.model()
    assert before["asked"] == {
        "device_bytes": None,
        "host_bytes": None,
        "shared": False,
        "by": "node",
        "waits": False,
    }
    assert before["counts"]["resident"] == len(before["layers"])
    figure = studio.smallest() + (1 << 20)
    body = {"device_gib": figure / GIB, "host_gib": 0}
    status, plan = studio.post(PLAN, **body)
    assert (status, plan["fits"]) == (200, True)
    assert plan["changes"] > 0
    assert studio.model() == before, "a plan changes nothing"
    status, answer = studio.post(BUDGET, **body)
    assert (status, answer["applied"]) == (200, "now")
    now = studio.model()
    assert (now["id"], now["state"]) == (before["id"], "loaded")
    assert now["budgets"] == {"device_bytes": figure, "host_bytes": 0}
    assert now["asked"]["device_bytes"] == figure
    assert (now["asked"]["by"], now["asked"]["waits"]) == ("order", False)
    assert now["measured"]["device_bytes"] == plan["planned"]["device_bytes"] <= figure
    assert placements(now["layers"]) == placements(plan["layers"])
    for seed in (2, 1):
        result = studio.server.client.run(studio.prompt(seed=seed))
        assert LOADER in result.cached_nodes()
        (entry,) = result.images()
        assert (studio.server.client.image(entry) == want) is (seed == 1)
        assert studio.model()["budgets"]["device_bytes"] == figure
        assert studio.model()["counts"]["mapped"] > 0
    status, answer = studio.post(BUDGET, device_gib=None, host_gib=None)
    assert (status, answer["applied"]) == (200, "now")
    assert studio.model()["budgets"]["device_bytes"] is None
    assert placements(studio.model()["layers"]) == placements(before["layers"])
    assert studio.picture(studio.prompt(seed=1)) == want


def test_too_small_a_budget_is_refused_with_the_smallest_and_nothing_changes(
    studio: Studio,
) -> None:
    studio.picture(studio.prompt())
    before, smallest = studio.model(), studio.smallest()
    status, answer = studio.post(BUDGET, device_gib=(smallest - 1) / GIB)
    assert (status, answer["error"]["code"]) == (409, "budget_too_small")
    assert str(smallest) in answer["error"]["message"]
    assert studio.model() == before
    status, answer = studio.post(BUDGET, device_gib=smallest / GIB)
    assert (status, answer["applied"]) == (200, "now")
    assert studio.model()["measured"]["device_bytes"] <= smallest
    studio.picture(studio.prompt())
    assert studio.post(BUDGET, device_gib=None)[0] == 200


def test_during_a_run_it_is_refused_or_waits_and_a_plan_is_answered(studio: Studio) -> None:
    studio.picture(studio.prompt())
    prompt_id = studio.server.client.queue(studio.prompt(steps=150))
    while not studio.server.client.request("/queue")["queue_running"]:
        assert not studio.server.client.request(f"/history/{prompt_id}"), "it was too short"
    status, answer = studio.post(BUDGET, host_gib=0)
    assert (status, answer["error"]["code"]) == (409, "busy")
    assert studio.model()["asked"]["host_bytes"] is None
    assert studio.post(PLAN, host_gib=0)[0] == 200
    status, answer = studio.post(BUDGET, host_gib=0, when="idle")
    assert (status, answer["applied"]) == (200, "now")
    assert len(studio.server.client.follow(prompt_id).images()) == 1
    assert studio.model()["budgets"]["host_bytes"] == 0
    assert studio.post(BUDGET, host_gib=None)[0] == 200


def test_what_sleeps_has_the_new_budget_when_it_wakes(studio: Studio) -> None:
    want = studio.picture(studio.prompt(seed=3))
    smallest = studio.smallest()
    client, model_id = studio.server.client, studio.model()["id"]
    assert client.request("/courier/v1/sleep", {"models": [model_id]})["ok"]
    status, answer = studio.post(BUDGET, device_gib=smallest / GIB)
    assert (status, answer["applied"]) == (200, "next_run")
    assert studio.model()["asked"]["waits"]
    assert client.request("/courier/v1/wake", {"models": [model_id]})["ok"]
    woken = studio.model()
    assert (woken["state"], woken["asked"]["waits"]) == ("loaded", False)
    assert woken["budgets"]["device_bytes"] == smallest
    assert 0 < woken["measured"]["device_bytes"] <= smallest
    assert studio.picture(studio.prompt(seed=3)) == want
    assert studio.model()["budgets"]["device_bytes"] == smallest
    assert studio.post(BUDGET, device_gib=None)[0] == 200


def test_the_loader_that_runs_again_has_the_budget_of_its_node(studio: Studio) -> None:
    studio.picture(studio.prompt())
    smallest = studio.smallest()
    assert studio.post(BUDGET, device_gib=smallest / GIB)[0] == 200
    figure = smallest + (2 << 20)
    prompt = studio.prompt(budget=["2", 0])
    prompt["2"] = budget_node(figure, 0)
    studio.picture(prompt)
    model = studio.model()
    assert (model["asked"]["by"], model["asked"]["device_bytes"]) == ("node", figure)
    assert model["budgets"]["device_bytes"] == figure


def test_events_come_while_a_model_runs_and_a_refused_prompt_is_told_to_its_page(
    studio: Studio,
) -> None:
    found: list[tuple[float, dict[str, Any]]] = []
    is_seen = threading.Event()
    studio.picture(studio.prompt())
    smallest = studio.smallest()

    async def listen() -> None:
        address = f"{studio.server.address}/ws?clientId=page-of-a-test"
        async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
            await socket.receive()
            asks = {"Courier-Client": "page-of-a-test"}
            async with session.get(studio.server.address + STATUS, headers=asks) as answer:
                assert answer.status == 200
            await asyncio.gather(asyncio.to_thread(drive), until_refused(socket))

    async def until_refused(socket: aiohttp.ClientWebSocketResponse) -> None:
        while not found or found[-1][1]["type"] != "courier.refused":
            message = await asyncio.wait_for(socket.receive(), 60)
            if message.type is aiohttp.WSMsgType.TEXT:
                found.append((time.monotonic(), json.loads(message.data)))
            if len(of_running(found)) >= 5:
                is_seen.set()

    def drive() -> None:
        client = studio.server.client
        # Under a budget, so that something changes with every layer; and however fast this machine
        # is, until enough was seen of it.
        prompt = studio.prompt(steps=10_000, budget=["2", 0])
        prompt_id = client.queue({**prompt, "2": budget_node(smallest, 0)})
        assert is_seen.wait(60), found
        client.request("/interrupt", {})
        with pytest.raises(PromptError, match="interrupted"):
            client.follow(prompt_id)
        model_id = studio.model()["id"]
        assert client.request("/courier/v1/sleep", {"models": [model_id]})["ok"]
        with pytest.raises(PromptError, match="is asleep"):
            client.queue(studio.prompt(), "page-of-a-test")

    asyncio.run(listen())
    times = [at for at, message in found if message["type"] == "courier.status"]
    assert len(times) <= (times[-1] - times[0]) * 5 + 2, "so many a second and no more"
    layers = len(studio.model()["layers"])
    ours = of_running(found)
    assert all(len(m["activity"]) == len(m["placements"]) >= layers for m in ours)
    refused = [m["data"]["message"] for _, m in found if m["type"] == "courier.refused"]
    assert len(refused) == 1
    assert "is asleep" in refused[0]
    assert studio.server.client.request("/courier/v1/wake", {})["ok"]


def of_running(found: list[tuple[float, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What events told of a model that ran."""
    bodies = [message["data"] for _, message in found if message["type"] == "courier.status"]
    return [model for body in bodies for model in body["models"] if model["state"] == "running"]
