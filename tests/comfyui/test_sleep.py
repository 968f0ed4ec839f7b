"""Sleep Model and Wake Model in a real ComfyUI: in one process, as nodes, and over HTTP."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from devtools.comfyui_client import HttpError, PromptError, PromptResult
from devtools.comfyui_host import ComfyUIHost
from devtools.paths import checkout
from devtools.small_workflows import (
    LOADER,
    SAMPLER,
    SAVE,
    Prompt,
    loaded_with,
    node,
    workflow,
)

SCRIPT = Path(__file__).parent / "scripts" / "sleep.py"
STATUS, MODELS = "/courier/v1/status", "/courier/v1/models"
SLEEP, WAKE = "/courier/v1/sleep", "/courier/v1/wake"
LATER = "All models are put to sleep when nothing runs any more."
Lines = dict[str, list[str]]


# In one process


@pytest.fixture(scope="module")
def sleep_lines(comparisons_of: Callable[..., Lines]) -> Lines:
    """Each part's comparisons."""
    return comparisons_of(SCRIPT)


@pytest.mark.parametrize(
    ("part", "comparisons"),
    [
        ("ours", 170),
        ("classic", 38),
        ("control_nets", 22),
        ("together", 11),
        ("cancelled", 7),
        ("shared", 3),
        ("cycles", 4),
        ("threads", 3),
    ],
)
def test_models_sleep_and_wake_exact(sleep_lines: Lines, part: str, comparisons: int) -> None:
    found = sleep_lines.get(part, [])
    assert [line for line in found if line.startswith("FAIL")] == []
    assert len(found) >= comparisons


# As nodes


class Studio:
    """Prompts on a server of their own."""

    def __init__(self, server: ComfyUIHost, small_models: Any) -> None:
        self.server = server
        self.small_models = small_models
        self.seed = 100

    def prompt(self, **more: Any) -> Prompt:
        """A workflow that nothing of is cached, but for its loaders."""
        self.seed += 1
        loader = loaded_with("CourierLoadDiffusionModel", self.small_models["wan"].name)
        return workflow(self.small_models, loader, seed=more.pop("seed", self.seed), **more)

    def run(self, prompt: Prompt) -> PromptResult:
        return self.server.client.run(prompt)

    def picture(self, result: PromptResult) -> bytes:
        (entry,) = result.images()
        with Image.open(io.BytesIO(self.server.client.image(entry))) as picture:
            return picture.tobytes()

    def model(self) -> dict[str, Any]:
        """The youngest of ours, as the status tells it."""
        found: list[dict[str, Any]] = self.server.client.request(STATUS)["models"]
        return found[-1]

    def states(self) -> dict[str, str]:
        """By kind."""
        return {m["kind"]: m["state"] for m in self.server.client.request(MODELS)["models"]}

    def refusal(self, prompt: Prompt) -> tuple[str, str]:
        """(node, sentence) of a prompt that fails."""
        with pytest.raises(PromptError) as caught:
            self.run(prompt)
        self.server.check_alive()
        messages = dict(map(tuple, caught.value.detail["messages"]))
        error = messages["execution_error"]
        return error["node_id"], error["exception_message"]

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """(status, answer)."""
        try:
            return 200, self.server.client.request(path, body)
        except HttpError as error:
            return error.status, error.body


@pytest.fixture(scope="module")
def studio(server_factory: Callable[..., ComfyUIHost], small_models: Any) -> Iterator[Studio]:
    server = server_factory()
    yield Studio(server, small_models)
    server.stop()


@pytest.fixture(autouse=True)
def awake(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "studio" in request.fixturenames:
        studio = request.getfixturevalue("studio")
        studio.run({"1": node("CourierWakeModel")})


def texts(result: PromptResult, node_id: str) -> str:
    return str(result.outputs[node_id]["text"][0])


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_node_in_the_middle_runs_every_time_and_the_loader_does_not(
    studio: Studio, level: int
) -> None:
    want = {seed: studio.picture(studio.run(studio.prompt(seed=seed))) for seed in (1, 2)}
    for seed in (1, 2, 2):
        prompt = studio.prompt(seed=seed)
        prompt["20"] = node("CourierWakeModel", model=[LOADER, 0])
        prompt[SAMPLER]["inputs"]["model"] = ["20", 1]
        # Behind the sampler, before the picture is saved.
        prompt["21"] = node(
            "CourierSleepModel", model=[LOADER, 0], anything=["10", 0], level=level, on_use="refuse"
        )
        prompt[SAVE]["inputs"]["images"] = ["21", 0]
        result = studio.run(prompt)
        assert LOADER in result.cached_nodes()
        assert not {"20", "21"} & set(result.cached_nodes())
        assert studio.picture(result) == want[seed]
        assert studio.model()["state"] == "asleep"
        assert studio.model()["measured"]["device_bytes"] == 0
        assert texts(result, "21").startswith("1 model sleeps: ")


def wait_for(studio: Studio, state: str) -> None:
    deadline = time.monotonic() + 30
    while studio.model()["state"] != state:
        assert time.monotonic() < deadline, f"it is {studio.model()['state']}, not {state}"
        time.sleep(0.02)


def test_a_sleep_node_without_links_comes_last_in_every_run(studio: Studio) -> None:
    want = studio.picture(studio.run(studio.prompt(seed=8)))
    for seed in (9, 8, 8):
        prompt = studio.prompt(seed=seed)
        prompt["20"] = node("CourierSleepModel", level=1, on_use="refuse")
        prompt["21"] = node("CourierWakeModel")
        result = studio.run(prompt)
        assert LOADER in result.cached_nodes()
        assert not {"20", "21"} & set(result.cached_nodes())
        assert texts(result, "20").startswith(LATER)
        wait_for(studio, "asleep")
        assert (studio.picture(result) == want) is (seed == 8)


def test_with_a_sleep_node_without_links_the_next_run_is_refused_whole_or_wakes(
    studio: Studio,
) -> None:
    def prompt(seed: int, on_use: str) -> Prompt:
        made = studio.prompt(seed=seed)
        made["20"] = node("CourierSleepModel", level=1, on_use=on_use)
        return made

    want = studio.picture(studio.run(studio.prompt(seed=30)))
    studio.run(prompt(31, "refuse"))
    wait_for(studio, "asleep")
    history = studio.server.client.request("/history")
    with pytest.raises(PromptError, match="is asleep"):
        studio.run(prompt(30, "refuse"))
    assert studio.server.client.request("/history") == history, "nothing of it ran"
    # The user's later word, in the workflow itself.
    assert studio.picture(studio.run(prompt(30, "wake"))) == want
    wait_for(studio, "asleep")
    assert studio.picture(studio.run(prompt(30, "wake"))) == want
    last = studio.server.client.request(MODELS)["last_order"]
    assert (last["ok"], last["action"]) in {(True, "sleep"), (True, "wake")}


def test_the_example_for_14b_runs_with_small_files_and_leaves_the_card(studio: Studio) -> None:
    name = "courier_wan2.1_t2v_14b_12gib_then_sleep.json"
    text = (checkout().root / "example_workflows" / "api" / name).read_text(encoding="utf-8")
    files = {
        "wan2.1_t2v_14B_bf16.safetensors": studio.small_models["wan"].name,
        "umt5_xxl_fp8_e4m3fn_scaled.safetensors": studio.small_models["clip_l"].name,
        "wan_2.1_vae.safetensors": studio.small_models["vae"].name,
    }
    for given, small in files.items():
        assert text.count(given) == 1
        text = text.replace(given, small)
    prompt = json.loads(text)
    prompt["4"]["inputs"]["type"] = "sd3"  # of the small text encoder
    prompt["7"]["inputs"].update(width=64, height=64, length=5)
    for seed in (1, 2):  # the second wakes what the first put to sleep
        prompt["8"]["inputs"].update(steps=3, seed=seed)
        result = studio.run(prompt)
        assert [entry["type"] for entry in result.images()] == ["output"]
        assert ("2" in result.cached_nodes()) is (seed == 2)
        wait_for(studio, "asleep")


def test_several_sleep_nodes_in_one_run_are_one_sleep(studio: Studio) -> None:
    prompt = studio.prompt()
    for n in ("20", "21"):
        prompt[n] = node(
            "CourierSleepModel", model=[LOADER, 0], anything=["10", 0], level=2, on_use="refuse"
        )
    result = studio.run(prompt)
    said = sorted(texts(result, n).partition("\n")[0] for n in ("20", "21"))
    assert said[0].startswith("1 model sleeps: ")
    assert said[1] == "Nothing was awake: nothing was given back. 1 model sleeps."
    assert studio.model()["state"] == "asleep"


def test_a_prompt_that_needs_a_sleeping_model_is_refused_before_anything_runs(
    studio: Studio,
) -> None:
    want = studio.picture(studio.run(studio.prompt(seed=4)))
    studio.run(asleep_after(studio, "refuse"))
    with pytest.raises(PromptError, match=r"is asleep\. Wake it with POST /courier/v1/wake"):
        studio.run(studio.prompt(seed=4))
    assert studio.model()["state"] == "asleep"
    waking = studio.prompt(seed=4)
    waking["20"] = node("CourierWakeModel")
    assert studio.picture(studio.run(waking)) == want
    studio.run(asleep_after(studio, "wake"))
    assert studio.model()["state"] == "asleep"
    assert studio.picture(studio.run(studio.prompt(seed=4))) == want
    assert studio.model()["state"] == "loaded"


def test_a_node_that_needs_a_sleeping_model_fails_with_one_sentence(studio: Studio) -> None:
    """Where the graph does not tell: the model of a loader that is not ours."""
    loader = loaded_with("UNETLoader", studio.small_models["wan"].name)
    first = workflow(studio.small_models, loader, seed=40)
    want = studio.picture(studio.run(first))
    first["20"] = node(
        "CourierSleepModel", model=[LOADER, 0], anything=["10", 0], level=1, on_use="refuse"
    )
    studio.run(first)
    place, said = studio.refusal(workflow(studio.small_models, loader, seed=41))
    assert place == SAMPLER
    assert said.startswith("WAN21 (diffusion model) is asleep. Wake it with POST /courier/v1/wake")
    waking = workflow(studio.small_models, loader, seed=40)
    waking["20"] = node("CourierWakeModel", model=[LOADER, 0])
    waking[SAMPLER]["inputs"]["model"] = ["20", 1]
    assert studio.picture(studio.run(waking)) == want


def asleep_after(studio: Studio, on_use: str) -> Prompt:
    """A prompt that ends with its diffusion model asleep."""
    prompt = studio.prompt()
    prompt["20"] = node(
        "CourierSleepModel", model=[LOADER, 0], anything=["10", 0], level=1, on_use=on_use
    )
    return prompt


def test_what_holds_no_model_is_refused_with_a_sentence(studio: Studio) -> None:
    prompt = studio.prompt()
    prompt["20"] = node("CourierSleepModel", model=["6", 0], level=1, on_use="refuse")
    place, said = studio.refusal(prompt)
    assert place == "20"
    assert "Sleep Model: what is connected to 'model' is a dict, which holds no model" in said


def test_free_of_the_core_drops_what_sleeps_and_the_next_run_loads_anew(studio: Studio) -> None:
    want = studio.picture(studio.run(studio.prompt(seed=6)))
    studio.run(asleep_after(studio, "refuse"))
    studio.server.client.request("/free", {"unload_models": True, "free_memory": True})
    deadline = time.monotonic() + 30
    while studio.server.client.request(STATUS)["models"]:  # ComfyUI does it when it comes to it
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert studio.picture(studio.run(studio.prompt(seed=6))) == want
    assert studio.model()["state"] == "loaded"


@pytest.mark.parametrize(
    "broken",
    [
        node("CourierLoadDiffusionModel", unet_name=["9", 0], weight_dtype="default"),
        node("CourierLoadDiffusionModel", unet_name="x", weight_dtype=["9", 0]),
        node("CourierLoadDiffusionModel", unet_name={}, weight_dtype={}),
        {"class_type": "CourierLoadDiffusionModel", "inputs": None},
        {"class_type": ["CourierSleepModel"], "inputs": []},
        {"class_type": "CourierSleepModel", "inputs": {"on_use": ["9", 0]}},
        7,
    ],
)
def test_whatever_a_prompt_holds_is_looked_at_without_an_error(studio: Studio, broken: Any) -> None:
    before = studio.server.log_text().count("on_prompt_handler processing")
    with contextlib.suppress(PromptError, HttpError):
        studio.server.client.queue({"1": broken, "2": node("CourierWakeMode")})
    with contextlib.suppress(PromptError, HttpError):
        studio.server.client.queue({"1": broken})
    studio.server.check_alive()
    assert studio.server.log_text().count("on_prompt_handler processing") == before


# Over HTTP


def test_an_order_over_http_has_a_receipt(studio: Studio) -> None:
    want = studio.picture(studio.run(studio.prompt(seed=50)))
    model_id = studio.model()["id"]
    for level in (1, 2):
        status, receipt = studio.post(SLEEP, models=[model_id], level=level)
        assert (status, receipt["ok"], receipt["action"]) == (200, True, "sleep")
        (told,) = receipt["models"]
        assert (told["id"], told["state"], told["level"]) == (model_id, "asleep", level)
        assert told["before"]["device_bytes"] > 0 == told["after"]["device_bytes"]
        assert receipt["machine"]["before"]["anon_bytes"] > 0
        assert studio.model()["state"] == "asleep"
        status, receipt = studio.post(WAKE)
        assert (status, receipt["models"][0]["state"]) == (200, "awake")
        assert studio.picture(studio.run(studio.prompt(seed=50))) == want
    assert studio.post(SLEEP, models=["no-such-model"])[0] == 404
    assert studio.post(SLEEP, level=3)[0] == 400
    status, answer = studio.post("/release_memory_occupation", tags=["weights"])
    assert (status, answer["success"]) == (200, True)
    assert model_id in answer["sleeping"]
    status, answer = studio.post("/resume_memory_occupation")
    assert (status, answer["success"], answer["sleeping"]) == (200, True, [])


def test_an_order_during_a_run_is_refused_or_waits_as_asked(studio: Studio) -> None:
    seeds = (60, 61, 62)
    want = {seed: studio.picture(studio.run(studio.prompt(seed=seed, steps=20))) for seed in seeds}
    busy = 0
    chance = random.Random(0)
    for number in range(50):
        seed = seeds[number % len(seeds)]  # never that of the run before, whose picture is kept
        prompt_id = studio.server.client.queue(studio.prompt(seed=seed, steps=20))
        while not studio.server.client.request("/queue")["queue_running"]:
            assert not studio.server.client.request(f"/history/{prompt_id}"), "it was too short"
        time.sleep(chance.random() * 0.2)
        status, answer = studio.post(SLEEP)
        if status == 409:
            busy += 1
            assert answer["error"]["message"].startswith("a prompt runs; nothing was changed")
            status, answer = studio.post(SLEEP, when="idle")
        assert (status, answer["ok"]) == (200, True)
        # Otherwise the prompt had ended by then.
        finished = studio.server.client.request(f"/history/{prompt_id}")[prompt_id]
        assert finished["status"]["status_str"] == "success"
        assert studio.picture(studio.server.client.follow(prompt_id)) == want[seed]
        assert studio.model()["state"] == "asleep"
        assert studio.post(WAKE)[0] == 200
    assert busy > 0, "no order came during a run"


def test_models_sleep_by_themselves_when_nothing_runs_and_looking_is_no_use(
    studio: Studio, small_models: Any
) -> None:
    settings = small_models.base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    before = settings.read_text() if settings.exists() else "{}"
    want = studio.picture(studio.run(studio.prompt(seed=80)))
    assert studio.model()["state"] == "loaded"
    settings.write_text(json.dumps({"Courier.IdleSleepMinutes": 0.02}))
    try:
        wait_for(studio, "asleep")
        assert studio.picture(studio.run(studio.prompt(seed=80))) == want, "its use wakes it"
        wait_for(studio, "asleep")
    finally:
        settings.write_text(before)


@pytest.mark.parametrize("flags", [{"unload_models": True}, {"free_memory": True}])
def test_orders_beside_the_cores_own_freeing_leave_a_queue_that_works(
    studio: Studio, flags: dict[str, bool]
) -> None:
    """The core does that between two prompts, without the queue's lock."""
    want = studio.picture(studio.run(studio.prompt(seed=90)))
    for number in range(12):
        studio.server.client.request("/free", flags)
        path = WAKE if number % 3 == 2 else SLEEP
        body = {} if path == WAKE else {"on_use": "wake"}
        status, answer = studio.post(path, **body)
        assert status == 200, answer
        result = studio.server.client.run(studio.prompt(seed=90), timeout_seconds=60)
        assert studio.picture(result) == want


def test_a_queue_of_prompts_that_end_in_sleep_runs_to_its_end(studio: Studio) -> None:
    ids = []
    for seed in range(91, 97):
        prompt = studio.prompt(seed=seed)
        prompt["20"] = node("CourierSleepModel", level=1, on_use="refuse")
        ids.append(studio.server.client.queue(prompt))
    for prompt_id in ids:
        assert len(studio.server.client.follow(prompt_id).images()) == 1
    wait_for(studio, "asleep")


@pytest.mark.parametrize("change", ["replaced", "touched"])
def test_a_file_that_changed_while_its_model_slept_is_loaded_anew(
    studio: Studio, small_models: Any, change: str
) -> None:
    original = small_models["wan"]
    file = original.with_name(f"asleep_{change}.safetensors")
    shutil.copyfile(original, file)
    loader = loaded_with("CourierLoadDiffusionModel", file.name)
    try:
        prompt = workflow(small_models, loader, seed=99)
        want = studio.picture(studio.run(prompt))
        assert studio.post(SLEEP)[0] == 200
        if change == "replaced":
            other = file.with_name("other.tmp")
            shutil.copyfile(original, other)
            other.replace(file)
        else:
            os.utime(file, (1, 1))
        status, answer = studio.post(WAKE)
        assert (status, answer["ok"]) == (200, False)
        assert f"{file.stem} stays asleep: {file.name} " in answer["message"]
        status, answer = studio.post(WAKE, models=[studio.model()["id"]])
        assert status == 503
        assert str(file.parent) not in json.dumps(answer)
        assert studio.picture(studio.run(prompt)) == want
        assert studio.model()["state"] == "loaded"
    finally:
        file.unlink()


def test_a_model_of_the_same_name_in_another_folder_does_not_sleep(
    studio: Studio, small_models: Any
) -> None:
    original = small_models["wan"]
    loaders = {}
    for folder in ("a", "b"):
        file = original.parent / folder / "same.safetensors"
        file.parent.mkdir(exist_ok=True)
        shutil.copyfile(original, file)
        loaders[folder] = loaded_with("CourierLoadDiffusionModel", f"{folder}/same.safetensors")
    try:
        prompt = workflow(small_models, loaders["b"], seed=98)
        want = studio.picture(studio.run(prompt))
        prompt["30"] = loaders["a"]
        prompt["31"] = node("CourierStatus", anything=["30", 0])
        prompt["32"] = node(
            "CourierSleepModel", model=["30", 0], anything=["31", 0], level=1, on_use="refuse"
        )
        studio.run(prompt)
        with pytest.raises(PromptError, match=r"same .* is asleep"):
            studio.run(workflow(small_models, loaders["a"], seed=98))
        del prompt["32"]
        prompt[SAMPLER]["inputs"]["seed"] = 97
        del prompt["30"], prompt["31"]
        assert studio.picture(studio.run(prompt)) != want
    finally:
        for folder in loaders:
            shutil.rmtree(original.parent / folder)
