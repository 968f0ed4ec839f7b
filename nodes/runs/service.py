"""Runs by id: begun, followed to their end, cancelled, and remembered for a while."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..requests.records import BusyError, ControlError, ModelControl, OrderFailedError, SleepOrder
from .records import Place, RunHost, RunOrder, RunRecord, SleepState, StopReason
from .state import Event, Run, bring_up_to_date

MOST_UNFINISHED = 50
KEPT_RUNS = 100
MODELS_SECONDS = 1.0

logger = logging.getLogger("courier")

ModelsProbe = Callable[[], tuple[tuple[dict[str, Any], ...], int | None]]
"""What the status says of the models, and the bytes that the driver counts in use (None: no card).
"""


class UnknownRunError(ControlError):
    """No run has this id, or it is forgotten."""


class QueueFullError(ControlError):
    """So many runs are unfinished already."""


class RunService:
    """The runs of this process. They ride on ComfyUI's queue and survive whoever began them.

    Nobody tells when a prompt begins, steps or ends, other than to the page: its place is looked at
    now and then by ``look``, which somebody has to call as long as it answers True.

    Threads: any; ``look`` one at a time, ``start`` the server's event loop.
    """

    def __init__(
        self,
        host: RunHost,
        control: ModelControl,
        models: ModelsProbe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._control = control
        self._models = models
        self._clock = clock
        self._submitting = 0  # the event loop's alone
        # Guards what is below, and every Run.
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}

    async def start(self, order: RunOrder) -> RunRecord:
        """Queue a workflow. Raises: QueueFullError, PromptRefusedError: then nothing is queued."""
        with self._lock:
            unfinished = sum(not run.record.is_over for run in self._runs.values())
        if unfinished + self._submitting >= MOST_UNFINISHED:
            raise QueueFullError(
                f"{unfinished} runs are unfinished, and more are not taken; ask again when some "
                "have ended, or cancel some"
            )
        # The form that ComfyUI gives ids of its own; newer versions take no other.
        run_id = str(uuid.uuid4())
        self._submitting += 1
        try:
            await self._host.submit(run_id, order)
        finally:
            self._submitting -= 1
        sleep = SleepState.WAITING if order.sleep_after else SleepState.NOT_ASKED
        record = RunRecord(run_id, order, time.time(), len(order.queued_prompt), sleep=sleep)
        run = Run(record, self._clock())
        with self._lock:
            self._runs[run_id] = run
            run.tell("state")
            self._forget()
            return run.record

    def records(self) -> list[RunRecord]:
        """All that are remembered, the youngest first."""
        with self._lock:
            return [run.record for run in reversed(self._runs.values())]

    def record(self, run_id: str, fresh: bool = False) -> RunRecord:
        """The run as it was seen last; where ``fresh``, it is looked at first, which may block.

        Raises: UnknownRunError.
        """
        with self._lock:
            record = self._run(run_id).record
        if record.state.is_end or not fresh:
            return record
        self._look_at([run_id])
        return self.record(run_id)

    def events(self, run_id: str, after: int) -> tuple[list[Event], bool]:
        """Events with a number above ``after``, and whether no more will come.

        Raises: UnknownRunError.
        """
        with self._lock:
            run = self._run(run_id)
            return [event for event in run.events if event.number > after], run.record.is_over

    def cancel(self, run_id: str) -> RunRecord:
        """Have it stopped. Of one that has ended, what it is. Raises: UnknownRunError."""
        with self._lock:
            run = self._run(run_id)
            if run.record.state.is_end:
                return run.record
            run.stop = run.stop or StopReason.CANCELLED
        self._host.stop(run_id)
        self._look_at([run_id])
        return self.record(run_id)

    def look(self) -> bool:
        """Bring every run up to now; whether there is still one to look at."""
        with self._lock:
            ids = [run_id for run_id, run in self._runs.items() if not run.record.state.is_end]
        self._look_at(ids)
        self._put_to_sleep()
        return self.has_unfinished

    @property
    def has_unfinished(self) -> bool:
        """Whether there is a run to look at."""
        with self._lock:
            return any(not run.record.is_over for run in self._runs.values())

    def _look_at(self, ids: list[str]) -> None:
        places = self._host.look(ids) if ids else {}
        for run_id, look in places.items():
            steps = self._host.steps(run_id) if look.place is Place.RUNNING else None
            if look.place in (Place.RUNNING, Place.ENDED):
                self._look_at_models(run_id, look.place is Place.ENDED)
            with self._lock:
                run = self._runs.get(run_id)
                # Another thread may have seen its end since the look.
                if run is not None and not run.record.state.is_end:
                    bring_up_to_date(run, look, steps, self._clock())
                stop = run is not None and run.stop is not None and not run.record.state.is_end
            if stop:
                # Again: ComfyUI clears an interrupt that comes just before a prompt begins.
                self._host.stop(run_id)

    def _look_at_models(self, run_id: str, at_end: bool) -> None:
        with self._lock:
            run, now = self._runs.get(run_id), self._clock()
            if run is None:
                return
            if not at_end and run.models_at is not None and now - run.models_at < MODELS_SECONDS:
                return
            run.models_at = now
        try:
            models, used = self._models()
        except Exception:
            # What the models say is beside the point of a run; the status has the reason.
            logger.exception("Courier: the models could not be looked at for a run")
            return
        with self._lock:
            peaks = [peak for peak in (run.record.device_peak_bytes, used) if peak is not None]
            peak = max(peaks) if peaks else None
            run.record = replace(run.record, models=models, device_peak_bytes=peak)

    def _put_to_sleep(self) -> None:
        """Carry out ``sleep_after`` of runs that have ended; while prompts run, the next time."""
        with self._lock:
            due = [
                run
                for run in self._runs.values()
                if run.record.state.is_end and not run.record.sleep.is_settled
            ]
        # An order is told to everybody, and one that would be refused is no news.
        if not due or self._control.is_busy():
            return
        for run in due:
            order = SleepOrder(level=run.record.order.sleep_after, on_use=run.record.order.on_use)
            change: dict[str, Any]
            try:
                receipt = self._control.sleep(order)
                change = {"sleep": SleepState.DONE, "receipt": receipt}
            except BusyError:
                continue
            except OrderFailedError as error:
                change = {"receipt": error.receipt, "sleep_problem": str(error)}
            except ControlError as error:
                change = {"sleep_problem": str(error)}
            except Exception as error:
                logger.exception("Courier: sleep after a run failed")
                kind = type(error).__name__
                change = {"sleep_problem": f"sleep failed ({kind}); ComfyUI's log has the details"}
            with self._lock:
                run.record = replace(run.record, **{"sleep": SleepState.FAILED, **change})
                run.tell("end")

    def _run(self, run_id: str) -> Run:
        run = self._runs.get(run_id)
        if run is None:
            raise UnknownRunError(
                "no run has this id; ComfyUI was started anew since, or it is forgotten "
                f"({KEPT_RUNS} ended ones are kept)"
            )
        return run

    def _forget(self) -> None:
        over = [run_id for run_id, run in self._runs.items() if run.record.is_over]
        for run_id in over[: max(0, len(over) - KEPT_RUNS)]:
            del self._runs[run_id]
