"""The checks that need no test run: ruff on everything, mypy on the core."""

from __future__ import annotations

import subprocess

from devtools.console import DevError, say
from devtools.paths import Paths


def lint(paths: Paths) -> int:
    """Run every check, also after one has failed. Returns: 0 if all of them passed."""
    failed = [name for name, command in _checks(paths).items() if not _passes(paths, name, command)]
    if failed:
        say(f"lint: failed: {', '.join(failed)}")
    return 1 if failed else 0


def _checks(paths: Paths) -> dict[str, list[str]]:
    if not (paths.root / "offload_core" / "__init__.py").is_file():
        raise DevError("offload_core is missing, so mypy has nothing to check")
    ruff, mypy = paths.venv_scripts / "ruff", paths.venv_scripts / "mypy"
    return {
        "ruff": [str(ruff), "check", "."],
        "mypy": [str(mypy), "--config-file", "pyproject.toml", "offload_core"],
    }


def _passes(paths: Paths, name: str, command: list[str]) -> bool:
    say(f"== {name}")
    return subprocess.run(command, cwd=paths.root, stdin=subprocess.DEVNULL).returncode == 0
