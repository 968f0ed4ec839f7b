"""One workflow on a real server, the core's loader against ours byte for byte; bad files."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from devtools.comfyui_client import PromptError, PromptResult
from devtools.comfyui_host import ComfyUIHost
from devtools.small_models import write_wan
from devtools.small_workflows import (
    BUDGET,
    LOADER,
    SAMPLER,
    Prompt,
    budget_node,
    loaded_with,
    workflow,
)

STATUS = "/courier/v1/status"


def pixels(server: ComfyUIHost, result: PromptResult) -> list[tuple[tuple[int, int], bytes]]:
    """Size and decoded bytes of every picture. Fails if there is none, or if one is blank."""
    found = []
    for entry in result.images():
        with Image.open(io.BytesIO(server.client.image(entry))) as picture:
            picture.load()
            assert picture.convert("RGB").getcolors(1) is None, "a picture of one colour"
            found.append((picture.size, picture.tobytes()))
    assert found, "the workflow made no picture"
    return found


@dataclass(frozen=True)
class Failure:
    """A node that failed, as the history tells it."""

    node_id: str
    kind: str
    text: str


def failure_of(server: ComfyUIHost, prompt: Prompt) -> Failure:
    with pytest.raises(PromptError) as caught:
        server.client.run(prompt)
    server.check_alive()
    messages = dict(map(tuple, caught.value.detail["messages"]))
    error = messages["execution_error"]
    return Failure(
        error["node_id"], error["exception_type"].rpartition(".")[2], error["exception_message"]
    )


class Workflows:
    """Prompts over the small Wan, run on the shared server."""

    def __init__(self, server: ComfyUIHost, small_models: Any) -> None:
        self.server = server
        self.small_models = small_models
        self.file = small_models["wan"].name

    def stock(self, file: str | None = None, **more: Any) -> Any:
        loader = loaded_with("UNETLoader", file or self.file)
        return self.run(workflow(self.small_models, loader, **more))

    def prompt(
        self, budget: dict[str, Any] | None = None, file: str | None = None, **more: Any
    ) -> Prompt:
        link = {} if budget is None else {"budget": [BUDGET, 0]}
        loader = loaded_with(
            "CourierLoadDiffusionModel", self.file if file is None else file, **link
        )
        found = workflow(self.small_models, loader, **more)
        return found if budget is None else {**found, BUDGET: budget}

    def courier(self, budget: dict[str, Any] | None = None, **more: Any) -> Any:
        result = self.server.client.run(self.prompt(budget, **more))
        # Else the pictures would be those of an earlier prompt.
        assert SAMPLER not in result.cached_nodes()
        return pixels(self.server, result)

    def run(self, prompt: Prompt) -> Any:
        return pixels(self.server, self.server.client.run(prompt))

    def status(self, file: str | None = None) -> dict[str, Any]:
        """The status of the youngest model of that file."""
        models = self.server.client.request(STATUS)["models"]
        return [model for model in models if model["file"] == (file or self.file)][-1]


@pytest.fixture(scope="module")
def flows(server: ComfyUIHost, small_models: Any) -> Workflows:
    return Workflows(server, small_models)


@dataclass(frozen=True)
class Plans:
    """Device figures of the small Wan, learned from the pack itself."""

    full: int
    smallest: int
    streaming: int


@pytest.fixture(scope="module")
def plans(flows: Workflows) -> Plans:
    flows.courier()
    full = flows.status()["measured"]["device_bytes"]
    failed = failure_of(flows.server, flows.prompt(budget_node(1, 0)))
    assert failed.kind == "DeviceBudgetError", failed
    found = re.search(r"the smallest that works is .* \((\d+) bytes\)", failed.text)
    assert found is not None, failed.text
    smallest = int(found[1])
    layers = [m["bytes"] for m in flows.status()["layers"] if not m["name"].startswith("(")]
    return Plans(full, smallest, smallest + max(layers) + 2**12)


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_pixels_are_the_stock_loaders_under_every_plan(
    flows: Workflows, plans: Plans, lora: bool
) -> None:
    want = flows.stock(lora=lora)
    budgets = {
        "resident": (plans.full, 0),
        "mapped": (plans.streaming, 0),
        "pinned": (plans.streaming, plans.full * 2),
        "mixed": ((plans.smallest + plans.full) // 2, plans.full // 4),
        "smallest": (plans.smallest, 0),
    }
    counts = {}
    for name, figures in budgets.items():
        assert flows.courier(budget_node(*figures), lora=lora) == want, name
        status = flows.status()
        counts[name] = {p: n for p, n in status["counts"].items() if n}
        assert status["state"] == "loaded"
        assert status["measured"]["device_peak_bytes"] <= figures[0]
    # One more than the blocks: what lies outside them never streams.
    assert counts["resident"].keys() == {"resident"}
    assert counts["mapped"]["mapped"] == counts["resident"]["resident"] - 1
    assert counts["smallest"]["mapped"] == counts["resident"]["resident"] - 1
    assert counts["pinned"]["pinned"] == counts["resident"]["resident"] - 1
    assert len(counts["mixed"]) > 1


def test_lora_shows_in_the_picture(flows: Workflows) -> None:
    assert flows.stock(lora=True) != flows.stock()


def test_budget_that_is_too_small_is_refused_with_the_one_that_works(
    flows: Workflows, plans: Plans
) -> None:
    want = flows.stock()
    for figure in (1, plans.smallest - 1):
        failed = failure_of(flows.server, flows.prompt(budget_node(figure, 0)))
        assert (failed.node_id, failed.kind) == (SAMPLER, "DeviceBudgetError")
        assert "is too small" in failed.text
        assert f"({plans.smallest} bytes)" in failed.text
        assert flows.courier(budget_node(plans.smallest, 0)) == want


def bad_files(small_models: Any) -> dict[str, tuple[bytes, list[str]]]:
    """Content and what the sentence must say, by what is wrong with the file."""
    whole = small_models["wan"].read_bytes()
    size = len(whole)
    header_bytes = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + header_bytes])
    first, second = [name for name in header if name != "__metadata__"][:2]
    begin, end = header[first]["data_offsets"]
    header[second] = {**header[first], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    overlapping = len(text).to_bytes(8, "little") + text + whole[8 + header_bytes :]
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456789\n"
    return {
        "truncated": (
            whole[:-100],
            ["is truncated", f"expected {size} bytes", f"found {size - 100} bytes"],
        ),
        "header-cut": (whole[:1000], ["ends inside its header", "found 1000 bytes"]),
        "padded": (
            whole + b"\0" * 4,
            ["is padded", f"expected {size} bytes", f"found {size + 4} bytes"],
        ),
        "empty": (b"", ["is empty (0 bytes)"]),
        "html": (b"<!DOCTYPE html><html><body>Sign in</body></html>" * 4, ["HTML"]),
        "lfs-pointer": (pointer, ["git-lfs pointer", "git lfs pull"]),
        "overlapping": (overlapping, [repr(second), "overlap"]),
        "absurd-header": (
            (2**62).to_bytes(8, "little") + whole[8:],
            ["claims a header of", str(2**62)],
        ),
        "lora": (small_models["wan_lora"].read_bytes(), ["no diffusion model"]),
        "clip": (small_models["clip_l"].read_bytes(), ["no diffusion model"]),
    }  # fmt: skip


def test_bad_file_fails_in_the_loader_with_a_sentence_and_the_next_prompt_works(
    flows: Workflows, small_models: Any
) -> None:
    want = flows.courier()
    folder = small_models["wan"].parent
    for what, (content, said) in bad_files(small_models).items():
        file = folder / f"bad {what}.safetensors"
        file.write_bytes(content)
        try:
            failed = failure_of(flows.server, flows.prompt(file=file.name))
        finally:
            file.unlink()
        assert failed.node_id == LOADER, (what, failed)
        assert failed.kind == "CheckpointFormatError", (what, failed)
        for part in (file.name, *said):
            assert part in failed.text, (what, failed.text)
        assert all(
            model["file"] != file.name for model in flows.server.client.request(STATUS)["models"]
        )
        assert flows.courier() == want, what


@pytest.fixture
def replaceable(small_models: Any, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A copy of the small Wan that a test may ruin; gone afterwards."""
    file = small_models["wan"].with_name(f"{request.node.name[:60]}.safetensors")
    shutil.copyfile(small_models["wan"], file)
    yield file
    file.unlink(missing_ok=True)


def replaced(file: Path, other: Path) -> None:
    partial = file.with_suffix(".partial")
    shutil.copyfile(other, partial)
    os.replace(partial, file)


def rewritten(file: Path, other: Path) -> None:
    before = file.stat().st_mtime_ns
    with file.open("r+b") as target:
        target.write(other.read_bytes())
    # A coarse clock may give the same time again.
    os.utime(file, ns=(time.time_ns(), before + 1_000_000_000))


@pytest.mark.parametrize("change", [replaced, rewritten])
def test_changed_file_behind_a_cached_loader_is_loaded_anew(
    flows: Workflows, replaceable: Path, tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    other = write_wan(tmp_path / "other.safetensors", seed=9)
    name = replaceable.name
    budget = budget_node(2**22, 0)
    before = flows.courier(budget, file=name)
    again = flows.server.client.run(flows.prompt(budget, file=name, seed=8))
    assert LOADER in again.cached_nodes(), "an unchanged file was loaded again"
    change(replaceable, other)
    result = flows.server.client.run(flows.prompt(budget, file=name))
    assert LOADER not in result.cached_nodes()
    after = pixels(flows.server, result)
    assert after != before
    assert after == flows.stock(file=name)


def test_truncated_file_behind_a_cached_loader_is_refused_and_the_server_lives(
    flows: Workflows, replaceable: Path, small_models: Any
) -> None:
    name = replaceable.name
    size = replaceable.stat().st_size
    want = flows.courier(budget_node(2**22, 0), file=name)
    with replaceable.open("r+b") as target:
        target.truncate(size // 2)
    for _ in range(2):
        failed = failure_of(flows.server, flows.prompt(budget_node(2**22, 0), file=name))
        assert (failed.node_id, failed.kind) == (LOADER, "CheckpointFormatError")
        assert f"expected {size} bytes" in failed.text
        assert f"found {size // 2} bytes" in failed.text
    replaced(replaceable, small_models["wan"])
    assert flows.courier(budget_node(2**22, 0), file=name) == want


def test_deleted_file_is_refused_before_anything_runs_and_works_once_back(
    flows: Workflows, replaceable: Path, small_models: Any
) -> None:
    name = replaceable.name
    want = flows.courier(file=name)
    replaceable.unlink()
    with pytest.raises(PromptError, match="is not a file of models/diffusion_models"):
        flows.server.client.run(flows.prompt(file=name))
    shutil.copyfile(small_models["wan"], replaceable)
    assert flows.courier(file=name) == want


def test_name_of_a_subfolder_works_with_either_systems_separator(
    flows: Workflows, small_models: Any
) -> None:
    folder = small_models["wan"].parent / "模型 x" / "ä b"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tiny model 🐎 (1).safetensors"
    shutil.copyfile(small_models["wan"], file)
    want = flows.stock()
    for name in (f"模型 x/ä b/{file.name}", f"模型 x\\ä b\\{file.name}"):
        assert flows.courier(budget_node(2**22, 0), file=name) == want, name
        assert flows.status(file.name)["file"] == file.name
    shutil.rmtree(folder.parent)


def test_name_that_is_not_offered_is_refused_however_it_is_written(flows: Workflows) -> None:
    outside = "../../models/diffusion_models/" + flows.file
    for name in (
        "..\\..\\x",
        outside,
        "/etc/passwd",
        "C:\\x.safetensors",
        f"./{flows.file}",
        "a\0b",
        "",
    ):
        with pytest.raises(PromptError, match="is not a file of models/diffusion_models"):
            flows.server.client.queue(flows.prompt(file=name))
