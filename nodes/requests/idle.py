"""When nothing ran for so long that models should sleep. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MINUTES_SETTING = "Courier.IdleSleepMinutes"
LEVEL_SETTING = "Courier.IdleSleepLevel"
MOST_MINUTES = 365 * 24 * 60


@dataclass(frozen=True)
class IdleSettings:
    """After how many minutes without a prompt all models sleep (0: never), and how deeply."""

    minutes: float = 0.0
    level: int = 1


def settings_from(text: str) -> IdleSettings:
    """From ComfyUI's own file of settings; what is missing or cannot be meant is the default."""
    try:
        found: Any = json.loads(text)
        minutes = _minutes_from(found.get(MINUTES_SETTING))
        level = 2 if str(found.get(LEVEL_SETTING)) == "2" else 1
    except (ValueError, RecursionError, AttributeError):
        return IdleSettings()
    return IdleSettings(minutes, level)


def _minutes_from(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if 0 < value <= MOST_MINUTES else 0.0


class IdleClock:
    """Says once, after so many seconds without activity, that it is time.

    Activity is a prompt that runs or has run since the last look, or an order. Who merely looks
    (the status, the panel) is none. Threads: one.
    """

    def __init__(self, now_seconds: float) -> None:
        self._since = now_seconds
        self._seen: object = None
        self._is_done = False

    def look(self, now_seconds: float, runs: bool, activity: object, after_seconds: float) -> bool:
        """Whether it is time now.

        Args:
            runs: a prompt runs.
            activity: differs from that of the last look if something happened in between.
            after_seconds: 0 for never.
        """
        if runs or activity != self._seen:
            self._since, self._seen, self._is_done = now_seconds, activity, False
        if self._is_done or after_seconds <= 0 or now_seconds - self._since < after_seconds:
            return False
        self._is_done = True
        return True
