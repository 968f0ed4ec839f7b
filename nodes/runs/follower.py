"""The thread that follows runs."""

from __future__ import annotations

import logging
import threading
import time

from ..background import try_to_start
from .service import RunService

LOOK_SECONDS = 0.2
"""So an event is at most that old, and there are at most five a second."""

logger = logging.getLogger("courier")


class RunFollower:
    """The one thread that looks, for as long as there is a run to look at.

    Threads: any may ``wake`` it.
    """

    def __init__(self, service: RunService) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False

    def wake(self) -> None:
        """There is a run to look at. Without a thread to be had, the next call tries again."""
        with self._lock:
            self._again = True
            if self._thread is None:
                self._thread = try_to_start("courier-runs", self._follow)

    def _follow(self) -> None:
        told = ""
        while True:
            with self._lock:
                self._again = False
            unfinished = True
            try:
                unfinished = self._service.look()
            except Exception as error:
                # Whatever it is, the next look may go well; the log has it once.
                if repr(error) != told:
                    told = repr(error)
                    logger.exception("Courier: the runs could not be looked at")
            if not unfinished:
                with self._lock:
                    if not self._again:
                        self._thread = None
                        return
            time.sleep(LOOK_SECONDS)
