from __future__ import annotations

import pytest

from bench.rows import Kind, Limits, all_rows, budget_bytes, choose, obstacle

LIMITS = Limits(26.6, 12.0, (4.0, 6.5), 35.0, newer=True)
GIB = 2**30


def test_resident_row_comes_first_on_a_free_card() -> None:
    first, *others = all_rows(LIMITS)
    assert (first.name, first.kind, first.limited_card) == ("resident", Kind.RESIDENT, False)
    assert len({row.name for row in others}) == len(others)


def test_courier_rows_differ_in_the_host_budget_only() -> None:
    rows = choose(all_rows(LIMITS), ["courier-ample", "courier-8gib", "courier-chunks"])
    assert [row.host_gib for row in rows] == [27.6, 8.0, 0.11]
    assert {row.device_gib for row in rows} == {12.0}


def test_newer_rows_need_a_newer_comfyui() -> None:
    without = all_rows(Limits(1, 1, (), 1, newer=False))
    assert not any(row.newer for row in without)
    dynamic = choose(all_rows(LIMITS), ["newer-dynamic"])[0]
    assert dynamic.dynamic
    assert dynamic.newer


def test_patterns_choose_families() -> None:
    names = [row.name for row in choose(all_rows(LIMITS), ["budget-*", "core"])]
    assert names == ["core", "budget-4", "budget-6.5"]
    assert choose(all_rows(LIMITS), []) == all_rows(LIMITS)


def test_unknown_row_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="no row is called cores; there are: resident, courier-"):
        choose(all_rows(LIMITS), ["cores"])


def test_rows_that_need_a_card_say_so() -> None:
    problems = {row.name: obstacle(row, False, 12.0, 99 * GIB, 35.0) for row in all_rows(LIMITS)}
    assert problems["resident"] is None
    assert problems["courier-0"] is None
    assert problems["core"] == problems["budget-4"] == problems["courier-low-host"] == "needs CUDA"


def test_row_with_held_memory_needs_that_memory() -> None:
    row = choose(all_rows(LIMITS), ["core-low-host"])[0]
    assert obstacle(row, True, 12.0, 40 * GIB, 35.0) is None
    assert obstacle(row, True, 12.0, 20 * GIB, 35.0) == (
        "needs 35 GiB of available RAM, and 20.0 GiB is there"
    )


def test_core_offloads_on_a_limited_card_only() -> None:
    row = choose(all_rows(LIMITS), ["core"])[0]
    assert obstacle(row, True, 12.0, None, 35.0) is None
    assert obstacle(row, True, 0.0, None, 35.0) == "needs a limited card (--free-gib)"


def test_budget_is_whole_bytes_or_automatic() -> None:
    assert budget_bytes(0.375) == 402653184
    assert budget_bytes(0.0) == 0
    assert budget_bytes(None) is None
