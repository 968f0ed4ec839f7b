"""Plans of a file without ComfyUI: the engine's own layers, by names alone; and its own plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ..conftest import Headless

MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"q": nn.Linear(width, width), "k": nn.Linear(width, width)})
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.norm(values) * self.scale


class Dit(nn.Module):
    """As DiTs are: a list of blocks, and small Sequentials outside of it."""

    def __init__(self, blocks: int = 12, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)


class Unet(nn.Module):
    """As UNets are: Sequentials inside of lists, and one that is a list itself."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()

        def step() -> nn.Module:
            return nn.Sequential(Block(width), nn.Sequential(Block(width), nn.Linear(width, width)))

        self.time_embed = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.input_blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 3)), step(), step()])
        self.middle_block = nn.Sequential(Block(width), Block(width))
        self.output_blocks = nn.ModuleList([step()])


@pytest.fixture
def dry(headless: Headless) -> Any:
    return headless.module("plan.dry_run")


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    def write(model: nn.Module, prefix: str = "", **more: torch.Tensor) -> str:
        path = tmp_path / "模型 x.safetensors"
        tensors = {f"{prefix}{name}": p.detach() for name, p in model.named_parameters()}
        save_file({**tensors, **more}, path)
        return str(path)

    return write


@pytest.mark.parametrize(
    "model", [Dit(), Unet(), nn.Linear(3, 3), nn.Sequential(Block(8), Block(8))]
)
def test_layers_by_names_are_those_that_the_engine_finds(
    headless: Headless, model: nn.Module
) -> None:
    names = headless.module("plan.names")
    blocks = __import__("_comfyui_courier_files.offload_core.plan", fromlist=["x"])
    found = [layer.name for block in blocks.find_block_lists(model) for layer in block.layers]
    layers = names.layers_of([name for name, _ in model.named_parameters()])
    layers.pop(names.BASE, None)
    # A Sequential of a bare Conv2d inside of a list is one to the engine too.
    assert sorted(layers) == sorted(found) or isinstance(model, nn.Sequential)


def test_blocks_are_in_the_order_of_their_numbers(headless: Headless) -> None:
    layers = headless.module("plan.names").layers_of(
        [f"blocks.{i}.a.weight" for i in (10, 2, 0, 1)] + ["x.weight"]
    )
    assert list(layers) == ["blocks.0", "blocks.1", "blocks.2", "blocks.10", "(outside the blocks)"]


def test_only_the_diffusion_model_of_a_checkpoint_is_planned(
    headless: Headless, dry: Any, save: Callable[..., str]
) -> None:
    alone = dry.dry_run(dry.DryRun(save(Dit()), vram_gib=3, host_gib=0))
    vae = {"first_stage_model.decoder.0.conv.weight": torch.zeros(1000, 1000)}
    whole = dry.dry_run(dry.DryRun(save(Dit(), "model.diffusion_model.", **vae), None, 3, 0))
    assert [layer["name"] for layer in whole["layers"]] == [f"blocks.{i}" for i in range(12)]
    assert whole["bytes"] == alone["bytes"]


def test_the_plan_fills_the_budgets_and_the_floor_is_what_streams(
    dry: Any, save: Callable[..., str]
) -> None:
    file = save(Dit())
    everything = dry.dry_run(dry.DryRun(file, vram_gib=1, host_gib=0, activation_gib=0))
    assert everything["counts"]["resident"] == 12
    assert everything["step"]["floor_seconds"] == 0
    size = everything["bytes"]
    asked = dry.DryRun(file, vram_gib=3 * MIB / 2**30, host_gib=0, activation_gib=0,
                       link_gb_per_second=2)  # fmt: skip
    plan = dry.dry_run(asked)
    assert plan["fits"] is True
    planned = plan["planned"]
    assert planned["device_bytes"] <= 3 * MIB
    streamed = sum(layer["streamed_bytes"] for layer in plan["layers"])
    assert planned["streamed_bytes"] == planned["mapped_bytes"] == streamed > 0
    resident = sum(layer["resident_bytes"] for layer in plan["layers"]) + planned["base_bytes"]
    assert abs(resident + streamed - size) < 12 * 4096
    assert plan["step"]["floor_seconds"] == pytest.approx(streamed / 2e9)
    assert plan["assumed"]["link"] == "given"
    pinned = dry.dry_run(dry.DryRun(file, None, 3 * MIB / 2**30, 1, 0))
    assert pinned["planned"]["pinned_bytes"] > 0.9 * pinned["planned"]["streamed_bytes"]


def test_a_budget_that_is_too_small_names_the_smallest(dry: Any, save: Callable[..., str]) -> None:
    file = save(Dit())
    plan = dry.dry_run(dry.DryRun(file, vram_gib=0.0001, host_gib=0, activation_gib=0))
    assert plan["fits"] is False
    assert "is too small" in plan["message"]
    smallest = plan["smallest"]["device_bytes"]
    assert str(smallest) in plan["message"]
    works = dry.DryRun(file, vram_gib=smallest / 2**30, host_gib=0, activation_gib=0)
    assert dry.dry_run(works)["fits"] is True


def test_a_named_card_is_less_than_its_name(dry: Any, save: Callable[..., str]) -> None:
    plan = dry.dry_run(dry.DryRun(save(Dit()), card_gib=12, host_gib=0))
    assert plan["asked"]["device_bytes"] == int(11.25 * 2**30)
    assert "of which 0.75 GiB are not ours" in plan["assumed"]["device"]
    assert "assumed" in plan["assumed"]["link"]
    assert "assumed" in plan["assumed"]["activations"]
    small = dry.dry_run(dry.DryRun(save(Dit()), card_gib=0.76, host_gib=0, activation_gib=1.5))
    assert small["assumed"]["activations"] == "given"
    size = float(small["message"].rpartition("a card has that from ")[2].removesuffix(" GiB on"))
    asked = dry.DryRun(save(Dit()), card_gib=size, host_gib=0, activation_gib=1.5)
    assert dry.dry_run(asked)["fits"] is True
    asked = dry.DryRun(save(Dit()), card_gib=size - 0.002, host_gib=0, activation_gib=1.5)
    assert dry.dry_run(asked)["fits"] is False


def test_shards_are_one_model(dry: Any, save: Callable[..., str], tmp_path: Path) -> None:
    whole = dry.dry_run(dry.DryRun(save(Dit()), vram_gib=3, host_gib=0))
    tensors = {name: p.detach() for name, p in Dit().named_parameters()}
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = tmp_path / f"wan-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, file)
    parts = dry.dry_run(dry.DryRun(str(tmp_path / "wan-00001-of-00002.safetensors"), None, 3, 0))
    assert (parts["bytes"], parts["counts"]) == (whole["bytes"], whole["counts"])


def test_what_cannot_be_planned_is_one_sentence(
    dry: Any, headless: Headless, tmp_path: Path, save: Callable[..., str]
) -> None:
    page = tmp_path / "page.safetensors"
    page.write_bytes(b"<!DOCTYPE html>" * 9)
    file = save(Dit())
    courier = headless.courier
    cases: list[tuple[Any, type[Exception], str]] = [
        (dry.DryRun(str(page), vram_gib=1), courier.WorkflowFileError, "HTML"),
        (
            dry.DryRun(str(tmp_path / "no.safetensors"), vram_gib=1),
            courier.WorkflowFileError,
            "no.s",
        ),
        (dry.DryRun(file, vram_gib=-1), courier.UsageError, "--vram"),
        (dry.DryRun(file, vram_gib=1, link_gb_per_second=0), courier.UsageError, "--link"),
    ]
    if not torch.cuda.is_available():
        cases += [
            (dry.DryRun(file), courier.UsageError, "there is no card here"),
            (dry.DryRun(file, vram_gib=1, measure_link=True), courier.UsageError, "needs a card"),
        ]
    for asked, kind, words in cases:
        with pytest.raises(kind, match=words):
            dry.dry_run(asked)
