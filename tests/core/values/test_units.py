"""Bytes as people read them, and what people may type."""

from __future__ import annotations

import math

import pytest

from offload_core.values import GIB, KIB, MIB, ConfigError, align_down, align_up, gib_to_bytes
from offload_core.values import size_text as text


def test_sizes_are_read_in_the_largest_unit_that_leaves_at_least_one() -> None:
    assert [text(0), text(1023), text(KIB), text(MIB - 1)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1024.00 KiB",
    ]
    assert [text(MIB), text(3 * GIB // 2), text(-2 * GIB)] == ["1.00 MiB", "1.50 GiB", "-2.00 GiB"]


def test_figures_in_gib_become_whole_bytes() -> None:
    assert gib_to_bytes(12, "budget") == 12 * GIB
    assert gib_to_bytes(0.5, "budget") == GIB // 2
    assert gib_to_bytes(0, "budget") == 0


@pytest.mark.parametrize("value", ["2GB", "12", None, True, False, [], b"1"])
def test_anything_but_a_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"budget must be a number of GiB, not .*; write 12 for"):
        gib_to_bytes(value, "budget")


@pytest.mark.parametrize("value", [-1, -0.001, math.nan, math.inf, -math.inf])
def test_negative_and_endless_figures_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"budget must be a finite number of GiB, 0 or more"):
        gib_to_bytes(value, "budget")


def test_alignment_rounds_to_the_nearer_multiple_on_its_side() -> None:
    assert [align_up(n, 256) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]
    assert [align_down(n, 256) for n in (0, 255, 256, 511)] == [0, 0, 256, 256]
