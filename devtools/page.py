"""ComfyUI's page in a real browser, for tests of what the pack adds to it. Needs playwright."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from devtools.browser import ensure_chromium
from devtools.comfyui_host import ComfyUIHost
from devtools.paths import PACK_NAME

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = 60_000
READY = "() => !!window.app?.graph && 'CourierStatus' in window.LiteGraph.registered_node_types"


@contextmanager
def chromium() -> Iterator[Browser]:
    """A Chromium; that there is none is an error."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=ensure_chromium(), args=list(FLAGS))
        yield browser
        browser.close()


class Trouble:
    """What a page complained of that has to do with us; its own look-ups elsewhere may fail."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lines: list[str] = []

    def watch(self, page: Page) -> None:
        """Listen from now on."""
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self._note(f"{error.message}\n{error.stack}"))

    def _on_console(self, message: ConsoleMessage) -> None:
        source = message.location.get("url", "")
        if message.type in ("error", "warning") and source.startswith(self.address):
            self._note(f"{message.text} {source}")

    def _note(self, text: str) -> None:
        if PACK_NAME in text or "courier" in text.lower():
            self.lines.append(text)


def prepare(server: ComfyUIHost, **settings: Any) -> None:
    """No dialog over the page, and these settings of ComfyUI's."""
    # Otherwise a dialog with templates covers the page.
    server.client.request("/api/settings", {"Comfy.TutorialCompleted": True, **settings})


def open_page(page: Page, address: str) -> None:
    """Go there and wait until ComfyUI and the pack are ready."""
    page.goto(address)
    page.wait_for_function(READY, timeout=WAIT_MS)


def save_picture(page: Page, path: Path, **options: Any) -> Path:
    """What the page shows, for people to look at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Given a path, playwright writes it in a thread that outlives the test.
    path.write_bytes(page.screenshot(**options))
    return path
