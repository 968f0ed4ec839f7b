"""A ComfyUI that a command started ends with the command, also where that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..conftest import COMMAND, Headless

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX; Windows has job objects")
SECONDS = 30.0
MAIN = """
import os, signal, sys, pathlib
if (pathlib.Path("deaf")).exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("pid.part").write_text(str(os.getpid()))
os.rename("pid.part", "pid")
signal.pause()
"""
WORKFLOW = '{"1": {"class_type": "CourierWakeModel", "inputs": {}}}'


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """A zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return not state.stdout.startswith("Z") and bool(state.stdout.strip())


def watchers(folder: Path) -> list[str]:
    """Processes beside a ComfyUI there."""
    table = subprocess.run(["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True)
    return [line for line in table.stdout.splitlines() if "tied.py" in line and str(folder) in line]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "main.py").write_text(MAIN)
    (tmp_path / "workflow.json").write_text(WORKFLOW)
    yield tmp_path
    if (tmp_path / "pid").exists() and lives(pid := int((tmp_path / "pid").read_text())):
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the ComfyUI is still there")


@pytest.fixture
def command(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``courier.py run`` with a ComfyUI that has begun and never answers."""
    words = ["run", "workflow.json", "--comfyui", str(folder)]
    words += ["--comfyui-python", sys.executable]
    process = subprocess.Popen(
        [sys.executable, str(COMMAND), *words], cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    until((folder / "pid").exists)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("number", "is_deaf"),
    [
        (signal.SIGKILL, False),
        (signal.SIGKILL, True),
        (signal.SIGHUP, False),
        (signal.SIGTERM, False),
        (signal.SIGINT, False),
    ],
)
def test_it_ends_with_the_command(
    folder: Path, request: pytest.FixtureRequest, number: signal.Signals, is_deaf: bool
) -> None:
    if is_deaf:
        (folder / "deaf").touch()
    process = request.getfixturevalue("command")
    pid = int((folder / "pid").read_text())
    assert lives(pid)
    process.send_signal(number)
    until(lambda: not lives(pid))
    status = process.wait(SECONDS)
    assert status == (-signal.SIGKILL if number is signal.SIGKILL else 130)
    until(lambda: watchers(folder) == [])


def test_nohup_is_respected(folder: Path) -> None:
    code = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    words = [str(COMMAND), "run", "workflow.json", "--comfyui", str(folder)]
    words += ["--comfyui-python", sys.executable]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=folder, stderr=subprocess.PIPE
    )
    until((folder / "pid").exists)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.terminate()
    assert process.wait(SECONDS) == 130
    assert process.stderr is not None
    process.stderr.close()


def test_what_ended_by_itself_leaves_nobody_behind(headless: Headless, tmp_path: Path) -> None:
    tied = headless.module("client.tied")
    with tied.lifeline() as line:
        command = [sys.executable, "-c", "raise SystemExit(3)", str(tmp_path)]
        process = line.start(command)
        assert process.wait(SECONDS) == 3
    until(lambda: watchers(tmp_path) == [])


def test_letting_go_ends_it(headless: Headless, folder: Path) -> None:
    tied = headless.module("client.tied")
    with tied.lifeline() as line:
        process = line.start([sys.executable, "main.py"], cwd=folder)
        until((folder / "pid").exists)
        assert int((folder / "pid").read_text()) == process.pid, "no process in between"
    assert process.wait(SECONDS) == -signal.SIGTERM
