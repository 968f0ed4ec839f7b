"""An aiohttp application on loopback, for clients that are no part of it."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def serving(app: web.Application, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve ``app`` on loopback from a thread of its own. Gives: its address."""
    scheme = "http" if tls is None else "https"
    ready, loops = threading.Event(), []
    address: list[str] = []

    async def serve() -> None:
        ending = asyncio.Event()
        runner = web.AppRunner(app, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        address.append(f"{scheme}://127.0.0.1:{runner.addresses[0][1]}")
        loops.append((asyncio.get_running_loop(), ending))
        # Its one thread begins here, and not in the middle of a test.
        loops[0][0].set_default_executor(ThreadPoolExecutor(1))
        await asyncio.to_thread(int)
        ready.set()
        await ending.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="server of a test")
    thread.start()
    ready.wait()
    try:
        yield address[0]
    finally:
        loops[0][0].call_soon_threadsafe(loops[0][1].set)
        thread.join()
