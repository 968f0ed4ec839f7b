"""Time and memory of a 1.1 GB model in a real ComfyUI: the stock loader against courier's budgets.

Each contender has a ComfyUI process of its own. On a CPU there is no device to copy to: what
counts there is the process's memory, and that streaming costs little time.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtools.comfyui_host import ComfyUIHost
from devtools.commands import Prepared
from devtools.console import Progress, mib, say
from devtools.demo import WORKFLOW, read_workflow
from devtools.paths import Paths

BIG_FILE = "courier_wan_big_bf16.safetensors"
SAMPLE_SECONDS = 0.05


@dataclass(frozen=True)
class Contender:
    """One way to load the model. ``budget`` is (device GiB, host GiB); None is the stock loader."""

    name: str
    budget: tuple[float, float] | None


CONTENDERS = (
    Contender("stock UNETLoader", None),
    Contender("courier, 2 GiB device", (2.0, 1.0)),
    Contender("courier, 0.6 GiB device, 0.3 GiB host", (0.6, 0.3)),
)


@dataclass(frozen=True)
class Measured:
    first_seconds: float
    second_seconds: float
    peak_rss_bytes: int
    peak_anonymous_bytes: int


class MemoryWatch:
    """Follows one process's memory from a thread of its own, between enter and exit."""

    def __init__(self, pid: int) -> None:
        self.peak_rss_bytes = 0
        self.peak_anonymous_bytes = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-memory")

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil

        process = psutil.Process(self._pid)
        while not self._ended.wait(SAMPLE_SECONDS):
            try:
                memory = process.memory_info()
            except psutil.NoSuchProcess:
                return  # the run itself reports that
            self.peak_rss_bytes = max(self.peak_rss_bytes, memory.rss)
            anonymous = memory.rss - getattr(memory, "shared", 0)
            self.peak_anonymous_bytes = max(self.peak_anonymous_bytes, anonymous)


def run_bench(paths: Paths, prepared: Prepared, steps: int) -> int:
    ensure_big_model(prepared.base / "models")
    prompt = read_workflow(paths.root / WORKFLOW)
    rows = []
    for contender in CONTENDERS:
        with Progress(f"Measuring {contender.name}") as progress:
            rows.append((contender, _measure(paths, prepared, prompt, contender, steps, progress)))
    say(f"\n{'':40} {'first run':>10} {'second run':>10} {'peak RSS':>12} {'of it anonymous':>16}")
    for contender, measured in rows:
        say(
            f"{contender.name:40} {measured.first_seconds:8.1f} s {measured.second_seconds:8.1f} s "
            f"{mib(measured.peak_rss_bytes):>12} {mib(measured.peak_anonymous_bytes):>16}"
        )
    return 0


def ensure_big_model(models: Path) -> Path:
    from devtools.small_models import write_wan_big

    path = models / "diffusion_models" / BIG_FILE
    if not path.is_file():
        with Progress("Writing a 1.1 GB model"):
            write_wan_big(path)
    return path


def workflow_for(prompt: dict[str, Any], contender: Contender, steps: int) -> dict[str, Any]:
    """The shipped workflow with the big model, and with the contender's loader."""
    prompt = copy.deepcopy(prompt)
    by_class = {node["class_type"]: node for node in prompt.values()}
    by_class["KSampler"]["inputs"]["steps"] = steps
    loader = by_class["CourierLoadDiffusionModel"]
    loader["inputs"]["unet_name"] = BIG_FILE
    if contender.budget is None:
        loader["class_type"] = "UNETLoader"
        loader["inputs"].pop("budget")
    else:
        vram_gib, host_gib = contender.budget
        by_class["CourierBudget"]["inputs"].update(vram_gib=vram_gib, host_gib=host_gib)
    return prompt


def _measure(
    paths: Paths,
    prepared: Prepared,
    prompt: dict[str, Any],
    contender: Contender,
    steps: int,
    progress: Progress,
) -> Measured:
    prompt = workflow_for(prompt, contender, steps)
    with ComfyUIHost(prepared.program, prepared.base, paths.logs / "bench.log") as host:
        assert host.pid is not None
        with MemoryWatch(host.pid) as watch:
            seconds = []
            for seed in (1, 2):
                sampler = next(n for n in prompt.values() if n["class_type"] == "KSampler")
                sampler["inputs"]["seed"] = seed
                queued = host.client.queue(prompt)
                result = host.client.follow(queued, 600.0, on_poll=progress.show)
                seconds.append(result.seconds)
    return Measured(*seconds, watch.peak_rss_bytes, watch.peak_anonymous_bytes)
