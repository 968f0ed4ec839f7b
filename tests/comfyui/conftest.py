"""A real ComfyUI for the tests below: a server with the pack, and fresh processes with its modules.

None of these fixtures skips: a ComfyUI that cannot be had is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from devtools.comfyui_host import ComfyUIHost
from devtools.comfyui_install import ComfyUIProgram, choose_program, ensure_base
from devtools.environment import only_one
from devtools.page import Trouble, chromium, open_page, prepare
from devtools.paths import PACK_NAME, Paths, checkout
from devtools.small_models import write_all

from .commanding import Bench
from .panel_stage import HEIGHT, Stage

SCRIPT_SECONDS = 180.0
LINK_ABOVE_BYTES = 100 * 2**20


@dataclass(frozen=True)
class SmallModels:
    """The small models as the tests' own ComfyUI sees them.

    Attributes:
        base: the base directory of all tests in this session; the pack is linked into it.
        files: path by key, as in ``devtools.small_models``: wan, wan_fp8, sd3, sd15, vae, clip_l,
            wan_lora, wan_lora_b, sd3_lora.
    """

    base: Path
    files: dict[str, Path]

    def __getitem__(self, key: str) -> Path:
        return self.files[key]

    @property
    def models(self) -> Path:
        return self.base / "models"


@pytest.fixture(scope="session")
def courier_checkout() -> Paths:
    return checkout()


@pytest.fixture(scope="session")
def comfyui_program(courier_checkout: Paths) -> ComfyUIProgram:
    """The embedded ComfyUI, or the one in COMFYUI_PATH."""
    return choose_program(courier_checkout)


@pytest.fixture(scope="session")
def comfyui_path(comfyui_program: ComfyUIProgram) -> Path:
    """The folder of ComfyUI's main.py."""
    return comfyui_program.path


@pytest.fixture(scope="session")
def small_models(courier_checkout: Paths) -> Iterator[SmallModels]:
    """Files of the session's own, so that a test may damage, replace or add some."""
    # Several processes may run tests at once; one of them makes the originals.
    with only_one(courier_checkout.state / "models.lock"):
        originals = write_all(courier_checkout.models)
    with tempfile.TemporaryDirectory(prefix="test-base-", dir=courier_checkout.state) as folder:
        base = ensure_base(courier_checkout, Path(folder).resolve())
        files = {}
        for key, original in originals.items():
            files[key] = base / "models" / original.relative_to(courier_checkout.models)
            _copy(original, files[key])
        yield SmallModels(base, files)


def _copy(original: Path, place: Path) -> None:
    """A copy; of the one large file a link, where the system has links."""
    if original.stat().st_size > LINK_ABOVE_BYTES:
        try:
            os.link(original, place)
        except OSError:
            pass
        else:
            return
    shutil.copyfile(original, place)


@pytest.fixture(scope="session")
def server_factory(
    comfyui_program: ComfyUIProgram,
    small_models: SmallModels,
    courier_checkout: Paths,
    worker_id: str,
) -> Iterator[Callable[..., ComfyUIHost]]:
    """Start a ComfyUI of one's own: ``server_factory(environment={...}, extra_args=[...])``.

    It runs when the call returns, and ends with the session at the latest; ``stop()`` ends it
    sooner. Its log is kept under .comfyui/logs.
    """
    started: list[ComfyUIHost] = []

    def start(
        environment: Mapping[str, str] | None = None,
        extra_args: tuple[str, ...] = (),
        base: Path | None = None,
    ) -> ComfyUIHost:
        program = ComfyUIProgram(
            comfyui_program.path,
            comfyui_program.python,
            comfyui_program.frontend,
            (*comfyui_program.extra_args, *extra_args),
        )
        log = courier_checkout.logs / f"test-server-{worker_id}-{len(started)}.log"
        host = ComfyUIHost(program, base or small_models.base, log, environment)
        started.append(host)
        return host.start()

    yield start
    for host in started:
        host.stop()


@pytest.fixture(scope="session")
def server(server_factory: Callable[..., ComfyUIHost]) -> ComfyUIHost:
    """The one ComfyUI that tests share: leave it as you found it."""
    return server_factory()


@pytest.fixture(scope="session")
def bench(server_factory: Callable[..., ComfyUIHost], small_models: SmallModels) -> Bench:
    """Another one, for tests of the command: they cancel, interrupt and clear the queue."""
    # More threads than cores wait for each other.
    return Bench(server_factory({"OMP_NUM_THREADS": "1"}), small_models)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium; that there is none is a failure.

    Of one module alone: while it is there, playwright has an event loop run in this thread, and
    no test could have one of its own.
    """
    with chromium() as made:
        yield made


@pytest.fixture(scope="session")
def run_in_comfyui(
    comfyui_program: ComfyUIProgram, small_models: SmallModels
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script in a fresh process in which ``import bootstrap`` works (see bootstrap.py).

    ``run_in_comfyui(script, *args, environment={}, timeout_seconds=180, check=True)``: ``script``
    is a path or the code itself. Fails the test with all that the script wrote if its exit status
    is not 0; with ``check=False`` that is for the test to look at.
    """

    def run(
        script: Path | str,
        *args: str,
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = SCRIPT_SECONDS,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        what = [str(script)] if isinstance(script, Path) else ["-c", script]
        command = [str(comfyui_program.python), "-X", "faulthandler", *what, *args]
        variables = {**_variables(comfyui_program, small_models), **(environment or {})}
        try:
            done = subprocess.run(
                command,
                cwd=small_models.base,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout_seconds,
            )
        except subprocess.TimeoutExpired as error:
            pytest.fail(
                f"{what[0]} did not end within {timeout_seconds:.0f} s\n"
                f"{_written(error.stdout, error.stderr)}"
            )
        if check and done.returncode:
            pytest.fail(
                f"{what[0]} ended with {done.returncode}\n{_written(done.stdout, done.stderr)}"
            )
        return done

    return run


def _variables(program: ComfyUIProgram, small_models: SmallModels) -> dict[str, str]:
    return {
        "COURIER_TEST_COMFYUI": str(program.path),
        "COURIER_TEST_BASE": str(small_models.base),
        "COURIER_TEST_PACK": str(small_models.base / "custom_nodes" / PACK_NAME),
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTHONIOENCODING": "utf-8",
    }


def _written(stdout: str | bytes | None, stderr: str | bytes | None) -> str:
    texts = [
        text.decode("utf-8", "replace") if isinstance(text, bytes) else text or ""
        for text in (stdout, stderr)
    ]
    return f"--- stdout\n{texts[0][-8000:]}\n--- stderr\n{texts[1][-8000:]}"


@pytest.fixture(scope="session")
def comparisons_of(
    run_in_comfyui: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[..., dict[str, list[str]]]:
    """Run a script that prints ``ok   PART: ...`` and ``FAIL PART: ...``; its lines by part.

    ``comparisons_of(script, timeout_seconds=180)``. What the lines say is each test's to judge.
    """

    def run(script: Path, timeout_seconds: float = SCRIPT_SECONDS) -> dict[str, list[str]]:
        # More threads than cores wait for each other; the sums are the same.
        environment = {"OMP_NUM_THREADS": "1"}
        done = run_in_comfyui(
            script, environment=environment, timeout_seconds=timeout_seconds, check=False
        )
        found: dict[str, list[str]] = defaultdict(list)
        for line in done.stdout.splitlines():
            verdict, _, rest = line.partition(" ")
            if verdict in ("ok", "FAIL"):
                found[rest.strip().partition(":")[0]].append(line)
        if done.returncode not in (0, 1) or not found:
            pytest.fail(f"{script.name} ended with {done.returncode}\n{done.stderr[-6000:]}")
        failed = [line for lines in found.values() for line in lines if line.startswith("FAIL")]
        if any("see stderr" in line for line in failed):
            sys.stderr.write(done.stderr[-12000:])
        return found

    return run


@pytest.fixture(scope="module")
def pages(server: ComfyUIHost, browser: Browser) -> Iterator[Callable[[str], Stage]]:
    """``pages(theme)``: one page for each theme, fresh in what its panel knows."""
    made: dict[str, Stage] = {}
    troubles: list[Trouble] = []

    def get(theme: str) -> Stage:
        if theme not in made:
            prepare(server, **{"Comfy.ColorPalette": theme})
            page, trouble = (
                browser.new_page(viewport={"width": 900, "height": HEIGHT}),
                Trouble(server.address),
            )
            trouble.watch(page)
            troubles.append(trouble)
            made[theme] = Stage(page)
            open_page(page, server.address)
        return made[theme]

    yield get
    for stage in made.values():
        stage.page.close()
    prepare(server, **{"Comfy.ColorPalette": "dark"})
    # That a request failed is what some of the states are about; the browser says so itself.
    lines = [line for trouble in troubles for line in trouble.lines]
    assert [line for line in lines if "Failed to load resource" not in line] == []


@pytest.fixture
def stage(pages: Callable[[str], Stage]) -> Stage:
    return pages("dark")
