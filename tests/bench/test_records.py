from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bench.records import PeakRecord, Report, report_from, steady, to_json
from bench.sampling import Sampled


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([9.0], 9.0),
        ([9.0, 1.0], 1.0),
        ([9.0, 1.0, 2.0, 9.0], 2.0),
        ([9.0, 5.0, 5.0, 1.0, 2.0, 9.0], 2.0),
    ],
)
def test_steady_step_leaves_the_first_ones_out(seconds: list[float], expected: float) -> None:
    assert steady(seconds) == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([], None), ([5], None), ([5, 9], 4), ([0, 0, 10, 30, 50], 20), ([100, 200, 300], 100)],
)
def test_bytes_of_a_step_are_those_of_the_steady_ones(
    counts: list[int], expected: int | None
) -> None:
    sampled = Sampled(None, [], 0.0, counts)  # type: ignore[arg-type]
    assert sampled.count_per_step() == expected


def test_report_survives_its_json(make_row: Callable[..., Any]) -> None:
    rows = (
        make_row("resident"),
        make_row("courier", placements={"pinned": 3}, peak=PeakRecord(device_bytes=5)),
        make_row("core", contender=None, problem="failed", detail=("a", "b")),
    )
    report = Report("2026-01-02", {"device": "card"}, "model", ("command",), rows)
    text = json.dumps(to_json(report))
    assert json.dumps(to_json(report_from(json.loads(text)))) == text


def test_fields_of_another_suite_are_passed_over(make_row: Callable[..., Any]) -> None:
    data = to_json(Report("2026-01-02", {}, "model", (), (make_row("resident"),)))
    data["weather"] = data["rows"][0]["weather"] = "fine"
    assert report_from(data).rows[0].name == "resident"
