from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.comparing import Baselines, highest, link_floor, merge, with_equality
from bench.records import Report

MakeRow = Callable[..., Any]


def report(*rows: Any, command: str = "now") -> Report:
    return Report("2026-01-02", {}, "model", (command,), rows)


def test_ratio_is_to_the_resident_row_of_the_same_boot(make_row: MakeRow) -> None:
    baselines = Baselines.of([make_row("resident", 0.5), make_row("resident", 9.0, "other boot")])
    row = make_row("core", 0.75)
    assert baselines.ratio(row, row.contender.runs[0]) == pytest.approx(1.5)


def test_there_is_no_ratio_across_boots_or_latents(make_row: MakeRow) -> None:
    baselines = Baselines.of([make_row("resident", boot_id="other boot")])
    row = make_row("core")
    assert baselines.ratio(row, row.contender.runs[0]) is None
    baselines = Baselines.of([make_row("resident", latent="9x9x9")])
    assert baselines.ratio(row, row.contender.runs[0]) is None


def test_merged_rows_have_the_order_of_the_table(make_row: MakeRow) -> None:
    merged = merge(
        [report(make_row("core"), make_row("other"), command="earlier")],
        report(make_row("resident")),
        ["resident", "core"],
    )
    assert [row.name for row in merged.rows] == ["resident", "core", "other"]
    assert merged.commands == ("earlier", "now")


def test_later_row_takes_the_place_of_an_earlier_one(make_row: MakeRow) -> None:
    merged = merge([report(make_row("core", 0.5))], report(make_row("core", 0.7)), [])
    assert [row.contender.runs[0].steady_seconds for row in merged.rows] == [0.7]


def test_row_without_figures_takes_nobodys_place(make_row: MakeRow) -> None:
    failed = make_row("core", contender=None, problem="failed")
    merged = merge([report(make_row("core"))], report(failed), [])
    assert merged.rows[0].problem is None
    merged = merge([report(failed)], report(make_row("core")), [])
    assert merged.rows[0].problem is None


def test_equality_across_calls_goes_by_the_hash(make_row: MakeRow) -> None:
    earlier = report(make_row("resident", sha256="a"))
    rows = (make_row("core", sha256="a"), make_row("courier", sha256="b"))
    merged = merge([earlier], report(*rows), ["resident"])
    assert [row.equal for row in merged.rows[1:]] == [{"1x2x3": True}, {"1x2x3": False}]


def test_equality_is_not_said_across_boots(make_row: MakeRow) -> None:
    row = make_row("core", boot_id="other boot")
    assert with_equality(row, make_row("resident")).equal == {}


def test_equality_is_not_said_of_runs_with_other_numbers_of_steps(make_row: MakeRow) -> None:
    resident, row = make_row("resident", sha256="a"), make_row("core", sha256="b")
    longer = [replace(run, step_seconds=(*run.step_seconds, 0.5)) for run in row.contender.runs]
    other = replace(row, contender=replace(row.contender, runs=longer))
    assert with_equality(row, resident).equal == {"1x2x3": False}
    assert with_equality(other, resident).equal == {}


def test_equality_that_is_known_stays(make_row: MakeRow) -> None:
    row = make_row("core", sha256="b", equal={"1x2x3": True})
    assert with_equality(row, make_row("resident", sha256="a")).equal == {"1x2x3": True}


def test_link_floor_is_bytes_over_rate(make_row: MakeRow) -> None:
    row = make_row("courier", streamed_bytes=55, link_bytes_per_second=110.0)
    assert link_floor(row, row.contender.runs[0]) == 0.5
    row = make_row("courier", streamed_bytes=0, link_bytes_per_second=110.0)
    assert link_floor(row, row.contender.runs[0]) is None


def test_highest_knows_only_what_is_known() -> None:
    assert highest([None, 3, 2]) == 3
    assert highest([None]) is None
