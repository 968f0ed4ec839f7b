"""Workflows run through Courier on a real ComfyUI: to their end, cancelled, alone and together."""

from __future__ import annotations

import io
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from devtools.comfyui_host import ComfyUIHost
from devtools.small_workflows import SAMPLER, SAVE, node

from .commanding import Bench, finished


@pytest.fixture(autouse=True)
def left_as_it_was(bench: Bench) -> Iterator[None]:
    """Nothing runs, waits or sleeps after a test; and the server lives."""
    yield
    bench.server.client.request("/queue", {"clear": True})
    for run in bench.client.runs():
        if not run.has_ended:
            bench.client.cancel(run.id)
            for event in bench.client.follow(run.id):
                if event.run.has_ended:
                    break
    bench.server.check_alive()
    if any(model["state"] == "asleep" for model in bench.client.models()):
        bench.client.wake(when="idle")


@pytest.fixture
def file(tmp_path: Path) -> Callable[[Any], str]:
    """A workflow in a file."""

    def write(value: Any, name: str = "wf.json") -> str:
        path = tmp_path / name
        path.write_text(json.dumps(value), encoding="utf-8")
        return str(path)

    return write


# To the end


def test_a_run_tells_its_way_its_models_and_its_pictures(bench: Bench) -> None:
    options = bench.courier.RunOptions(name="morning", workflow={"nodes": [], "links": []})
    run = bench.client.start(bench.prompt(steps=100), options)
    events = list(bench.client.follow(run.id))
    states = [event.run.state for event in events]
    assert states[0] == "queued"
    assert (states[-1], events[-1].kind) == ("done", "end")
    assert states == sorted(states, key=["queued", "running", "done"].index)
    steps = [e.run.node["step"] for e in events if e.run.node and e.run.node["id"] == SAMPLER]
    assert steps == sorted(steps)
    assert any(0 < step < 100 for step in steps)
    sampling = [e.run.node for e in events if e.run.node and e.run.node["id"] == SAMPLER][-1]
    assert (sampling["class_type"], sampling["steps"]) == ("KSampler", 100)
    found = bench.client.run(run.id)
    assert (found.nodes_done, found.nodes, found.error) == (8, 8, None)
    (model,) = found.raw["models"]
    assert model["name"].startswith("courier_wan_small")
    assert sum(model["bytes"].values()) > 0
    assert model["measured"]["device_peak_bytes"] > 0
    assert found.raw["seconds"]["running"] > 0
    assert bench.pixels(found)
    # The picture opens in the page with the workflow that came along.
    picture = Image.open(io.BytesIO(bench.client.download(next(found.files()))))
    assert json.loads(picture.info["workflow"]) == {"nodes": [], "links": []}
    assert run.id in bench.server.client.request("/history")


def test_the_command_runs_and_brings_the_pictures(
    bench: Bench, file: Callable[..., str], tmp_path: Path
) -> None:
    done = bench.run("run", file(bench.prompt()), "--json", "--save", str(tmp_path / "new"))
    assert done.status == 0, done.err
    told = done.json
    assert (told["state"], told["name"]) == ("done", "wf")
    (saved,) = told["saved"]
    with Image.open(saved) as picture:
        assert [picture.tobytes()] == bench.pixels(bench.client.run(told["id"]))
    assert "running" in done.err
    assert "\r" not in done.err
    done = bench.run("run", saved, "--quiet", "--set", f"{SAVE}.filename_prefix=again")
    assert (done.status, done.err) == (0, "")
    assert "done" in done.out


def test_a_run_of_which_all_is_cached_still_has_its_pictures(bench: Bench) -> None:
    prompt = bench.prompt()
    first, second = (bench.client.wait(bench.client.start(prompt).id) for _ in range(2))
    assert first.outputs == second.outputs
    assert bench.pixels(second)


def test_what_ran_goes_on_when_its_client_is_killed(bench: Bench, file: Callable[..., str]) -> None:
    process = bench.start("run", file(bench.prompt(steps=120)))
    assert process.stderr is not None
    run_id = process.stderr.readline().decode().split()[1]
    bench.until(run_id, "running", random.randint(1, 60))
    process.kill()
    process.communicate()
    assert bench.client.wait(run_id).state == "done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_cancels_the_run_and_leaves_the_server_clean(
    bench: Bench, file: Callable[..., str], number: int
) -> None:
    process = bench.start("run", file(bench.long_prompt()))
    assert process.stderr is not None
    run_id = process.stderr.readline().decode().split()[1]
    bench.until(run_id, "running", 2)
    process.send_signal(number)
    done = finished(process)
    assert done.status == 130
    assert "stopping the run" in done.err
    run = bench.client.run(run_id)
    assert (run.state, run.error["code"]) == ("cancelled", "cancelled")
    queue = bench.server.client.request("/queue")
    assert queue == {"queue_running": [], "queue_pending": []}
    assert bench.run("run", file(bench.prompt())).status == 0


def test_ctrl_c_takes_a_run_that_waits_off_the_queue_and_disturbs_nobody(
    bench: Bench, file: Callable[..., str]
) -> None:
    first = bench.client.start(bench.prompt(steps=120))
    bench.until(first.id, "running")
    process = bench.start("run", file(bench.long_prompt()))
    assert process.stderr is not None
    run_id = process.stderr.readline().decode().split()[1]
    assert bench.client.run(run_id).state == "queued"
    process.send_signal(signal.SIGINT)
    assert finished(process).status == 130
    assert bench.client.run(run_id).state == "cancelled"
    assert bench.client.wait(first.id).state == "done"


def test_ctrl_c_ends_an_order_that_waits(bench: Bench) -> None:
    run = bench.client.start(bench.long_prompt())
    bench.until(run.id, "running")
    process = bench.start("sleep", "--when", "idle")

    def orders() -> list[dict[str, Any]]:
        return list(bench.server.client.request("/courier/v1/models")["orders"])

    while not orders():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = finished(process)
    assert done.status == 130
    assert "cancelling the order" in done.err
    bench.client.cancel(run.id)
    while orders():
        pass
    bench.until(run.id, "cancelled")
    assert {model["state"] for model in bench.client.models()} == {"awake"}


def test_two_clients_at_once_get_what_is_theirs(bench: Bench, file: Callable[..., str]) -> None:
    prompts = [bench.prompt(seed=seed, steps=20) for seed in (1, 2)]
    want = [bench.pixels(bench.client.wait(bench.client.start(p).id)) for p in prompts]
    assert want[0] != want[1]
    bench.forget()
    files = [file(prompt, f"{i}.json") for i, prompt in enumerate(prompts)]
    processes = [bench.start("run", name, "--json") for name in files]
    for process, pixels in zip(processes, want, strict=True):
        done = finished(process)
        assert done.status == 0, done.err
        assert bench.pixels(bench.client.run(done.json["id"])) == pixels


# Cancelled


def test_a_run_that_was_cancelled_leaves_the_next_one_exact(bench: Bench) -> None:
    prompt = bench.prompt(seed=5)
    want = bench.pixels(bench.client.wait(bench.client.start(prompt).id))
    long = bench.client.start(bench.long_prompt())
    bench.until(long.id, "running", 3)
    bench.client.cancel(long.id)
    with pytest.raises(bench.courier.RunCancelledError, match="it was cancelled"):
        bench.client.wait(long.id)
    bench.forget()
    assert bench.pixels(bench.client.wait(bench.client.start(prompt).id)) == want


def test_a_cancel_at_any_moment_stops_that_run_and_no_other(bench: Bench) -> None:
    for turn in range(6):
        mine = bench.client.start(bench.long_prompt())
        if turn % 3 == 1:
            bench.until(mine.id, "running")
        elif turn % 3 == 2:
            bench.until(mine.id, "running", 1)
        other = bench.server.client.queue(bench.prompt(steps=2))  # ComfyUI's own way
        bench.client.cancel(mine.id)
        with pytest.raises(bench.courier.RunCancelledError, match="it was cancelled"):
            bench.client.wait(mine.id)
        assert bench.server.client.follow(other).outputs


def test_cancelling_a_run_that_waits_does_not_interrupt_somebody_elses(bench: Bench) -> None:
    theirs = bench.server.client.queue(bench.prompt(steps=120))
    mine = bench.client.start(bench.long_prompt())
    assert bench.until(mine.id, "queued").ahead in (0, 1, None)
    run = bench.client.cancel(mine.id)
    assert (run.state, run.error["code"]) == ("cancelled", "cancelled")
    result = bench.server.client.follow(theirs)
    assert result.outputs
    bench.client.cancel(mine.id)  # once more: nothing happens


def test_somebody_elses_interrupt_and_clear_are_told(bench: Bench) -> None:
    running = bench.client.start(bench.long_prompt())
    waiting = bench.client.start(bench.long_prompt())
    bench.until(running.id, "running", 1)
    bench.server.client.request("/queue", {"clear": True})
    with pytest.raises(bench.courier.RunCancelledError, match="by somebody else") as caught:
        bench.client.wait(waiting.id)
    assert caught.value.run.error["code"] == "removed"
    bench.server.client.request("/interrupt", {})
    with pytest.raises(bench.courier.RunCancelledError, match="by somebody else") as caught:
        bench.client.wait(running.id)
    assert caught.value.run.error["code"] == "interrupted"


def test_a_time_limit_stops_it(bench: Bench, file: Callable[..., str]) -> None:
    done = bench.run("run", file(bench.long_prompt()), "--time-limit", "0.5", "--json")
    assert done.status == 7
    error = done.json["error"]
    assert error["code"] == "run_cancelled"
    assert error["run"]["error"]["code"] == "time_limit"
    assert "0.5 s" in error["message"]


# Failed and refused


def test_a_node_that_fails_is_named(bench: Bench, file: Callable[..., str]) -> None:
    prompt = bench.prompt()
    prompt["2"] = node("CourierBudget", preset="custom", vram_gib=1e-9, host_gib=0)
    prompt["1"]["inputs"]["budget"] = ["2", 0]
    done = bench.run("run", file(prompt))
    assert done.status == 6
    assert "node 7 (KSampler) failed with DeviceBudgetError: " in done.err
    assert "the smallest that works is" in done.err
    assert "Traceback" not in done.err
    told = bench.run("run", file(prompt), "--json").json["error"]["run"]["error"]
    assert (told["node"], told["class_type"], told["code"]) == ("7", "KSampler", "node_failed")


RAW: dict[str, Any] = {
    "a node that is none": {"1": 7},
    "a node without a class": {"1": {"inputs": {}}},
    "a class that is a list": {"1": {"class_type": ["X"], "inputs": {}}},
    "a missing class": {"1": {"class_type": "NoSuchNode", "inputs": {}}},
    "inputs that are none": {"1": {"class_type": "PreviewImage", "inputs": 3}},
    "no inputs": {"1": {"class_type": "PreviewImage"}},
    "a link to nowhere": {"1": node("PreviewImage", images=["9", 0])},
    "a link past the end": {"1": node("PreviewImage", images=["2", 9]), "2": node("LoadImage")},
    "a ring": {
        "1": node("PreviewImage", images=["2", 0]),
        "2": node("ImageInvert", image=["2", 0]),
    },
    "no output": {"1": node("EmptyLatentImage", width=64, height=64, batch_size=1)},
}


@pytest.mark.parametrize("name", RAW)
def test_what_the_server_cannot_run_is_refused_and_leaves_nothing(bench: Bench, name: str) -> None:
    """Past our own check: whoever posts it himself."""
    before = bench.traces()
    with pytest.raises(bench.courier.RefusedError) as caught:
        bench.client.start(RAW[name])
    assert (caught.value.status, caught.value.code) == (422, "prompt_refused"), caught.value
    assert str(caught.value).startswith("ComfyUI ")
    assert bench.traces() == before


def test_half_a_workflow_is_not_run(bench: Bench) -> None:
    """ComfyUI itself would run the outputs that are right."""
    prompt = {**bench.prompt(), "20": node("SaveImage", images=["10", 0])}
    before = bench.traces()
    with pytest.raises(bench.courier.RefusedError, match=r"node 20 \(SaveImage\): Required input"):
        bench.client.start(prompt)
    assert bench.traces() == before


def test_a_full_queue_is_said_and_nothing_is_lost(bench: Bench, file: Callable[..., str]) -> None:
    small = {"1": node("CourierWakeModel")}
    started = [bench.client.start(bench.long_prompt())]
    started += [bench.client.start(small) for _ in range(49)]
    with pytest.raises(bench.courier.RefusedError, match="50 runs are unfinished"):
        bench.client.start(small)
    done = bench.run("run", file(bench.prompt()), "--json")
    assert (done.status, done.json["error"]["code"]) == (8, "queue_full")
    queue = bench.server.client.request("/queue")
    assert len(queue["queue_running"]) + len(queue["queue_pending"]) == 50
    bench.client.cancel(started[0].id)
    assert bench.client.wait(started[-1].id).state == "done"
    states = {run.id: run.state for run in bench.client.runs()}
    assert [states[run.id] for run in started] == ["cancelled", *["done"] * 49]


# Sleep


def test_models_sleep_afterwards_and_wake_before(bench: Bench, file: Callable[..., str]) -> None:
    prompt = bench.prompt(seed=3)
    want = bench.pixels(bench.client.wait(bench.client.start(prompt).id))
    first = bench.run("run", file(prompt), "--sleep-after", "2", "--on-use", "refuse", "--json")
    assert first.status == 0, first.err
    sleep = first.json["sleep_after"]
    assert (sleep["level"], sleep["state"], sleep["receipt"]["ok"]) == (2, "done", True)
    states = {model["state"] for model in bench.client.models()}
    assert states == {"asleep"}
    again = file(bench.prompt(seed=4))
    before = bench.traces()
    refused = bench.run("run", again, "--json")
    assert (refused.status, refused.json["error"]["code"]) == (8, "prompt_refused")
    assert refused.json["error"]["message"].count("is asleep. Wake") == 1
    assert "courier.py wake wakes it" in refused.err
    checked = bench.run("check", again)
    assert checked.status == 0, "it fits all the same"
    assert "asleep: " in checked.err
    assert "--wake-before" in checked.err
    assert bench.traces() == before
    woken = bench.run("run", file(bench.prompt(seed=3)), "--wake-before", "--sleep-after", "--json")
    assert woken.status == 0, woken.err
    assert bench.pixels(bench.client.run(woken.json["id"])) == want
    assert {model["state"] for model in bench.client.models()} == {"asleep"}
    # This time they wake at use, which is the default.
    assert bench.run("run", again).status == 0


def test_models_sleep_also_after_a_run_that_was_cancelled(bench: Bench) -> None:
    bench.client.wait(bench.client.start(bench.prompt()).id)
    options = bench.courier.RunOptions(sleep_after=1)
    run = bench.client.start(bench.long_prompt(), options)
    bench.until(run.id, "running", 1)
    bench.client.cancel(run.id)
    with pytest.raises(bench.courier.RunCancelledError) as caught:
        bench.client.wait(run.id)
    assert caught.value.run.raw["sleep_after"]["state"] == "done"
    assert {model["state"] for model in bench.client.models()} == {"asleep"}


def test_sleep_during_a_run_is_refused_or_waits(bench: Bench) -> None:
    run = bench.client.start(bench.prompt(steps=120))
    bench.until(run.id, "running", 1)
    refused = bench.run("sleep", "--json")
    assert (refused.status, refused.json["error"]["code"]) == (8, "busy")
    slept = bench.run("sleep", "--when", "idle", "--on-use", "wake")
    assert slept.status == 0
    assert "sleep" in slept.out
    assert bench.client.run(run.id).state == "done"
    assert bench.run("wake").status == 0
    status = bench.run("status")
    assert status.status == 0
    assert "awake" in status.out
    assert bench.run("status", "--json").json["all_models"]


def test_a_model_is_planned_and_gets_a_budget_through_the_client(bench: Bench) -> None:
    bench.client.wait(bench.client.start(bench.prompt()).id)
    model_id = bench.client.status()["models"][-1]["id"]
    plan = bench.client.plan(model_id, 0.004, 0)
    assert plan["fits"] is True
    assert plan["layers"]
    assert bench.client.plan(model_id, 0.000001)["fits"] is False
    answer = bench.client.budget(model_id, 0.004, 0)
    assert answer["applied"] in ("now", "next_run")
    run = bench.client.wait(bench.client.start(bench.prompt()).id)
    budgets = {model["id"]: model["budgets"] for model in run.raw["models"]}
    assert budgets[model_id]["device_bytes"] == int(0.004 * 2**30)
    assert bench.client.budget(model_id, None, None)["fits"] is True


# The server goes away


def test_a_server_that_is_killed_in_a_run_is_told_as_lost(
    server_factory: Callable[..., ComfyUIHost], small_models: Any, file: Callable[..., str]
) -> None:
    server = server_factory({"OMP_NUM_THREADS": "1"})
    other = Bench(server, small_models)
    process = other.start("run", file(other.long_prompt()), "--json")
    assert process.stderr is not None
    run_id = process.stderr.readline().decode().split()[1]
    other.until(run_id, "running", 1)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    done = finished(process)
    assert (done.status, done.json["error"]["code"]) == (5, "no_answer")
    assert f"what became of run {run_id} is not known" in done.json["error"]["message"]
    server.stop()


# CASES 46 to 48, 59, 60: malformed files through the command


def text_of(bench: Bench, **changes: Any) -> bytes:
    """The good workflow with nodes changed; None takes one away."""
    prompt = bench.prompt(seed=1)
    for node_id, value in changes.items():
        if value is None:
            del prompt[node_id.strip("n")]
        else:
            prompt[node_id.strip("n")] = value
    return json.dumps(prompt).encode()


def malformed(bench: Bench) -> dict[str, tuple[bytes, int, str]]:
    """Bytes of a file, the exit status, and what the sentence has to say."""
    good = text_of(bench)
    ui = {"nodes": [{"id": 1, "type": "workflow>Mine"}], "links": []}
    loader = {"class_type": "CourierLoadDiffusionModel"}

    def model(name: str) -> bytes:
        inputs = {"unet_name": name, "weight_dtype": "default"}
        return text_of(bench, n1={**loader, "inputs": inputs})

    return {
        "empty": (b"", 3, "is empty (0 bytes)"),
        "cut short": (good[:-30], 3, "is not JSON, or not all of it"),
        "a web page": (b"<!DOCTYPE html><html>", 3, "is not JSON"),
        "latin-1": ('{"1": "\xe4"}'.encode("latin-1"), 3, "is no text in UTF-8"),
        "a list": (b"[1, 2, 3]", 3, "but a list and no workflow"),
        "settings": (b'{"theme": "dark"}', 3, "nothing in it is a node"),
        "a jpeg": (b"\xff\xd8\xff\xe0" + b"0" * 99, 3, "is a JPEG"),
        "half a picture": (b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR", 3, "is a damaged picture"),
        "too deep": (b"[" * 50_000, 3, "nested too deeply"),
        "group nodes": (json.dumps(ui).encode(), 3, "node 1 (workflow>Mine) is a group node"),
        "a node {}": (text_of(bench, n1={}), 4, "node 1 (no class): has no class_type"),
        "a missing class": (
            text_of(bench, n1=node("UNETLoadr")), 4, "the nearest names: UNETLoader",
        ),
        "no loader": (text_of(bench, n1=None), 4, 'model comes from node "1", which is not in'),
        "a ring": (
            text_of(bench, n10=node("VAEDecode", samples=["10", 0], vae=["8", 0])), 4, "in a ring",
        ),
        "past the end": (
            text_of(bench, n10=node("VAEDecode", samples=["7", 5], vae=["8", 0])), 4,
            "comes from output 5 of node 7 (KSampler); it has: 0 LATENT",
        ),
        "no output": (text_of(bench, n9=None), 4, "no node is an output"),
        "another type": (
            text_of(bench, n10=node("VAEDecode", samples=["8", 0], vae=["8", 0])), 4,
            "has to be LATENT, and output 0 of node 8 (VAELoader) is VAE",
        ),
        "a model that is not here": (model("wan 猫.safetensors"), 4, "a model that this ComfyUI"),
        "a path upwards": (model("..\\..\\etc\\passwd"), 4, "a model that this ComfyUI"),
        "a path from the root": (model("/etc/passwd"), 4, "a model that this ComfyUI"),
        "a drive": (model("C:\\x.safetensors"), 4, "a model that this ComfyUI"),
        "a zero byte": (model("courier_wan_small_bf16.safetensors\0"), 4, "a model that this"),
        "a renamed input": (
            text_of(bench, n8=node("VAELoader", vae="x")), 4, "was it renamed?",
        ),
        "a number in words": (
            text_of(bench, n6=node("EmptyHunyuanLatentVideo", width="wide", height=32, length=1,
                                   batch_size=1)), 4, "width has to be a whole number",
        ),
    }  # fmt: skip


def test_malformed_files_are_said_and_leave_nothing(bench: Bench, tmp_path: Path) -> None:
    cases = malformed(bench)
    assert len(cases) >= 20
    # One process after the other on two cores would be all there is to wait for.
    before = bench.traces()
    running = {}
    for name, (data, _, _) in cases.items():
        file = tmp_path / f"{name} 模型.json"
        file.write_bytes(data)
        running[name] = bench.start("run", str(file))
        if len(running) % 4 == 0:
            for process in running.values():
                process.wait()
    for name, (_, status, words) in cases.items():
        done = finished(running[name])
        assert (done.status, done.out) == (status, ""), f"{name}: {done.err}"
        assert words in done.err, f"{name}: {done.err}"
        assert "Traceback" not in done.err, name
        # A check has a line for each fault, and a line before them.
        assert len(done.err.splitlines()) <= (1 if status == 3 else 3), f"{name}: {done.err}"
    assert bench.traces() == before
    bench.server.check_alive()
