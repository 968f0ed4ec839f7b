"""The command against a real server, and a place to look at what it left there."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from devtools.comfyui_host import ComfyUIHost
from devtools.small_workflows import Prompt, loaded_with, workflow

from ..courier_command import COMMAND, load_courier

COMMAND_SECONDS = 120.0


@dataclass(frozen=True)
class Done:
    """What a command ended with."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(
    server: ComfyUIHost | None, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """For the command: that server."""
    found = dict(os.environ)
    for name in ("PYTHONPATH", "COURIER_TOKEN", "COURIER_SERVER"):
        found.pop(name, None)
    if server is not None:
        found["COURIER_SERVER"] = server.address
    return {**found, **more}


class Bench:
    """A server, the command and the client."""

    def __init__(self, server: ComfyUIHost, small_models: Any) -> None:
        self.server = server
        self.small_models = small_models
        self.courier = load_courier()
        self.client = self.courier.CourierClient(server.address)
        _make_patient(self.client, self.courier.RefusedError)
        self.seed = 1000

    def prompt(self, class_type: str = "CourierLoadDiffusionModel", **more: Any) -> Prompt:
        """A workflow of which nothing is cached but its loaders."""
        self.seed += 1
        loader = loaded_with(class_type, self.small_models["wan"].name)
        return workflow(self.small_models, loader, seed=more.pop("seed", self.seed), **more)

    def long_prompt(self) -> Prompt:
        """One that runs until it is stopped."""
        return self.prompt(steps=10_000)

    def start(
        self, *arguments: str | bytes, folder: Path | None = None, **more: str
    ) -> subprocess.Popen[bytes]:
        """The command, begun."""
        return subprocess.Popen(
            [sys.executable, str(COMMAND), *arguments],
            cwd=folder,
            env=environment(self.server, more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_hear_ctrl_c,
        )

    def run(
        self,
        *arguments: str | bytes,
        data: bytes = b"",
        folder: Path | None = None,
        **more: str,
    ) -> Done:
        """The command, to its end."""
        return finished(self.start(*arguments, folder=folder, **more), data)

    def until(self, run_id: str, state: str, step: int = 0) -> Any:
        """The run, once it is so far."""
        for event in self.client.follow(run_id):
            run = event.run
            if run.state == state and (not step or ((run.node or {}).get("step") or 0) >= step):
                return run
            assert not run.has_ended, run
        raise AssertionError("the events ended")

    def traces(self) -> Any:
        """Everything that a run leaves: what was queued, what ran, and models."""
        client = self.server.client
        return (
            sorted(client.request("/history")),
            client.request("/queue"),
            [run.id for run in self.client.runs()],
            client.request("/courier/v1/models")["models"],
        )

    def forget(self) -> None:
        """Have ComfyUI forget what it has computed, so that the next run computes it again."""
        self.server.client.request("/free", {"unload_models": True, "free_memory": True})

    def pixels(self, run: Any) -> list[bytes]:
        """The pictures of a run, decoded; none of them of one colour."""
        found = []
        for file in run.files():
            with Image.open(io.BytesIO(self.client.download(file))) as picture:
                assert picture.convert("RGB").getcolors(1) is None, "a picture of one colour"
                found.append(picture.tobytes())
        assert found, "the run made no picture"
        return found


def _make_patient(client: Any, refused: type[Exception]) -> None:
    """Courier takes so many changes a second and no more; tests make more than people do."""
    call = client.call

    def patient(*args: Any) -> Any:
        while True:
            try:
                return call(*args)
            except refused as error:
                if error.code != "too_many_requests":  # type: ignore[attr-defined]
                    raise
            time.sleep(0.2)

    client.call = patient


def _hear_ctrl_c() -> None:
    """A shell that started these tests in the background has everything below it ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finished(process: subprocess.Popen[bytes], data: bytes = b"") -> Done:
    """What it ended with; a command that does not end is a failure."""
    try:
        out, err = process.communicate(data, COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the command did not end\n{out!r}\n{err!r}") from None
    return Done(process.returncode, out.decode(), err.decode())
