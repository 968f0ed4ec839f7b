"""Ctrl-C at every moment: nothing is left running, and nobody is shown a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ..conftest import COMMAND, Headless

SLOW = """
import importlib, sys
def slow(name):
    print("loading", flush=True)
    sys.stdin.readline()
importlib.import_module = slow
"""
"""Before the command is loaded, which takes as long as the file system takes."""


@pytest.fixture(autouse=True)
def ctrl_c_is_heard(headless: Headless, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests that a shell runs in the background are told to ignore it; and the second one counts
    however soon it comes."""
    monkeypatch.setattr(headless.module("interrupts"), "_SAME_WISH_SECONDS", -1.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_waits_until_what_was_begun_is_known(headless: Headless) -> None:
    with headless.module("interrupts").held_back() as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped == [signal.SIGTERM]
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_second_one_does_not_wait(headless: Headless) -> None:
    with headless.module("interrupts").held_back() as stopped:
        press()
        assert stopped == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            press()


def test_two_at_once_are_one(headless: Headless, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal and a program that passes signals on: what the first began must not be ended."""
    interrupts = headless.module("interrupts")
    monkeypatch.setattr(interrupts, "_SAME_WISH_SECONDS", 3600.0)
    monkeypatch.setattr(interrupts, "_wished_at", float("-inf"))
    with interrupts.held_back() as stopped:
        press()
        press()
    assert stopped == [signal.SIGINT]
    signal.signal(signal.SIGINT, interrupts.stop)
    press()
    monkeypatch.setattr(interrupts, "_wished_at", float("-inf"))
    with pytest.raises(KeyboardInterrupt):
        press()


class Runs:
    """A client with one run, which ends as soon as it is cancelled."""

    def __init__(self) -> None:
        self.run = SimpleNamespace(id="r", state="running", has_ended=False, raw={})
        self.cancelled: list[str] = []

    def start(self) -> Any:
        press()
        return self.run

    def cancel(self, run_id: str) -> None:
        self.cancelled.append(run_id)

    def follow(self, _: str) -> Any:
        assert self.cancelled, "cancelled before it is waited for"
        yield SimpleNamespace(run=SimpleNamespace(has_ended=True), kind="end")


@pytest.mark.parametrize("waits", [True, False])
def test_in_the_request_that_begins_a_run_it_cancels_that_run(
    headless: Headless, waits: bool
) -> None:
    module, runs = headless.module("cli.workflow_commands"), Runs()
    console = SimpleNamespace(note=lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        module._run_to_its_end(runs, runs.start, console, waits=waits)
    assert runs.cancelled == ["r"]


def test_while_comfyui_is_started_it_ends_it(
    headless: Headless, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch = headless.module("client.launch")
    started: list[subprocess.Popen[bytes]] = []
    spawn: Callable[..., subprocess.Popen[bytes]] = launch._spawn

    def pressed_while(*arguments: Any) -> subprocess.Popen[bytes]:
        started.append(spawn(*arguments))
        press()
        return started[0]

    monkeypatch.setattr(launch, "_spawn", pressed_while)
    (tmp_path / "main.py").write_text("input()")
    program = launch.find_program(str(tmp_path), sys.executable, [])
    with pytest.raises(KeyboardInterrupt), launch.running(program):
        pytest.fail("it goes on")
    assert started[0].returncode is not None


def test_a_second_one_ends_a_comfyui_that_does_not_end(headless: Headless) -> None:
    deaf = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", deaf], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    waits = process.wait

    def pressed(timeout: float | None = None) -> int:
        if timeout is not None:
            press()
        return waits(timeout)

    process.wait = pressed  # type: ignore[method-assign]
    headless.module("client.launch")._stop(process)
    assert process.returncode == -signal.SIGKILL
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("is_ignored", [False, True])
def test_while_the_command_is_loaded(is_ignored: bool) -> None:
    """It ends without a word; who was told to ignore it (nohup) still does."""
    code = f"{SLOW}\nimport runpy; runpy.run_path({str(COMMAND)!r}, run_name='__main__')"
    handler = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGINT)
    if is_ignored:
        assert b"AttributeError" in process.communicate(b"\n", 60)[1], "it went on"
    else:
        assert process.communicate(timeout=60) == (b"", b"")
        assert process.returncode == -signal.SIGINT
