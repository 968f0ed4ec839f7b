"""What automatic budgets are made of, and the default budget from ComfyUI's settings. Pure."""

from __future__ import annotations

import json
from typing import Any

from ..offload_core.values import Budget, gib_to_bytes

CARD_HEADROOM_GIB = 0.75
"""What a card's name promises and ComfyUI cannot have: the driver's context and the desktop."""
AUTOMATIC_HOST_SHARE = 0.6
"""Of what the machine or its container has free. The rest is for text encoders, the page cache of
the files themselves, and everybody else."""
CARD_SETTING = "Courier.DefaultVramGib"
HOST_SETTING = "Courier.DefaultHostGib"
_MOST_CARD_GIB, _MOST_HOST_GIB = 1024, 4096


def default_budget(text: str) -> Budget:
    """From ComfyUI's own file of settings; what is missing or cannot be meant is automatic."""
    try:
        found: Any = json.loads(text)
        card, host = found.get(CARD_SETTING), found.get(HOST_SETTING)
    except (ValueError, RecursionError, AttributeError):
        return Budget()
    device_bytes = _bytes(card, CARD_SETTING, _MOST_CARD_GIB)
    # As in Courier Budget: 0 of the card is automatic, 0 of the host locks nothing.
    return Budget(device_bytes or None, _bytes(host, HOST_SETTING, _MOST_HOST_GIB))


def _bytes(value: Any, name: str, most: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return gib_to_bytes(value, name) if 0 <= value <= most else None
