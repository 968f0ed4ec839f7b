"""comfy-cli in an environment of its own, and workflows that others wrote. Made at need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from devtools.comfyui_install import download, unpack
from devtools.console import DevError, Progress
from devtools.environment import lock_lines, only_one, run_pip
from devtools.paths import Paths

TEMPLATES_WHEEL = "comfyui-workflow-templates-json==0.1.123"
TEMPLATES_PREFIX = "comfyui_workflow_templates_json/templates/"
LOCK_NAME = "comfy_cli.lock"
_STAMP_NAME = "courier-stamp"


def ensure_templates(paths: Paths) -> Path:
    """The folder with ComfyUI's own workflow templates, as their wheel has them."""
    folder = paths.state / TEMPLATES_WHEEL.replace("==", "-")
    with only_one(paths.root / ".venv.lock"):
        if not folder.is_dir():
            unpack(download(paths, TEMPLATES_WHEEL), TEMPLATES_PREFIX, folder)
    return folder


def ensure_comfy_cli(paths: Paths) -> Path:
    """The interpreter that has comfy-cli; ``comfy`` lies beside it."""
    folder = paths.state / "comfy-cli"
    python = folder / paths.venv_python.relative_to(paths.venv)
    lock = paths.lock.with_name(LOCK_NAME)
    stamp = folder / _STAMP_NAME
    wanted = f"{sys.version_info[:2]}\n{lock.read_text(encoding='utf-8')}"
    with only_one(paths.root / ".venv.lock"):
        # A half-made one has no stamp.
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
            _make(folder, python, lock)
            stamp.write_text(wanted, encoding="utf-8")
    return python


def _make(folder: Path, python: Path, lock: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with Progress("Installing comfy-cli", len(lock_lines(lock))) as progress:
        command = [sys.executable, "-m", "venv", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise DevError(f"python -m venv failed: {(done.stdout + done.stderr).strip()}")
        pip = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar=off"]
        run_pip([*pip, "--no-deps", "--requirement", str(lock)], progress)


def comfy_cli_environment(paths: Paths, home: Path) -> dict[str, str]:
    """For its command: ComfyUI's environment is ours, settings are in ``home``, and nothing is told
    to anybody."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    scripts = ensure_comfy_cli(paths).parent
    return {
        **kept,
        # It calls itself by its name.
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "VIRTUAL_ENV": str(paths.venv),
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / "config"),
        "DO_NOT_TRACK": "1",
    }
