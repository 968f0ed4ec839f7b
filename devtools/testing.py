"""Everything that CI runs: the checks, the panel's unit tests under Node, then pytest."""

from __future__ import annotations

import os
import shutil
import subprocess

from devtools.browser import ensure_chromium, ensure_servers
from devtools.console import DevError, say
from devtools.lint import lint
from devtools.paths import Paths
from devtools.prepared import Prepared

NODE_MINIMUM = 18
MOST_WORKERS = 4
WORKER_BYTES = 5 << 30
"""What one takes: each has several ComfyUIs and a browser of its own."""


def run_tests(paths: Paths, prepared: Prepared, pytest_arguments: list[str]) -> int:
    """Run all, also after one has failed. pytest goes last, so that its line closes the output."""
    chromium = ensure_chromium()
    ensure_servers()
    say(f"ComfyUI {prepared.program.path}, browser {chromium}")
    failures = {"lint": lint(paths) != 0, "node": not _node_tests_pass(paths)}
    failed = [name for name, has_failed in failures.items() if has_failed]
    if failed:
        say(f"!! failed: {', '.join(failed)} (see above); the exit status will be 1")
    say("== pytest")
    # The entry and not "python -m pytest": that would put the repository root on sys.path.
    command = [str(paths.venv_scripts / "pytest"), *(pytest_arguments or _all_at_once())]
    done = subprocess.run(
        command,
        cwd=paths.root,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "CHROMIUM_PATH": chromium},
    )
    return done.returncode or int(bool(failed))


def _all_at_once() -> list[str]:
    """Every test, in several processes, a file in one; who asks for some wants them in order.

    In the order of the folders, where tests with a real ComfyUI come early: the files with the
    fewest tests, which xdist would put last, are those that take longest. One process where there
    is a card, which tests measure.
    """
    if shutil.which("nvidia-smi") is not None:
        return []
    workers = str(_worker_count())
    return ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]


def _worker_count() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    most = min(MOST_WORKERS, len(affinity(0)) if affinity is not None else os.cpu_count() or 1)
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = min(most, memory // WORKER_BYTES)
    return max(1, most)


def _node_tests_pass(paths: Paths) -> bool:
    files = sorted(str(path) for path in (paths.root / "tests" / "panel").glob("*.test.js"))
    if not files:
        return True
    node = shutil.which("node")
    if node is None:
        raise DevError(f"the panel's unit tests need Node {NODE_MINIMUM} or newer, as node")
    say("== node --test")
    command = [node, "--test", *files]
    return subprocess.run(command, cwd=paths.root, stdin=subprocess.DEVNULL).returncode == 0
