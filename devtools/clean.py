"""Remove what dev.py made. Standard library only."""

from __future__ import annotations

import shutil
from pathlib import Path

from devtools.console import say
from devtools.paths import Paths

CACHES = (".pytest_cache", ".mypy_cache", ".ruff_cache", "build", "comfyui_courier.egg-info")


def clean(paths: Paths, models_only: bool = False) -> int:
    targets = [paths.models]
    if not models_only:
        targets = [paths.venv, paths.state, *(paths.root / name for name in CACHES)]
        targets += _bytecode(paths.root)
    for target in targets:
        if target.is_dir() and not target.is_symlink():
            # A link inside (the pack among the custom nodes) is removed, never followed.
            shutil.rmtree(target)
            say(f"removed {target.relative_to(paths.root)}")
    if not models_only:
        (paths.root / ".venv.lock").unlink(missing_ok=True)
    return 0


def _bytecode(root: Path) -> list[Path]:
    """Folders of compiled files among the sources; hidden folders are not searched."""
    found = []
    for child in root.iterdir():
        if child.name == "__pycache__":
            found.append(child)
        elif child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            found += child.rglob("__pycache__")
    return found
