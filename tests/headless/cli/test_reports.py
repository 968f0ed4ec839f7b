"""What commands answer in text."""

from __future__ import annotations

from typing import Any

import pytest

from ..conftest import Headless

GIB = 2**30
STATUS: dict[str, Any] = {
    "version": "1.0", "notes": ["a lock was refused"],
    "device": {"total_bytes": 24 * GIB, "free_bytes": 12 * GIB},
    "host": {"total_bytes": 64 * GIB, "available_bytes": 32 * GIB},
    "models": [{
        "name": "wan\x1b[2J.safetensors", "state": "loaded",
        "bytes": {"resident": 2 * GIB, "pinned": 3 * GIB, "mapped": 0, "pageable": 0},
        "counts": {"resident": 4, "pinned": 6, "mapped": 0, "pageable": 0},
        "budgets": {"device_bytes": 12 * GIB, "host_bytes": None},
        "measured": {
            "device_bytes": 3 * GIB, "device_peak_bytes": 4 * GIB, "activation_peak_bytes": None,
            "host_locked_bytes": 2 * GIB, "host_copied_bytes": GIB, "host_staging_bytes": GIB,
        },
        "notes": ["no blocks were found"],
    }],
}  # fmt: skip
MODELS = [{"id": "wan-1", "kind": "diffusion", "state": "loaded", "name": "wan"}]


def run_of(headless: Headless, **more: Any) -> Any:
    return headless.courier.Run.from_json({"id": "r", "state": "cancelled", **more})


def test_the_status_tells_of_layers_budgets_and_notes(headless: Headless) -> None:
    text = headless.module("cli.reports").status_text(STATUS, MODELS)
    for words in (
        "layers: 4 resident, 6 pinned",
        "card: 3.00 GiB now, budget 12.00 GiB",
        "RAM: 3.00 GiB locked and 1.00 GiB copied now, budget automatic",
        "! no blocks were found",
        "! a lock was refused",
        "wan-1  diffusion  loaded  wan",
    ):
        assert words in text
    assert "\x1b" not in text
    empty = headless.module("cli.reports").status_text({**STATUS, "models": []}, [])
    assert "no models" in empty


def test_what_became_of_sleep_after_is_told_of_every_end(headless: Headless) -> None:
    lines = headless.module("cli.reports").sleep_lines
    assert lines(run_of(headless)) == []
    slept = run_of(headless, sleep_after={"receipt": {"message": "1 model sleeps"}})
    assert lines(slept) == ["asleep: 1 model sleeps"]
    failed = run_of(headless, sleep_after={"receipt": None, "problem": "a prompt waits"})
    assert lines(failed) == ["not asleep: a prompt waits"]


@pytest.mark.parametrize(("code", "words"), [
    ("time_limit", "the run has ended: it ran too long"),
    ("cancelled", "the run was stopped: it ran too long"),
])  # fmt: skip
def test_an_end_is_said_once(headless: Headless, code: str, words: str) -> None:
    run = run_of(headless, error={"code": code, "message": "it ran too long"})
    with pytest.raises(headless.courier.RunCancelledError) as caught:
        headless.module("client.ends").check_ended_well(run)
    assert str(caught.value) == words


def test_of_many_names_the_first_are_told(headless: Headless) -> None:
    some_of = headless.module("text").some_of
    assert some_of([]) == "none"
    assert some_of(["a", "b"], most=2) == "a, b"
    assert some_of(["a", "b", "c", "d"], most=2) == "a, b and 2 more"


def test_an_answer_that_cannot_be_told_is_no_error_of_ours(headless: Headless) -> None:
    told = headless.module("cli.reports").told
    with pytest.raises(headless.courier.RefusedError, match="as new as this client"):
        told(headless.module("cli.reports").status_text, {"version": 1}, [])
