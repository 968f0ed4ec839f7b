"""Work that takes its time, in a thread of its own.

ComfyUI and the status have the threads of asyncio's pool, five of them on a machine with one core.
What may wait there for a prompt to end would use them up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from ..background import try_to_start
from ..requests.records import BusyError

T = TypeVar("T")


async def in_own_thread(name: str, call: Callable[[], T]) -> T:
    """What ``call`` gives or raises. Cancelling leaves the thread to its end, with nobody to tell.

    Raises: BusyError where the system has no thread to give.
    Threads: an event loop's.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[Any], None], what: Any) -> None:
        if not future.done():
            settle(what)

    def work() -> None:
        settle, what = future.set_result, None
        try:
            what = call()
        except BaseException as error:
            settle, what = future.set_exception, error
        # The server may have ended meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, settle, what)

    if try_to_start(name, work) is None:
        raise BusyError("the system has no thread to give just now; ask again later")
    return await future
