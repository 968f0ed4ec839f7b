"""The environment in ``.venv``: made once from the lock, and made again when the lock changes.

Standard library only: this runs before there is an environment.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from devtools.console import DevError, Progress, say
from devtools.paths import Paths

# The pins of the lock (numpy, scipy, av and others) start at 3.11; the pack itself runs on 3.10.
MINIMUM_PYTHON = (3, 11)
# Environment 1.5 GB, ComfyUI with its frontend and the small models 0.5 GB, the rest for pip at
# work. A CUDA build of torch brings 4 GB more.
NEEDED_DISK_BYTES = 3 * 10**9
STAMP_NAME = "courier-stamp"
HOOKS = {"cpu_torch_shim.py": "_courier_cpu_torch_shim", "checkout_finder.py": "_courier_checkout"}


def check_python(version: Sequence[int] = sys.version_info) -> None:
    """Refuse an interpreter for which the lock has no releases."""
    if tuple(version[:2]) < MINIMUM_PYTHON:
        have = ".".join(str(part) for part in version[:2])
        need = ".".join(str(part) for part in MINIMUM_PYTHON)
        raise DevError(
            f"dev.py needs Python {need} or newer and this is {have}; run it with a newer one, "
            f"for example: python{need} dev.py --help"
        )


def check_disk(folder: Path, need_bytes: int = NEEDED_DISK_BYTES) -> None:
    """Refuse to start an installation that would end half-way for lack of space."""
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise DevError(
            f"setting up needs {need_bytes / 1e9:.1f} GB under {folder} and {free / 1e9:.1f} GB "
            "are free; make room and run it again"
        )


def stamp_of(paths: Paths) -> str:
    """What the environment was made from; a different text means: make it again."""
    digest = hashlib.sha256()
    for name in ("requirements.lock", *HOOKS):
        digest.update((paths.root / "devtools" / name).read_bytes())
    # The environment's own Python, not the caller's: two callers with two Pythons share it.
    settings = (paths.venv / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    version = next((line for line in settings if line.startswith("version")), "version unknown")
    where = f"{version} {sys.platform} {platform.machine()} {paths.root}"
    return f"{digest.hexdigest()} {where}\n"


def is_ready(paths: Paths) -> bool:
    stamp = paths.venv / STAMP_NAME
    return (
        stamp.is_file()
        and paths.venv_python.exists()  # False for a link to a Python that is gone
        and (paths.venv / "pyvenv.cfg").is_file()
        and stamp.read_text(encoding="utf-8") == stamp_of(paths)
    )


def ensure_environment(paths: Paths) -> None:
    """Leave a complete ``.venv`` behind, or raise; a half-made one has no stamp."""
    if is_ready(paths):
        return
    with only_one(paths.root / ".venv.lock"):
        if not is_ready(paths):  # another run may have made it while this one waited
            check_disk(paths.root)
            _make(paths)


def _make(paths: Paths) -> None:
    stamp = paths.venv / STAMP_NAME
    stamp.unlink(missing_ok=True)
    _create(paths)
    _install(paths)
    write_hooks(paths)
    stamp.write_text(stamp_of(paths), encoding="utf-8")


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Wait until no other process of this checkout is inside; the system frees it if one dies."""
    with lock.open("a") as file:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another dev.py, which is setting up this checkout")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _create(paths: Paths) -> None:
    with Progress(f"Making the environment {paths.venv.name}") as progress:
        # clear: what an interrupted run left is not worth finding out.
        command = [sys.executable, "-m", "venv", "--clear", str(paths.venv)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise DevError(
                f"python -m venv failed: {(done.stdout + done.stderr).strip()}\n"
                "On Debian and Ubuntu the package python3-venv brings it."
            )
        progress.show()


def _install(paths: Paths) -> None:
    pins = [line for line in lock_lines(paths.lock) if line]
    torch = next(line for line in pins if line.startswith("torch=="))
    pip = [str(paths.venv_python), "-m", "pip", "install", "--no-input", "--progress-bar=off"]
    with Progress("Installing torch") as progress:
        run_pip([*pip, "--constraint", str(paths.lock), torch], progress)
    with Progress("Installing the other packages", len(pins)) as progress:
        run_pip([*pip, "--no-deps", "--requirement", str(paths.lock)], progress)


def lock_lines(lock: Path) -> list[str]:
    """The pins of the lock, without comments."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def run_pip(command: list[str], progress: Progress) -> None:
    """Run pip with its own configuration untouched; its last lines become the error's text."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"},
    )
    assert process.stdout is not None
    tail: list[str] = []
    with process.stdout:
        for line in process.stdout:
            tail = [*tail[-19:], line.rstrip()]
            if line.startswith(("Collecting ", "Requirement already satisfied")):
                progress.advance(line.split(" (")[0].strip())
            elif line.startswith("Installing collected"):
                progress.show("unpacking")
    if process.wait():
        raise DevError(f"pip ended with {process.returncode}:\n" + "\n".join(tail))


def write_hooks(paths: Paths) -> None:
    """Copy the two import hooks into the environment and start them from one ``.pth`` file."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    found = subprocess.run(
        [str(paths.venv_python), "-c", code], capture_output=True, text=True, check=True
    )
    site = Path(found.stdout.strip())
    for source, module in HOOKS.items():
        shutil.copyfile(paths.root / "devtools" / source, site / f"{module}.py")
    shim, finder = HOOKS.values()
    lines = [
        f"import {shim}; {shim}.install()",
        f"import {finder}; {finder}.install({str(paths.root)!r})",
    ]
    (site / "zz_courier_dev.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
