"""The machine and the surroundings of the children. Standard library only."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.hold import HoldError, system_meminfo
from bench.units import GIB
from devtools.paths import PACK_NAME

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_WARM_PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Ground:
    """Where children run.

    Attributes:
        root: the checkout.
        base: ComfyUI's base directory, with the pack among its custom nodes.
        comfyui: the ComfyUI that tests are made for, and the interpreter for it.
        newer: a newer one with its interpreter, or None.
    """

    root: Path
    base: Path
    comfyui: Path
    python: str
    newer: Path | None = None
    newer_python: str = ""

    def interpreter(self, newer: bool) -> str:
        return self.newer_python if newer else self.python

    def environment(self, newer: bool, environ: Mapping[str, str]) -> dict[str, str]:
        """``environ`` with what tests/comfyui/bootstrap.py asks for.

        The checkout comes last on PYTHONPATH: its ``nodes`` would hide ComfyUI's own.
        """
        program = self.newer if newer else self.comfyui
        assert program is not None
        paths = [self.root / "tests" / "comfyui", environ.get("PYTHONPATH", ""), self.root]
        return {
            **environ,
            "COURIER_TEST_COMFYUI": str(program),
            "COURIER_TEST_BASE": str(self.base),
            "COURIER_TEST_PACK": str(self.base / "custom_nodes" / PACK_NAME),
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
            "PYTHONIOENCODING": "utf-8",
        }


def boot_id() -> str:
    """Changes with every start of the machine; where nobody tells, the same for one day."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"{platform.node()} {datetime.date.today()}"


def available_bytes() -> int | None:
    """Host memory that a new process could have; None where the system does not tell."""
    try:
        return system_meminfo()["MemAvailable"]
    except HoldError:
        return None


def describe(facts: Mapping[str, Any], root: Path) -> dict[str, str]:
    """What a reader of the results has to know of the machine, in words."""
    found = {
        "device": str(facts.get("device", "none")),
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": str(facts.get("torch", "?")),
    }
    with contextlib.suppress(HoldError):
        found["system"] += f", {system_meminfo()['MemTotal'] / GIB:.0f} GiB of RAM"
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if driver:
        found["driver"] = driver.splitlines()[0]
    link = facts.get("link_bytes_per_second")
    if link:
        found["link"] = f"{link / 1e9:.1f} GB/s, page-locked host memory to the card"
    commit = _output(["git", "-C", str(root), "rev-parse", "--short", "HEAD"])
    if commit:
        changed = _output(["git", "-C", str(root), "status", "--porcelain"])
        found["commit"] = commit + (" with changes" if changed else "")
    return found


def command_text(module: str, arguments: Sequence[str], root: Path) -> str:
    """The command as somebody else would type it in the checkout."""
    text = shlex.join(["python3", "-m", module, *arguments])
    return text.replace(f"{root}{os.sep}", "")


def offer_model(base: Path, model: Path) -> Path:
    """``model`` as ComfyUI finds it: a link among the base directory's own models.

    Its folder is not named to ComfyUI instead: that would be searched through and through, links
    and all, within the time of a load.
    """
    place = base / "models" / "diffusion_models" / model.name
    for link in (os.symlink, os.link):
        with contextlib.suppress(OSError):
            link(model.resolve(), place)
            return place
    return model


def warm(file: Path) -> None:
    """Read the whole file once, so that every row finds what the page cache can hold of it."""
    buffer = bytearray(_WARM_PIECE_BYTES)
    with file.open("rb", buffering=0) as source:
        while source.readinto(buffer):
            pass


def _output(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def default_python() -> str:
    return sys.executable
