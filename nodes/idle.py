"""When nothing ran for so long that models should sleep. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

MINUTES_SETTING = "Courier.IdleSleepMinutes"
LEVEL_SETTING = "Courier.IdleSleepLevel"


@dataclass(frozen=True)
class IdleSettings:
    """After how many minutes without a prompt all models sleep (0: never), and how deeply."""

    minutes: float = 0.0
    level: int = 1


def settings_from(text: str) -> IdleSettings:
    """From ComfyUI's own file of settings; what is missing or cannot be meant is the default."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        return IdleSettings()
    if not isinstance(found, dict):
        return IdleSettings()
    minutes, level = found.get(MINUTES_SETTING, 0), found.get(LEVEL_SETTING, 1)
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)):
        minutes = 0
    if not 0 < minutes < math.inf:
        minutes = 0
    return IdleSettings(float(minutes), 2 if str(level) == "2" else 1)


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
