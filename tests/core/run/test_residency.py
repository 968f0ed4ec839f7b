"""Buffers on the way to the device: moved once each, values and sharing kept."""

from __future__ import annotations

import torch
from torch import nn

from offload_core.run.residency import move_buffers


def test_a_buffer_that_two_modules_hold_stays_one_tensor() -> None:
    table = torch.zeros(4)
    one, other = nn.Module(), nn.Module()
    root = nn.ModuleList([one, other])
    for module in root:
        module.register_buffer("rope", table)
        module.register_buffer("nothing", None)
    # The meta device is the one other device that every machine has.
    move_buffers(root, torch.device("meta"))
    assert one.rope.device.type == "meta"
    assert one.rope is other.rope


def test_a_buffer_that_is_there_already_is_left_alone() -> None:
    module = nn.Module()
    module.register_buffer("rope", torch.zeros(4))
    before = module.rope
    move_buffers(module, torch.device("cpu"))
    assert module.rope is before
