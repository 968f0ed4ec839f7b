"""A process that ends with the one that started it, also where that is killed and can do nothing.

Linux, macOS: a small process beside it reads a pipe, of which only the starter has the other end.
When that closes, whatever closed it, the process is told to end, and killed if it does not.
Windows: both are in a job object, and the system ends what is in it when its last handle closes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05


@contextmanager
def lifeline() -> Iterator[Lifeline]:
    """What ``Lifeline.start`` ties to this process: on leaving, it is let go, so end it first."""
    made = Lifeline()
    try:
        yield made
    finally:
        made.close()


class Lifeline:
    """Starts a process and holds what keeps it alive.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._end: int | None = None
        self._job: Any = None

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """As ``subprocess.Popen`` does, but that it ends with us."""
        if sys.platform == "win32":
            process = subprocess.Popen(command, **options)
            self._job = _in_job(process.pid)
            return process
        theirs, self._end = os.pipe()
        try:
            starter = [sys.executable, "-I", __file__, str(theirs), *command]
            return subprocess.Popen(starter, pass_fds=(theirs,), **options)
        finally:
            os.close(theirs)

    def close(self) -> None:
        """Let go: what is tied ends now. Once more is nothing."""
        end, self._end = self._end, None
        if end is not None:
            os.close(end)
        self._job = None


def become(theirs: int, command: list[str]) -> None:
    """In the new process: leave somebody behind who watches, and become ``command``."""
    watched = os.getpid()
    if os.fork() == 0:
        try:
            _watch(theirs, watched)
        finally:
            os._exit(0)
    os.close(theirs)
    os.execv(command[0], command)


def _watch(theirs: int, watched: int) -> None:
    # It is to keep neither the log nor a terminal open.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    # A service that is ended is told so in its whole group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(theirs, 1):
        pass
    _end(watched, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while os.getppid() == watched and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _end(watched, signal.SIGKILL)


def _end(watched: int, number: int) -> None:
    # Our parent, as long as it lives: afterwards its number may be another process's.
    if os.getppid() == watched:
        os.kill(watched, number)


def _in_job(pid: int) -> Any:
    """A job object with process ``pid`` in it, which ends with the handle; None if it cannot be."""
    import ctypes
    from ctypes import wintypes

    class Limits(ctypes.Structure):
        """JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

        _fields_ = (
            ("times", ctypes.c_int64 * 2),
            ("flags", wintypes.DWORD),
            ("sizes", ctypes.c_size_t * 2),
            ("processes", wintypes.DWORD),
            ("affinity", ctypes.c_size_t),
            ("classes", wintypes.DWORD * 2),
            ("io", ctypes.c_uint64 * 6),
            ("memory", ctypes.c_size_t * 4),
        )

    kernel: Any = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined]
    for name in ("CreateJobObjectW", "OpenProcess"):
        getattr(kernel, name).restype = wintypes.HANDLE
    limits = Limits(flags=0x2000)  # JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
    job = wintypes.HANDLE(kernel.CreateJobObjectW(None, None))
    process = wintypes.HANDLE(kernel.OpenProcess(0x0101, False, pid))  # SET_QUOTA | TERMINATE
    kernel.SetInformationJobObject(job, 9, ctypes.byref(limits), ctypes.sizeof(limits))
    kernel.AssignProcessToJobObject(job, process)
    kernel.CloseHandle(process)
    return job


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
