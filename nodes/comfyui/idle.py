"""The watch that puts models to sleep when ComfyUI has had nothing to do for a while."""

from __future__ import annotations

import logging
import threading
import time

from ..background import try_to_start
from ..requests.idle import IdleClock, IdleSettings, settings_from
from ..requests.records import BusyError, ControlError, OnUse, SleepOrder
from .compat import has
from .host import prompt_queue, settings_text
from .orders import get_orders
from .symbols import Part

_LOG = logging.getLogger("courier")
_TICK_SECONDS = 5.0

_starting = threading.Lock()
_thread: threading.Thread | None = None


def start_watch() -> None:
    """Begin to watch, once in a process: with the first prompt, before which there is nothing to
    put to sleep."""
    global _thread
    with _starting:
        if _thread is None and prompt_queue() is not None and has(Part.QUEUE, Part.SLEEP):
            _thread = try_to_start("courier-idle", _watch)


def read_settings() -> IdleSettings:
    """As the user chose them in ComfyUI's settings dialog."""
    return settings_from(settings_text())


def _watch() -> None:
    clock, told = IdleClock(time.monotonic()), ""
    while True:
        seconds = _TICK_SECONDS
        try:
            seconds = _look(clock)
        except Exception as error:
            # Whatever it is, the next look may go well; the log has it once.
            if repr(error) != told:
                told = repr(error)
                _LOG.exception("the idle watch could not look")
        time.sleep(seconds)


def _look(clock: IdleClock) -> float:
    """One look; the seconds until the next."""
    settings, queue = read_settings(), prompt_queue()
    after_seconds = settings.minutes * 60
    activity = (queue.task_counter, get_orders().orders_given)
    if clock.look(time.monotonic(), bool(queue.currently_running), activity, after_seconds):
        _sleep(settings)
    # A short time is watched closely, so that it means what it says.
    return min(_TICK_SECONDS, max(0.1, after_seconds / 4 or _TICK_SECONDS))


def _sleep(settings: IdleSettings) -> None:
    try:
        # The next use wakes them: nobody asked for a model to be refused.
        order = SleepOrder(level=settings.level, on_use=OnUse.WAKE)
        receipt = get_orders().sleep(order, counts=False)
    except BusyError:
        return  # somebody was faster, and the clock starts anew
    except ControlError as error:
        _LOG.warning("sleep after %g idle minutes: %s", settings.minutes, error)
    else:
        _LOG.info("sleep after %g idle minutes: %s", settings.minutes, receipt["message"])
