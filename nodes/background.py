"""Threads that look at something as long as the process, or what they look at, lives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("courier")


def try_to_start(name: str, work: Callable[[], None]) -> threading.Thread | None:
    """A daemon thread that does ``work``; None where the system has none to give.

    Whoever needs it asks again with the next occasion, and does meanwhile what does not need it: a
    prompt or a run is not to fail for want of somebody who watches it.
    """
    # A daemon: it holds nothing, and ComfyUI's end need not wait for it.
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        logger.warning(
            "Courier: thread %s could not be started (%s); tried again later", name, error
        )
        return None
    return thread
