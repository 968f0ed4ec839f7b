"""A real ComfyUI process: started on a free loopback port, waited for, and ended by its own pid."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from devtools.comfyui_client import ComfyUIClient
from devtools.comfyui_install import ComfyUIProgram, needs_cpu_flag
from devtools.console import DevError, Progress

START_SECONDS = 120.0
# ComfyUI saves its settings when it is told to end; it has this long before it is killed.
STOP_SECONDS = 15.0
LOG_TAIL_LINES = 40


def free_port() -> int:
    """A loopback port that was free a moment ago; nobody can hold it for the process to come."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ComfyUIHost:
    """One ComfyUI process and its log. A context manager: leaving it ends the process.

    Threads: one at a time.
    """

    def __init__(
        self,
        program: ComfyUIProgram,
        base: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        cpu: bool | None = None,
        port: int | None = None,
    ) -> None:
        self.program = program
        self.base = base
        self.log = log
        self.environment = dict(environment or {})
        self.cpu = cpu
        self.port = port or free_port()
        self.client = ComfyUIClient(self.address)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def command(self) -> list[str]:
        """The command line that starts it."""
        if self.cpu is None:
            self.cpu = needs_cpu_flag(self.program.python)
        command = [str(self.program.python), "main.py"]
        command += ["--listen", "127.0.0.1", "--port", str(self.port)]
        command += ["--base-directory", str(self.base), "--disable-auto-launch"]
        command += ["--database-url", "sqlite:///:memory:"]
        if self.program.frontend is not None:
            command += ["--front-end-root", str(self.program.frontend)]
        if self.cpu:
            command += ["--cpu"]
        return [*command, *self.program.extra_args]

    def start(
        self, timeout_seconds: float = START_SECONDS, progress: Progress | None = None
    ) -> ComfyUIHost:
        """Start it and wait until it answers.

        Raises: DevError with the end of its log if it dies or does not answer in time.
        """
        if self._process is not None:
            raise DevError(f"this ComfyUI was started already (process {self.pid})")
        command = self.command()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = self._spawn(command, log)
        try:
            self._wait_until_up(timeout_seconds, progress)
        except BaseException:
            # Ctrl-C too: nobody has it yet who could end it.
            self.stop()
            raise
        return self

    def _spawn(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_ALBUMENTATIONS_UPDATE": "1"}
        # A test's or a user's PYTHONPATH could put another ``nodes`` before ComfyUI's own.
        environment.pop("PYTHONPATH", None)
        environment.update(self.environment)
        return subprocess.Popen(
            command,
            cwd=self.program.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C belongs to whoever started us; we end the process ourselves, in order.
            start_new_session=os.name != "nt",
        )

    def _wait_until_up(self, timeout_seconds: float, progress: Progress | None) -> None:
        deadline = time.monotonic() + timeout_seconds
        while True:
            self.check_alive()
            if self.client.is_up():
                # Somebody else may have taken the port in between; then ours ends on its own.
                self.check_alive()
                return
            if time.monotonic() > deadline:
                raise DevError(
                    f"ComfyUI did not answer on {self.address} within {timeout_seconds:.0f} s; "
                    f"the end of {self.log}:\n{self.log_tail()}"
                )
            if progress is not None:
                progress.show()
            time.sleep(0.2)

    def check_alive(self) -> None:
        """Raise DevError with the end of its log if the process has ended."""
        if self._process is None:
            raise DevError("this ComfyUI has not been started")
        code = self._process.poll()
        if code is not None:
            raise DevError(
                f"ComfyUI ended with exit status {code}; the end of {self.log}:\n{self.log_tail()}"
            )

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def stop(self) -> int | None:
        """End the process: ask, wait, then kill. Returns: its exit status; None if none runs."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        return process.wait()

    def __enter__(self) -> ComfyUIHost:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
