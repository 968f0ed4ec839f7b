"""The recipes of docs/brokers.md, run as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from .commanding import COMMAND, Bench, environment

PAGE = COMMAND.parent / "docs" / "brokers.md"
_BLOCK = re.compile(r"```(bash|python)\n# (\w+)\n(.*?)```", re.DOTALL)
RECIPES = {name: code for _, name, code in _BLOCK.findall(PAGE.read_text(encoding="utf-8"))}


@pytest.fixture
def place(bench: Bench, tmp_path: Path) -> Path:
    """A folder to run a recipe in, with loaded models on the server."""
    (tmp_path / "workflow.json").write_text(json.dumps(bench.prompt()), encoding="utf-8")
    bench.client.wake(when="idle")
    bench.client.wait(bench.client.start(bench.prompt()).id)
    return tmp_path


class Cook:
    """Runs recipes; the other program writes down the states of ComfyUI's models."""

    def __init__(self, bench: Bench, place: Path) -> None:
        self.bench, self.place = bench, place
        self.seen = place / "seen.json"
        self.other = place / "llm.py"
        self.other.write_text(
            "import json, sys, urllib.request\n"
            f"models = json.load(urllib.request.urlopen({bench.server.address!r} +"
            " '/courier/v1/models'))['models']\n"
            f"open({str(self.seen)!r}, 'w').write(json.dumps([m['state'] for m in models]))\n"
            "sys.exit(int(sys.argv[1]))\n",
            encoding="utf-8",
        )

    def bash(
        self, name: str, other_status: int = 0, **more: str
    ) -> subprocess.CompletedProcess[str]:
        code = RECIPES[name].replace("python courier.py", f"{sys.executable} {COMMAND}")
        variables = {
            "SERVER": self.bench.server.address,
            "LLM": f"{sys.executable} {self.other} {other_status}",
        }
        return subprocess.run(
            ["bash", "-c", code],  # as it is pasted
            cwd=self.place,
            env=environment(self.bench.server, {**variables, **more}),
            capture_output=True,
            text=True,
            timeout=120,
        )

    def states(self) -> set[str]:
        """Of ComfyUI's models now."""
        return {model["state"] for model in self.bench.client.models()}

    def states_seen(self) -> set[str]:
        """By the other program."""
        return set(json.loads(self.seen.read_text()))


@pytest.fixture
def cook(bench: Bench, place: Path) -> Cook:
    return Cook(bench, place)


def test_every_recipe_is_run_here() -> None:
    assert sorted(RECIPES) == ["command", "picture", "python", "receipt", "turns"]


@pytest.mark.parametrize("name", ["receipt", "command"])
@pytest.mark.parametrize("other_status", [0, 3])
def test_the_other_program_has_the_card_and_comfyui_has_it_again(
    cook: Cook, name: str, other_status: int
) -> None:
    done = cook.bash(name, other_status)
    assert done.returncode == other_status, done.stderr
    assert cook.states_seen() == {"asleep"}
    assert cook.states() == {"awake"}
    if name == "receipt":
        receipt = json.loads((cook.place / "receipt.json").read_text())
        assert (receipt["ok"], receipt["action"]) == (True, "sleep")


@pytest.mark.parametrize(("name", "status"), [("receipt", 7), ("command", 5)])
def test_the_other_program_is_not_started_where_nobody_answers(
    cook: Cook, name: str, status: int
) -> None:
    done = cook.bash(name, SERVER="http://127.0.0.1:9")
    assert done.returncode == status
    assert not cook.seen.exists()


def test_a_picture_and_then_the_other_program(cook: Cook) -> None:
    done = cook.bash("picture")
    assert done.returncode == 0, done.stderr
    assert cook.states_seen() == {"asleep"}
    (picture,) = (cook.place / "pictures").iterdir()
    assert picture.suffix == ".png"
    again = cook.bash("picture")  # its models wake first
    assert again.returncode == 0, again.stderr


def test_around_a_call_from_python(cook: Cook) -> None:
    seen: list[set[str]] = []
    names = {
        "PACK": str(COMMAND.parent),
        "SERVER": cook.bench.server.address,
        "use_the_card": lambda: seen.append(cook.states()),
    }
    before = list(sys.path)
    try:
        exec(compile(RECIPES["python"], "brokers.md", "exec"), names)
        names["use_the_card"] = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            exec(compile(RECIPES["python"], "brokers.md", "exec"), names)
    finally:
        sys.path[:] = before
    assert seen == [{"asleep"}]
    assert cook.states() == {"awake"}


def test_two_servers_take_turns(cook: Cook) -> None:
    asked: list[tuple[str, set[str]]] = []

    class Llm(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, cook.states()))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Llm)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        done = cook.bash("turns", LLM_SERVER=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert done.returncode == 0, done.stderr
    assert asked == [("/wake_up", {"asleep"}), ("/sleep", {"asleep"})]
    assert cook.states() == {"awake"}
    assert json.loads((cook.place / "receipt.json").read_text())["models"][0]["level"] == 2
    assert os.path.getsize(cook.place / "woken.json") > 0
