from __future__ import annotations

import pytest

from bench.overhead import Overhead, many_tensors, report_lines


def test_ratio_is_of_the_medians() -> None:
    overhead = Overhead(
        polled=(2.0, 2.2, 9.0), unpolled=(2.0, 1.0, 4.0), polls=4, poll_seconds=0.02, events=7
    )
    assert overhead.ratio == pytest.approx(1.1)
    text = "\n".join(report_lines(overhead, 0.0123))
    assert "read 4 times (5.0 ms each) and 7 events" in text
    assert "1.100 times" in text
    assert "12.3 ms" in text


def test_module_has_its_tensors_in_blocks() -> None:
    root = many_tensors(3, 4)
    assert len(root.blocks) == 3
    assert sum(1 for _ in root.parameters()) == 12
