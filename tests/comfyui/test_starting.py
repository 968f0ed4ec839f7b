"""A ComfyUI that the command starts and ends, and comfy-cli's own commands beside ours."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from devtools.comfy_cli import comfy_cli_environment, ensure_comfy_cli
from devtools.comfyui_client import ComfyUIClient
from devtools.comfyui_host import free_port
from devtools.comfyui_install import ComfyUIProgram, needs_cpu_flag
from devtools.paths import Paths
from devtools.small_workflows import SAVE, Prompt, loaded_with, workflow

from .commanding import Bench, finished


class Nobody:
    """In the place of a server: the command starts its own."""

    address = "http://127.0.0.1:9"


@pytest.fixture
def bench(small_models: Any) -> Bench:  # instead of the one that runs
    return Bench(Nobody(), small_models)  # type: ignore[arg-type]


@pytest.fixture
def prompt(small_models: Any) -> Prompt:
    return workflow(small_models, loaded_with("UNETLoader", small_models["wan"].name))


@pytest.fixture(scope="module")
def words(comfyui_program: ComfyUIProgram, small_models: Any) -> list[str]:
    """What the embedded one has to be told."""
    more = ["--base-directory", str(small_models.base), "--database-url", "sqlite:///:memory:"]
    if comfyui_program.frontend is not None:
        more += ["--front-end-root", str(comfyui_program.frontend)]
    if needs_cpu_flag(comfyui_program.python):
        more.append("--cpu")
    return [*more, *comfyui_program.extra_args]


@pytest.fixture
def arguments(comfyui_program: ComfyUIProgram, words: list[str]) -> list[str]:
    """How to start it."""
    quoted = " ".join(f"'{word}'" for word in words)
    return [
        "--comfyui", str(comfyui_program.path), "--comfyui-python", str(comfyui_program.python),
        f"--comfyui-args={quoted}",
    ]  # fmt: skip


def comfyuis(bench: Bench) -> set[int]:
    """Processes of ComfyUI over the base directory of these tests; a shared server is one."""
    base = str(bench.small_models.base)
    found = psutil.process_iter(["pid", "cmdline"])
    return {p.info["pid"] for p in found if {"main.py", base} <= set(p.info["cmdline"] or [])}


@pytest.fixture
def before(bench: Bench) -> set[int]:
    """Those that were there already."""
    return comfyuis(bench)


def test_it_starts_one_runs_and_ends_it_wherever_it_is_called_from(
    bench: Bench, prompt: Prompt, arguments: list[str], tmp_path: Path, before: set[int]
) -> None:
    folder = tmp_path / "模型 x"
    folder.mkdir()
    (folder / "a 猫.json").write_text(json.dumps(prompt), encoding="utf-8")
    done = bench.run(
        "run", "a 猫.json".encode(), *arguments, "--courier", "--vram", "0.1", "--save", "out",
        "--json", folder=folder, LC_ALL="C", PYTHONUTF8="0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert done.json["state"] == "done"
    (picture,) = (folder / "out").iterdir()
    assert picture.suffix == ".png"
    assert "starting ComfyUI" in done.err
    assert comfyuis(bench) == before


def test_a_workflow_that_does_not_fit_ends_it_too(
    bench: Bench, prompt: Prompt, arguments: list[str], tmp_path: Path, before: set[int]
) -> None:
    file = tmp_path / "a.json"
    prompt["1"]["inputs"]["unet_name"] = "not here.safetensors"
    file.write_text(json.dumps(prompt))
    done = bench.run("run", str(file), *arguments, OMP_NUM_THREADS="1")
    assert done.status == 4
    assert "a model that this ComfyUI does not have" in done.err
    assert comfyuis(bench) == before


def test_ctrl_c_while_it_starts_leaves_none_behind(
    bench: Bench, prompt: Prompt, arguments: list[str], tmp_path: Path, before: set[int]
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(prompt))
    process = bench.start("run", str(file), *arguments)
    assert process.stderr is not None
    assert b"starting ComfyUI" in process.stderr.readline()
    while comfyuis(bench) == before:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finished(process).status == 130
    assert comfyuis(bench) == before


# comfy-cli


@pytest.fixture
def workspace(comfyui_program: ComfyUIProgram, small_models: Any, tmp_path: Path) -> Path:
    """As ``comfy install`` leaves one: ComfyUI in a folder, here by links."""
    folder = tmp_path / "ComfyUI"
    folder.mkdir()
    for entry in comfyui_program.path.iterdir():
        if entry.name not in ("models", "custom_nodes", "user", "input", "output", "temp"):
            (folder / entry.name).symlink_to(entry)
    return folder


def test_comfy_launch_and_comfy_run_work_beside_this_command(
    bench: Bench, courier_checkout: Paths, words: list[str], workspace: Path,
    small_models: Any, tmp_path: Path,
) -> None:  # fmt: skip
    comfy = ensure_comfy_cli(courier_checkout).parent / "comfy"
    home = tmp_path / "home"
    home.mkdir()
    variables = {**comfy_cli_environment(courier_checkout, home), "OMP_NUM_THREADS": "1"}
    port = free_port()

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(comfy), "--skip-prompt", "--workspace", str(workspace), *words],
            env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=180,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    launched = call("launch", "--background", "--", "--port", str(port), *words)
    try:
        assert launched.returncode == 0, launched.stdout + launched.stderr
        client = ComfyUIClient(f"http://127.0.0.1:{port}")
        assert client.is_up()
        prompt = workflow(
            small_models, loaded_with("CourierLoadDiffusionModel", small_models["wan"].name)
        )
        file = tmp_path / "a.json"
        file.write_text(json.dumps(prompt))
        theirs = call("run", "--workflow", str(file), "--port", str(port), "--wait")
        assert theirs.returncode == 0, theirs.stdout + theirs.stderr
        (entry,) = client.request("/history").values()
        assert entry["status"]["status_str"] == "success"
        assert entry["outputs"][SAVE]["images"]
        ours = bench.run("run", str(file), "--server", client.address, "--sleep-after")
        assert ours.status == 0, ours.err
        assert "asleep" in bench.run("status", "--server", client.address).out
    finally:
        stopped = call("stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
