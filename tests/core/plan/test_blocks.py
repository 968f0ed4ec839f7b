"""Which modules are layers, in the trees that real models have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload_core.plan import find_block_lists


class Block(nn.Module):
    """A block with an MLP written as a Sequential, and a list of its own below it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        self.heads = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[0](self.mlp(x))


def found(root: nn.Module) -> dict[str, list[str]]:
    return {
        block_list.name: [layer.name for layer in block_list.layers]
        for block_list in find_block_lists(root)
    }


def model(**children: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, child in children.items():
        setattr(root, name, child)
    return root


def test_a_dit_has_one_list_and_its_blocks_are_not_opened(make_dit: Callable[[int], Any]) -> None:
    assert found(make_dit(3)) == {"blocks": ["blocks.0", "blocks.1", "blocks.2"]}
    root = model(blocks=nn.ModuleList([Block(), Block()]))
    assert found(root) == {"blocks": ["blocks.0", "blocks.1"]}


def test_double_and_single_lists_are_both_found_in_order() -> None:
    root = model(
        double_blocks=nn.ModuleList([Block(), Block()]),
        single_blocks=nn.ModuleList([Block()]),
        final=nn.Linear(4, 4),
    )
    assert found(root) == {
        "double_blocks": ["double_blocks.0", "double_blocks.1"],
        "single_blocks": ["single_blocks.0"],
    }


def test_a_unet_is_opened_down_to_the_parts_that_it_calls() -> None:
    root = model(
        input_blocks=nn.ModuleList(
            [nn.Sequential(nn.Conv2d(1, 1, 1)), nn.Sequential(Block(), Block())]
        ),
        middle_block=nn.Sequential(Block(), nn.Identity(), Block()),
        output_blocks=nn.ModuleList([nn.Sequential(Block(), nn.Sequential(nn.Linear(4, 4)))]),
    )
    assert found(root) == {
        "input_blocks": ["input_blocks.0.0", "input_blocks.1.0", "input_blocks.1.1"],
        "middle_block": ["middle_block.0", "middle_block.2"],
        "output_blocks": ["output_blocks.0.0", "output_blocks.0.1.0"],
    }


def test_an_element_that_nobody_can_call_is_opened() -> None:
    level = model(block=nn.ModuleList([Block(), Block()]), upsample=nn.Linear(4, 4))
    assert found(model(up=nn.ModuleList([level]))) == {
        "up": ["up.0.block.0", "up.0.block.1", "up.0.upsample"]
    }


def test_a_wrapped_model_is_found_by_its_full_name() -> None:
    root = model(module=model(blocks=nn.ModuleList([Block()])))
    assert found(root) == {"module.blocks": ["module.blocks.0"]}


def test_a_root_that_is_a_list_has_layers_without_a_prefix() -> None:
    assert found(nn.ModuleList([Block(), Block()])) == {"": ["0", "1"]}


def test_a_dictionary_of_blocks_is_a_list() -> None:
    root = model(stages=nn.ModuleDict({"low": Block(), "high": Block()}))
    assert found(root) == {"stages": ["stages.low", "stages.high"]}


def test_trees_without_repeated_blocks_have_no_layers() -> None:
    bare = nn.Module()
    bare.weight = nn.Parameter(torch.zeros(4))
    for root in (
        nn.Module(),
        bare,
        nn.Sequential(nn.Identity(), nn.Identity()),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        nn.ModuleList(),
        nn.ModuleList([nn.Identity()]),
        model(mlp=nn.Sequential(nn.Linear(4, 4), nn.GELU())),
    ):
        assert found(root) == {}


def test_blocks_without_weights_are_left_out() -> None:
    root = model(blocks=nn.ModuleList([nn.Identity(), Block(), nn.ReLU()]))
    assert found(root) == {"blocks": ["blocks.1"]}


def test_a_block_that_is_listed_twice_is_one_layer() -> None:
    block = Block()
    root = model(first=nn.ModuleList([block, Block(), block]), second=nn.ModuleList([block]))
    assert found(root) == {"first": ["first.0", "first.1"]}


class Bundle(nn.Module):
    """What a model keeps its parts in and never calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Block()
        self.mlp = nn.Linear(4, 4)
        self.modulation = nn.Parameter(torch.zeros(4))


def test_elements_without_a_forward_are_opened() -> None:
    root = model(blocks=nn.ModuleList([Bundle(), Block(), nn.ParameterList([torch.zeros(2)])]))
    assert found(root) == {"blocks": ["blocks.0.attention", "blocks.0.mlp", "blocks.1"]}
    # One that was given a forward of its own can be called, and is a layer.
    given = Bundle()
    given.forward = lambda x: x
    assert found(model(blocks=nn.ModuleList([given]))) == {"blocks": ["blocks.0"]}
