from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.records import PeakRecord, Report
from bench.tables import budget_table, markdown, memory_table, short_table, step_table, table

MakeRow = Callable[..., Any]
GIB = 2**30


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_row_of_the_step_table(make_row: MakeRow) -> None:
    courier = make_row(
        "courier",
        0.75,
        streamed_bytes=21 * 10**9,
        link_bytes_per_second=42e9,
        placements={"resident": 10, "pinned": 30, "mapped": 0},
        equal={"1x2x3": True},
        again_seconds=1.5,
    )
    head, _, _, line = step_table([make_row("resident", 0.5), courier], "1x2x3")
    found = dict(zip(cells(head), cells(line), strict=True))
    assert found == {
        "row": "courier",
        "equal": "yes",
        "load s": "0.25",
        "first step s": "2.00",
        "both again s": "1.50",
        "s/step": "0.7500",
        "vs resident": "1.50",
        "s/step, run 1": "0.7500",
        "GiB streamed/step": "19.56",
        "link floor s": "0.5000",
        "step / floor": "1.50",
        "layers": "10 resident, 30 pinned",
    }


def test_row_without_figures_stays_in_the_table(make_row: MakeRow) -> None:
    missing = make_row("core", contender=None, problem="needs CUDA")
    broken = make_row("core", contender=None, problem="KeyError: 3", detail=("a trace",))
    _, _, first, second = step_table([missing, broken], "1x2x3")
    assert cells(first)[:2] == ["core", "needs CUDA"]
    assert cells(second)[:2] == ["core", "failed"]


def test_unequal_latents_are_loud(make_row: MakeRow) -> None:
    line = step_table([make_row("core", equal={"1x2x3": False})], "1x2x3")[2]
    assert cells(line)[1] == "NO"


def test_memory_table_has_the_highest_of_all_runs(make_row: MakeRow) -> None:
    peak = PeakRecord(device_bytes=12 * GIB, anon_bytes=2 * GIB)
    line = memory_table([make_row("courier", placements={"pinned": 1}, peak=peak)], "1x2x3")[2]
    assert cells(line) == ["courier", "12.00", "-", "-", "1.00", "2.00", "2.00", "0.25", "0.00"]


def test_budget_table_compares_with_the_driver(make_row: MakeRow) -> None:
    peak = PeakRecord(device_bytes=int(4.25 * GIB))
    row = make_row(
        "budget-4", peak=peak, placements={"pinned": 1}, device_budget_bytes=4 * GIB, label="four"
    )
    line = budget_table([row, make_row("courier")], ["1x2x3"])[2]
    assert cells(line) == ["four, 1x2x3", "4.00", "4.25", "+0.25", "1.50", "0.5000"]
    assert budget_table([make_row("courier")], ["1x2x3"]) == []


def test_short_table_is_aligned(make_row: MakeRow) -> None:
    missing = make_row("core", contender=None, problem="needs CUDA")
    head, first, second = short_table([make_row("resident"), missing], "1x2x3")
    assert first.index("0.25") == head.index("load s") == second.index("needs CUDA")


def test_page_names_machine_command_and_problems(make_row: MakeRow) -> None:
    broken = make_row("core", contender=None, problem="KeyError: 3", detail=("a `trace`",))
    machine = {"device": "A card", "driver": "1.2"}
    report = Report(
        "2026-01-02", machine, "26 GiB", ("python3 -m x",), (make_row("resident"), broken)
    )
    text = markdown(report)
    assert text.startswith("# 2026-01-02, A card\n")
    for part in ("- driver: 1.2", "- model: 26 GiB", "python3 -m x", "## Latent 1x2x3"):
        assert part in text
    assert "- core: KeyError: 3\n  `a 'trace'`" in text


def test_bar_in_a_cell_does_not_end_it() -> None:
    assert table(["a"], [["b|c"]])[2] == "| b\\|c |"
