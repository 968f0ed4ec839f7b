"""The courier: one background thread that serves orders to bring layers to the device.

It decides nothing, and does not wait for copies that others carry on with. Which layer, into which
memory, behind which event: all of that is in the order. What it guarantees: every order is finished
exactly once, with an event or with an error, also when the thread itself ends. What it leaves to
others: when to order, what to do about an error, and the lifetime of the memory, which must outlast
the order.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from ..device import CopyPiece, DeviceBackend, DeviceEvent
from ..values import EXIT_SECONDS, CourierStoppedError, StateError
from .source import LayerSource, transfer_error
from .weights import WeightGroup


@dataclass(eq=False)
class Order:
    """Bring ``part`` of ``source`` into ``memory`` once ``after`` has passed.

    ``ahead``, if any, is the part expected behind it, for the system to read meanwhile.

    ``finished`` is set after ``event`` or ``error`` was written; readers wait for it first. By
    then the order holds ``memory`` no longer: whoever frees it next frees it at once, although
    the courier thread may still be on its way back to the queue with this order in hand.
    """

    source: LayerSource
    part: WeightGroup
    memory: torch.Tensor | None
    after: DeviceEvent | None
    ahead: tuple[LayerSource, WeightGroup] | None = None
    more: Sequence[CopyPiece] = ()
    """What is to be copied with it."""
    finished: threading.Event = field(default_factory=threading.Event)
    event: DeviceEvent | None = None
    error: BaseException | None = None
    called_off: bool = False
    """Set by the compute thread: nobody needs it any more. An order not yet begun then finishes
    with neither event nor error; one that is under way is served as if nothing had been said."""

    def answer(self, shipment: Future[DeviceEvent]) -> None:
        """Take over what came of the shipment. Threads: whoever finished it."""
        self.error = shipment.exception()
        if self.error is None:
            self.event = shipment.result()
        self.finish()

    def finish(self) -> None:
        """Say that it was served, one way or the other. Threads: whoever served it."""
        self.memory, self.more = None, ()
        self.finished.set()

    def wait(self, interrupt: Callable[[], None] | None, poll_seconds: float) -> None:
        """Wait until the order was served, one way or the other; see ``collect``."""
        while not self.finished.wait(poll_seconds if interrupt else None):
            if interrupt is not None:
                interrupt()

    def collect(self, interrupt: Callable[[], None] | None, poll_seconds: float) -> DeviceEvent:
        """Wait until the copies are issued; the event that passes when the bytes are there.

        Args:
            interrupt: called about every ``poll_seconds`` while waiting; may raise to cancel.
        Raises: TransferError naming layer and file, with the courier's own error as its cause.
        Threads: compute.
        """
        self.wait(interrupt, poll_seconds)
        if self.error is not None:
            raise transfer_error(self.source, self.error) from self.error
        assert self.event is not None
        return self.event


_STOP = None


class Courier:
    """Owns the thread. It is started by the first order and again after it died.

    Fields under ``_lock``: ``_thread``, ``_queue`` (as a reference), ``_closed``.
    Threads: ``ship`` from the compute thread; ``close`` from any.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        name: str,
        threaded: bool = True,
        patience_seconds: float = 60.0,
    ) -> None:
        self.patience_seconds = patience_seconds
        self._backend = backend
        self._name = f"courier-{name}"
        self._threaded = threaded
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._closed = False

    def ship(self, order: Order) -> None:
        """Hand over an order; returns at once (without a thread: when it is served)."""
        with self._lock:
            if self._closed:
                raise StateError("the courier was closed; load the model again")
            if self._threaded:
                # Put under the lock: a thread that is ending drains the queue under it too, so
                # an order can never fall between the last drain and the restart.
                if self._thread is None:
                    self._start()  # first: where no thread can be had, no order may be left behind
                self._queue.put(order)
                return
        _serve(self._backend, order)

    def close(self) -> None:
        """End the thread after the orders already given. Raises StateError if it will not end."""
        with self._lock:
            self._closed = True
            thread = self._thread
            if thread is not None:
                self._queue.put(_STOP)
        if thread is not None and thread is not threading.current_thread():
            thread.join(self.patience_seconds)
            if thread.is_alive():
                raise StateError(self.stuck_text())

    def is_current_thread(self) -> bool:
        """Whether the caller is the courier thread itself (a finalizer may be run there)."""
        return self._thread is threading.current_thread()

    def stuck_text(self) -> str:
        """Why nothing can be freed yet, for an error."""
        return (
            f"{self._name} did not end its copy within {self.patience_seconds:g} s; its memory is "
            "kept. The file it reads may be on a drive that stopped answering: try again later"
        )

    def _start(self) -> None:
        # A daemon: a copy stuck on a dead network drive must not keep the process from ending.
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        weakref.finalize(thread, _end_at_exit, weakref.ref(thread), self._queue)
        thread.start()
        self._thread = thread

    def _work(self) -> None:
        if not self._take_over():
            return
        order: Order | None = None
        try:
            self._backend.enter_thread()
            while (order := self._queue.get()) is not _STOP:
                _serve(self._backend, order)
                order = None  # or the idle thread would keep the last order's memory
            self._end(None, None)
        except BaseException as error:
            self._end(order, error)
            order = None  # the traceback holds this frame
            raise

    def _take_over(self) -> bool:
        """Whether the calling thread is the courier's. A Ctrl-C may come between the start of one
        and the line that keeps it; then it is kept here, or another one has its place already."""
        me = threading.current_thread()
        with self._lock:
            if self._thread is None:
                self._thread = me
            return self._thread is me

    def _end(self, order: Order | None, cause: BaseException | None) -> None:
        """Answer every order; whoever hears of it finds the thread gone and can start anew."""
        with self._lock:
            self._thread = None
            unserved = [order]
            while not self._queue.empty():
                unserved.append(self._queue.get_nowait())
        # The one that ended the thread comes last: its error ends the run, and by then no other
        # order of that run is left to fail in the next.
        for rest in reversed(unserved):
            if rest is not None:
                rest.error = CourierStoppedError(f"the courier thread ended: {cause!r}")
                rest.error.__cause__ = cause
                rest.finish()


def _end_at_exit(
    thread_ref: weakref.ref[threading.Thread], orders: queue.SimpleQueue[Order | None]
) -> None:
    """Runs when the interpreter ends; when the thread object merely went, it does nothing."""
    thread = thread_ref()
    if thread is not None and thread.is_alive():
        orders.put(_STOP)
        thread.join(EXIT_SECONDS)


def _serve(backend: DeviceBackend, order: Order) -> None:
    assert order.memory is not None
    if order.called_off:
        order.finish()
        return
    try:
        with torch.inference_mode(False), torch.no_grad():
            # No name for the pieces: they would be held while the system reads ahead below.
            shipment = backend.ship(
                [*order.source.copies_into(order.memory, order.part), *order.more], order.after
            )
    except Exception as error:
        order.error = error
        order.finish()
        return
    shipment.add_done_callback(order.answer)
    if order.ahead is not None:
        source, part = order.ahead
        source.read_ahead(part)
