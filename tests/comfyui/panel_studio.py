"""A server with one model and pages that look at it, and what their panels say."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import APIResponse, Browser, Locator, Page, Route, expect

from devtools.comfyui_host import ComfyUIHost
from devtools.page import Trouble, open_page
from devtools.small_workflows import BUDGET, budget_node, loaded_with, workflow

STATUS = "/courier/v1/status"
TAB_BUTTON = ":is(.courier-tab-button, [data-testid=courier-tab-button])"
"""In the sidebar of any ComfyUI: newer ones name it otherwise."""
READINGS = re.compile("/courier/v1/(status|models)$")


@dataclass
class Studio:
    """A server of these tests' own, one model of it, and pages that look at it."""

    server: ComfyUIHost
    browser: Browser
    small_models: Any
    file: Path
    pages: list[Page] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    seed: int = 0

    def prompt(self, steps: int = 2, device_bytes: int = 3 << 20) -> dict[str, Any]:
        """A workflow whose layers stream, and nothing of which is cached but its loaders."""
        self.seed += 1
        loader = loaded_with("CourierLoadDiffusionModel", self.file.name, budget=[BUDGET, 0])
        made = workflow(self.small_models, loader, seed=self.seed, steps=steps)
        return {**made, BUDGET: budget_node(device_bytes, 0)}

    def run(self, **more: Any) -> None:
        self.server.client.run(self.prompt(**more))

    def model(self) -> dict[str, Any]:
        models: list[dict[str, Any]] = self.server.client.request(STATUS)["models"]
        return next(model for model in reversed(models) if model["file"] == self.file.name)

    def post(self, name: str, **body: Any) -> Any:
        return self.server.client.request(f"/courier/v1/{name}", body)

    def resident_memory(self) -> int:
        """Of the server's process, in bytes."""
        return int(psutil.Process(self.server.pid).memory_info().rss)

    def page(self) -> Page:
        """ComfyUI's page with the panel open."""
        page, _ = self.plain_page()
        page.locator(TAB_BUTTON).click()
        expect(page.locator(".courier-panel")).to_be_visible()
        return page

    def plain_page(
        self, before: Callable[[Page], None] = lambda page: None
    ) -> tuple[Page, Trouble]:
        """The same with the panel closed. ``before`` has the page while it is blank."""
        page = self.browser.new_page(viewport={"width": 1500, "height": 1000})
        trouble = Trouble(self.server.address)
        trouble.watch(page)
        self.pages.append(page)
        self.troubles.append(trouble)
        before(page)
        open_page(page, self.server.address)
        return page, trouble

    def close_pages(self) -> list[str]:
        """What they complained of, but for what did not answer while the server was away."""
        for page in self.pages:
            page.close()
        lines = [line for trouble in self.troubles for line in trouble.lines]
        self.pages, self.troubles = [], []
        return [line for line in lines if "ERR_CONNECTION" not in line and "409" not in line]


def panel(page: Page) -> Locator:
    return page.locator(".courier-panel")


def card(page: Page, studio: Studio) -> Locator:
    return page.locator("article", has=page.get_by_role("heading", name=studio.file.stem))


def says(page: Page, text: str, timeout: float = 15_000) -> None:
    expect(panel(page)).to_contain_text(text, use_inner_text=True, timeout=timeout)


def number_is(page: Page, number: str, timeout: float = 15_000) -> None:
    """On the tab's icon; "" for none."""
    badge = page.locator(f"{TAB_BUTTON} :is(.p-badge, .sidebar-icon-badge)")
    expect(badge).to_have_text([number] if number else [], timeout=timeout)


class Gate:
    """Holds back the answers to a page's readings until it is opened."""

    def __init__(self) -> None:
        self.is_open = False
        self.held: list[tuple[Route, APIResponse]] = []

    def stand_before(self, page: Page) -> None:
        """From now on the server answers, and nothing of it reaches the page."""
        page.route(READINGS, self._hold)

    def wait(self, page: Page, answers: int) -> None:
        """Until the server has given so many."""
        deadline = time.monotonic() + 15
        while len(self.held) < answers:
            assert time.monotonic() < deadline, f"{len(self.held)} answers came"
            page.wait_for_timeout(20)

    def open(self) -> None:
        """Let through what was held back, and all that follows."""
        self.is_open = True
        for route, response in self.held:
            route.fulfill(response=response)

    def _hold(self, route: Route) -> None:
        if self.is_open:
            route.continue_()
        else:
            self.held.append((route, route.fetch()))


def gib(size_bytes: int) -> str:
    """As the panel writes it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit * 0.9995:
            value = size_bytes / unit
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {name}"
    return f"{size_bytes} B"
