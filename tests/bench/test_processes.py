from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.processes import ChildError, LineProcess


def child(code: str, folder: Path) -> LineProcess:
    return LineProcess([sys.executable, "-c", code], os.environ, folder, folder / "child.log")


def test_lines_go_both_ways(tmp_path: Path) -> None:
    with child("print(input()[::-1], flush=True); input()", tmp_path) as process:
        process.say("abc")
        assert process.hear(30) == "cba"


def test_end_of_a_child_is_an_error_with_what_it_wrote(tmp_path: Path) -> None:
    code = "import sys; print('no such luck', file=sys.stderr); sys.exit(3)"
    with child(code, tmp_path) as process, pytest.raises(ChildError, match="status 3") as error:
        process.hear(30)
    assert error.value.tail == ("no such luck",)


def test_silent_child_is_an_error_in_time(tmp_path: Path) -> None:
    with (
        child("input()", tmp_path) as process,
        pytest.raises(ChildError, match="no answer within 0 s"),
    ):
        process.hear(0.01)


def test_child_that_hangs_is_killed_when_something_failed(tmp_path: Path) -> None:
    code = "import time; print('up', flush=True); time.sleep(600)"

    def fail() -> None:
        with child(code, tmp_path) as process:
            process.hear(30)
            raise ChildError("enough")

    with pytest.raises(ChildError, match="enough"):
        fail()


def test_saying_something_to_a_child_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with child("pass", tmp_path) as process:
        with pytest.raises(ChildError):
            process.hear(30)
        with pytest.raises(ChildError, match="ended with status 0"):
            process.say("x" * 2**20)
