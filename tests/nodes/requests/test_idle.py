"""When models sleep by themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest


@pytest.fixture
def idle(pack: Any) -> Any:
    return pack.module("nodes.requests.idle")


@pytest.mark.parametrize(
    ("text", "minutes", "level"),
    [
        ("{}", 0, 1),
        ("", 0, 1),
        ("[]", 0, 1),
        ("null", 0, 1),
        ('{"Courier.IdleSleepMinutes": 5}', 5, 1),
        ('{"Courier.IdleSleepMinutes": 0.5, "Courier.IdleSleepLevel": "2"}', 0.5, 2),
        ('{"Courier.IdleSleepMinutes": 5, "Courier.IdleSleepLevel": 2}', 5, 2),
        ('{"Courier.IdleSleepMinutes": -5, "Courier.IdleSleepLevel": 7}', 0, 1),
        ('{"Courier.IdleSleepMinutes": "5"}', 0, 1),
        ('{"Courier.IdleSleepMinutes": true}', 0, 1),
        ('{"Courier.IdleSleepMinutes": NaN}', 0, 1),
        ('{"Courier.IdleSleepMinutes": Infinity}', 0, 1),
        ('{"Courier.IdleSleepMinutes": 1' + "0" * 400 + "}", 0, 1),
        ('{"Courier.IdleSleepMinutes": 1' + "0" * 5000 + "}", 0, 1),
        ("[" * 100_000, 0, 1),
        ('{"a":' * 5000 + "1" + "}" * 5000, 0, 1),
        ('{"Courier.IdleSleepLevel": {"a": 1}}', 0, 1),
    ],
)
def test_what_cannot_be_meant_is_the_default(
    idle: Any, text: str, minutes: float, level: int
) -> None:
    assert idle.settings_from(text) == idle.IdleSettings(minutes, level)


def test_the_settings_are_those_that_the_page_registers(idle: Any) -> None:
    from devtools.paths import checkout

    script = (checkout().root / "web" / "panel" / "settings.js").read_text(encoding="utf-8")
    for name in (idle.MINUTES_SETTING, idle.LEVEL_SETTING):
        assert json.dumps(name) in script


def test_it_is_time_once_after_each_spell_of_nothing(idle: Any) -> None:
    clock = idle.IdleClock(0)
    told = [clock.look(now, False, "a", 10) for now in range(0, 31)]
    assert [now for now, due in enumerate(told) if due] == [10]
    assert not clock.look(40, False, "b", 10), "something happened"
    assert not clock.look(49, False, "b", 10)
    assert clock.look(50, False, "b", 10)
    assert not clock.look(1000, False, "b", 10)


def test_a_prompt_that_runs_is_activity_and_zero_is_never(idle: Any) -> None:
    clock = idle.IdleClock(0)
    assert not any(clock.look(now, True, "a", 10) for now in range(0, 100))
    assert not clock.look(105, False, "a", 10)
    assert clock.look(109.5, False, "a", 10)
    never = idle.IdleClock(0)
    assert not any(never.look(now, False, "a", 0) for now in range(0, 10_000, 100))
    assert never.look(10_000, False, "a", 1), "once it is switched on, it counts what went by"
