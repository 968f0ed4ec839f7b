"""A ComfyUI of the user's, started for one command and ended with it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConnectionLostError, HeadlessError, UsageError
from ..interrupts import held_back
from .blocking import CourierClient
from .calls import Call
from .tied import Lifeline, lifeline

START_SECONDS = 300.0
"""Some packs install things when they are loaded."""
STOP_SECONDS = 15.0
_POLL_SECONDS = 0.3
_TAIL_LINES = 25
_ENVIRONMENTS = (".venv", "venv", "env")
_OURS = ("--port", "--listen")
_UP = Call("GET", "/system_stats")


@dataclass(frozen=True)
class Program:
    """How to start it. ``extra`` goes to its command line."""

    folder: Path
    python: str
    extra: tuple[str, ...] = ()


def find_program(folder: str, python: str | None, extra: Sequence[str]) -> Program:
    """The ComfyUI in ``folder`` and the Python that has what it needs.

    Raises: UsageError.
    """
    for name in _OURS:
        if any(word == name or word.startswith(f"{name}=") for word in extra):
            raise UsageError(f"--comfyui-args may not have {name}: this command chooses it itself")
    path = Path(folder).expanduser().absolute()
    if not (path / "main.py").is_file() and (path / "ComfyUI" / "main.py").is_file():
        path = path / "ComfyUI"
    if not (path / "main.py").is_file():
        raise UsageError(f"--comfyui {folder}: there is no main.py, so it is no ComfyUI")
    if python is not None:
        found = shutil.which(python)
        if found is None:
            raise UsageError(f"--comfyui-python {python} is no program that can be started")
        # It is started in ComfyUI's folder. Not resolved: an environment is known by its link.
        return Program(path, str(Path(found).absolute()), tuple(extra))
    return Program(path, _python_of(path), tuple(extra))


def _python_of(folder: Path) -> str:
    """Its own environment, the portable Windows build's, or the one that runs this."""
    inner = ("Scripts/python.exe",) if os.name == "nt" else ("bin/python", "bin/python3")
    places = [folder / name / python for name in _ENVIRONMENTS for python in inner]
    places.append(folder.parent / "python_embeded" / "python.exe")
    return next((str(place) for place in places if place.is_file()), sys.executable)


@contextmanager
def running(program: Program) -> Iterator[CourierClient]:
    """Start it on a free port of this machine; it ends on leaving, however that is left, and with
    this process, however that ends.

    Raises: HeadlessError with the end of its log where it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="courier-") as place, lifeline() as line:
        log = Path(place) / "comfyui.log"
        client = CourierClient(f"http://127.0.0.1:{_free_port()}")
        process = None
        try:
            with held_back() as stopped:
                process = _spawn(program, client.address.rpartition(":")[2], log, line)
            if stopped:
                raise KeyboardInterrupt
            _wait_until_up(process, client, log, program.python)
            yield client
        finally:
            if process is not None:
                _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(program: Program, port: str, log: Path, line: Lifeline) -> subprocess.Popen[bytes]:
    command = [program.python, "main.py", "--listen", "127.0.0.1", "--port", port]
    command += ["--disable-auto-launch", *program.extra]
    with log.open("wb") as sink:
        return line.start(
            command,
            cwd=program.folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for us: the run is cancelled first, and then ComfyUI ended in order.
            start_new_session=os.name != "nt",
        )


def _wait_until_up(
    process: subprocess.Popen[bytes], client: CourierClient, log: Path, python: str
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        code = process.poll()
        if code is not None:
            tail = _tail(log)
            text = f"ComfyUI ended with {code} instead of starting:\n{tail}"
            if "ModuleNotFoundError" in tail:
                lacks = f"{python} lacks what ComfyUI needs"
                text = f"{text}\n{lacks}; name one that has it with --comfyui-python"
            raise HeadlessError(text)
        try:
            client.call(_UP)
        except ConnectionLostError:
            pass
        else:
            return
        if time.monotonic() > deadline:
            text = f"ComfyUI did not answer within {START_SECONDS:.0f} s"
            raise HeadlessError(f"{text}; the end of what it wrote:\n{_tail(log)}")
        time.sleep(_POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """In order; at once where that takes too long, or Ctrl-C says that it does."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
    process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
