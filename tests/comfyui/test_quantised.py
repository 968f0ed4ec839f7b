"""Quantised files against the core's own loader: see scripts/quantised.py.

Which formats there are is the ComfyUI under test's to say. One that it does not read is not
applicable, and the skip names that version; that its file is refused is a test of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "quantised.py"
FORMATS = (
    "fp8", "fp8_input_scale", "fp8_full_precision", "fp8_header", "fp8_old", "fp8_e5m2", "mxfp8",
    "int8", "int8_channel", "int8_convrot", "nvfp4", "convrot_w4a4", "asym_w4a8",
)  # fmt: skip
COMPARISONS = 37
"""Of one format: five kinds of patch at three budgets, what streamed, and clean weights after."""
Lines = dict[str, list[str]]


@pytest.fixture(scope="module")
def quantised_lines(comparisons_of: Callable[..., Lines]) -> Lines:
    """Each part's comparisons."""
    return comparisons_of(SCRIPT, timeout_seconds=900)


def passes(lines: Lines, part: str, comparisons: int) -> None:
    found = lines.get(part, [])
    assert [line for line in found if line.startswith("FAIL")] == []
    # A part that compared nothing must not pass for one that found nothing.
    assert len(found) >= comparisons


def said(lines: Lines, part: str) -> list[str]:
    return [line.partition(": ")[2] for line in lines[part]]


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_file_patched_or_not_gives_the_stock_result(
    quantised_lines: Lines, name: str
) -> None:
    if name not in said(quantised_lines, "known"):
        pytest.skip(f"ComfyUI {said(quantised_lines, 'version')[0]} does not read {name}")
    passes(quantised_lines, name, COMPARISONS)


@pytest.mark.parametrize("name", FORMATS)
def test_figures_of_a_quantised_file_are_those_of_its_tensors(
    quantised_lines: Lines, name: str
) -> None:
    version = said(quantised_lines, "version")[0]
    if name not in said(quantised_lines, "known"):
        pytest.skip(f"ComfyUI {version} does not read {name}")
    if name == "fp8_old" and "fp8" not in said(quantised_lines, "known"):
        pytest.skip(f"ComfyUI {version} converts the rest of such a file on loading")
    passes(quantised_lines, f"{name} sizes", 5)


def test_every_comfyui_reads_the_oldest_of_the_formats(quantised_lines: Lines) -> None:
    assert "fp8_old" in said(quantised_lines, "known")


def test_format_that_this_comfyui_does_not_read_is_refused_by_name(quantised_lines: Lines) -> None:
    passes(quantised_lines, "unknown_formats", 5)


def test_saved_model_has_the_tensors_of_the_stock_save(quantised_lines: Lines) -> None:
    known = said(quantised_lines, "known")
    passes(quantised_lines, "saving", 42 if "nvfp4" in known else 12)


def test_merged_model_is_the_stock_one_whichever_of_the_two_is_quantised(
    quantised_lines: Lines,
) -> None:
    passes(quantised_lines, "merging", 8)


def test_patches_are_computed_in_the_dtype_of_this_comfyui(quantised_lines: Lines) -> None:
    # Older ones have no choice, and there is nothing else to compare.
    passes(quantised_lines, "compute_dtype", 17 if "fp8" in said(quantised_lines, "known") else 1)


def test_only_what_lies_on_no_boundary_is_copied(quantised_lines: Lines) -> None:
    passes(quantised_lines, "askew", 6 * (2 if "int8" in said(quantised_lines, "known") else 1))


def test_a_run_that_ends_inside_a_patched_layer_leaves_no_patch(quantised_lines: Lines) -> None:
    passes(quantised_lines, "interrupted", 12)


def test_a_patched_layer_still_multiplies_in_fp8_where_the_device_does(
    quantised_lines: Lines,
) -> None:
    if "fp8" not in said(quantised_lines, "known"):
        pytest.skip(f"ComfyUI {said(quantised_lines, 'version')[0]} does not read fp8")
    passes(quantised_lines, "native_fp8", 7)
