"""What may be set, and what each refusal says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from offload_core.values import GIB, Budget, ConfigError, EngineConfig, Switches, read_switches


def test_budgets_of_none_nothing_and_some_bytes_are_taken_as_they_are() -> None:
    assert Budget() == Budget(None, None)
    assert Budget(0, 0).host_bytes == 0
    assert Budget(1 << 60).device_bytes == 1 << 60


@pytest.mark.parametrize("value", ["2GB", 1.5, math.nan, True, [1]])
@pytest.mark.parametrize("side", ["device", "host"])
def test_a_budget_that_is_no_whole_number_is_refused(side: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"the {side} budget must be whole bytes, not "):
        Budget(**{f"{side}_bytes": value})


@pytest.mark.parametrize("side", ["device", "host"])
def test_a_negative_budget_is_refused_with_its_number(side: str) -> None:
    with pytest.raises(ConfigError, match=f"the {side} budget is -1 bytes; it must be 0 or more"):
        Budget(**{f"{side}_bytes": -1})


@pytest.mark.parametrize("slots", [0, -1, 1.5, "2", True])
def test_an_engine_needs_a_whole_number_of_slots(slots: Any) -> None:
    with pytest.raises(ConfigError, match=r"slots is .*; at least 1 is needed to stream a layer"):
        EngineConfig(slots=slots)


@pytest.mark.parametrize("name", ["interrupt_poll_seconds", "patience_seconds"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "1"])
def test_waits_are_finite_and_above_nothing(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .*; it must be a number of seconds above 0"):
        EngineConfig(**{name: value})


def test_an_empty_environment_switches_nothing() -> None:
    assert read_switches({}) == Switches()


def test_switches_say_what_they_do() -> None:
    switches = read_switches({"COURIER_THREAD": "0", "COURIER_IN_PLACE": "0"})
    assert (switches.courier, switches.in_place) == (False, False)
    assert [note.partition(":")[0] for note in switches.notes] == [
        "COURIER_THREAD=0",
        "COURIER_IN_PLACE=0",
    ]


def test_pretended_sizes_count_only_in_a_test_and_are_shown() -> None:
    environ = {"COURIER_PRETEND_HOST_GIB": "1.5", "COURIER_POISON": "1"}
    ignored = read_switches(environ)
    assert (ignored.pretend_host_bytes, ignored.poison) == (None, False)
    assert ignored.notes == ("COURIER_PRETEND_HOST_GIB is ignored: it needs COURIER_TESTING=1",)
    counted = read_switches({**environ, "COURIER_TESTING": "1"})
    assert (counted.pretend_host_bytes, counted.poison) == (3 * GIB // 2, True)
    (note,) = counted.notes
    assert (
        note == "COURIER_PRETEND_HOST_GIB=1.5: the host is treated as that large (a test setting)"
    )


@pytest.mark.parametrize(
    ("figure", "reason"),
    [("2GB", "is not a number of GiB"), ("nan", "must be a finite"), ("-1", "0 or more")],
)
def test_a_pretended_size_that_is_no_figure_is_refused(figure: str, reason: str) -> None:
    environ = {"COURIER_TESTING": "1", "COURIER_PRETEND_DEVICE_GIB": figure}
    with pytest.raises(ConfigError, match=f"COURIER_PRETEND_DEVICE_GIB.* {reason}"):
        read_switches(environ)


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_switches_are_understood_as_people_write_them(text: str) -> None:
    assert read_switches({"COURIER_SELF_CHECK": text}).self_check
    assert read_switches({"COURIER_THREAD": text}).courier


@pytest.mark.parametrize("text", ["0", "False", "no", "OFF"])
def test_switches_are_switched_off_as_people_write_it(text: str) -> None:
    assert not read_switches({"COURIER_IN_PLACE": text}).in_place
    assert not read_switches({"COURIER_SELF_CHECK": text}).self_check


def test_a_switch_that_is_not_understood_has_no_effect_and_says_so() -> None:
    switches = read_switches({"COURIER_SELF_CHECK": "perhaps"})
    assert not switches.self_check
    assert switches.notes == (
        "COURIER_SELF_CHECK=perhaps is not understood and has no effect; use 1 or 0",
    )
