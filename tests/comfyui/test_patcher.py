"""What the core asks of a model, asked of ours in one process: see scripts/patcher.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "patcher.py"
Lines = dict[str, list[str]]


@pytest.fixture(scope="module")
def patcher_lines(comparisons_of: Callable[..., Lines]) -> Lines:
    """Each part's comparisons."""
    return comparisons_of(SCRIPT, timeout_seconds=500)


def passes(lines: Lines, part: str, comparisons: int) -> None:
    found = lines.get(part, [])
    assert [line for line in found if line.startswith("FAIL")] == []
    # A part that compared nothing must not pass for one that found nothing.
    assert len(found) >= comparisons


def test_no_attribute_of_the_core_or_of_torch_is_replaced(patcher_lines: Lines) -> None:
    passes(patcher_lines, "core", 4)


def test_forced_dtype_gives_the_stock_result_and_is_charged(patcher_lines: Lines) -> None:
    passes(patcher_lines, "dtypes", 47)


def test_file_of_several_dtypes_gives_the_stock_result(patcher_lines: Lines) -> None:
    passes(patcher_lines, "mixed_file", 10)


def test_scaled_fp8_is_patched_in_real_weights(patcher_lines: Lines) -> None:
    passes(patcher_lines, "scaled_fp8", 8)


def test_stacked_and_switched_loras_are_exact_and_reload_nothing(patcher_lines: Lines) -> None:
    passes(patcher_lines, "loras", 17)


def test_patches_of_every_kind_are_merged_on_arrival_with_the_cores_own_bits(
    patcher_lines: Lines,
) -> None:
    passes(patcher_lines, "arrivals", 95)


def test_saved_model_has_the_stock_tensors_with_the_lora_merged(patcher_lines: Lines) -> None:
    passes(patcher_lines, "saving", 37)


def test_merged_weights_leave_with_their_layer(patcher_lines: Lines) -> None:
    passes(patcher_lines, "merged_then_unloaded", 4)


def test_run_after_every_way_of_unloading_is_exact(patcher_lines: Lines) -> None:
    passes(patcher_lines, "unloading", 55)


def test_cancel_in_any_block_surfaces_and_the_next_run_is_exact(patcher_lines: Lines) -> None:
    passes(patcher_lines, "interrupts", 75)


def test_clones_share_weights_and_no_patch(patcher_lines: Lines) -> None:
    passes(patcher_lines, "clones", 25)


def test_size_queries_and_partial_unloads_are_true(patcher_lines: Lines) -> None:
    passes(patcher_lines, "sizes", 49)


def test_offer_of_the_core_bounds_what_is_taken(patcher_lines: Lines) -> None:
    passes(patcher_lines, "offers", 11)


def test_what_is_free_on_a_card_counts_instead_of_the_offer(patcher_lines: Lines) -> None:
    passes(patcher_lines, "rooms", 12)


def test_a_ram_budget_beyond_the_machine_is_said_and_not_taken(patcher_lines: Lines) -> None:
    passes(patcher_lines, "large_host_budgets", 16)


def test_dropped_model_is_freed_without_a_garbage_collection(patcher_lines: Lines) -> None:
    passes(patcher_lines, "leaks", 14)


def test_twenty_rounds_of_loading_grow_nothing(patcher_lines: Lines) -> None:
    passes(patcher_lines, "rounds", 5)


def test_models_in_turns_do_not_disturb_each_other(patcher_lines: Lines) -> None:
    passes(patcher_lines, "two_models", 22)


def test_guidance_and_batches_are_exact(patcher_lines: Lines) -> None:
    passes(patcher_lines, "guidance", 19)


def test_sampling_object_dtype_and_wrapper_patches_are_exact(patcher_lines: Lines) -> None:
    passes(patcher_lines, "model_nodes", 49)


def test_merged_models_are_exact_and_hold_no_device_memory(patcher_lines: Lines) -> None:
    passes(patcher_lines, "merging", 14)


def test_file_changed_before_the_sampler_is_refused(patcher_lines: Lines) -> None:
    passes(patcher_lines, "changed_files", 25)


def test_file_replaced_during_a_run_leaves_the_run_exact(patcher_lines: Lines) -> None:
    passes(patcher_lines, "while_running", 7)


def test_nodes_work_without_a_server(patcher_lines: Lines) -> None:
    passes(patcher_lines, "headless", 8)
