"""The side panel on the page of a real ComfyUI, with answers of a state that a test chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import axe_playwright_python
from playwright.sync_api import Locator, Page, Route

from devtools.panel_states import STATES, Answers

AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
HEIGHT = 1000
MOUNT = """width => {
  const tab = window.app.extensionManager.getSidebarTabs().find(tab => tab.id === 'courier');
  tab.destroy();
  document.querySelector('[data-courier]')?.remove();
  const root = document.createElement('div');
  root.dataset.courier = 'root';
  root.style.cssText = `position: fixed; inset: 0 auto 0 0; width: ${width}px; z-index: 5000;
    background: var(--bg-color)`;
  document.body.append(root);
  tab.render(root);
}"""


class Stage:
    """A page whose panel gets the answers of a state."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.answers: Answers = STATES["empty"]
        self.posts: list[tuple[str, Any]] = []
        page.route("**/courier/v1/*", self._answer)

    @property
    def panel(self) -> Locator:
        return self.page.locator(".courier-panel")

    def show(self, given: Answers, width: int = 600) -> None:
        """A panel that has just been opened, as wide as that."""
        self.answers = given
        self.page.evaluate(MOUNT, width)

    def _answer(self, route: Route) -> None:
        request = route.request
        name = request.url.rpartition("/")[2]
        if request.method == "POST":
            self.posts.append((name, json.loads(request.post_data or "null")))
            status, body = self.answers.post
            route.fulfill(status=status, json=body)
            return
        body = self.answers.status if name == "status" else self.answers.models
        if body is None:
            route.abort()
        elif isinstance(body, int):
            route.fulfill(status=body, body="")
        elif isinstance(body, dict):
            route.fulfill(json=body)
        elif body != "hangs":
            route.fulfill(body=body)


def violations(page: Page, *parts: str) -> list[str]:
    """What axe-core finds that is serious or critical, inside of each of ``parts``."""
    # Once for a page: it is large.
    if page.evaluate("() => !window.axe"):
        page.evaluate(AXE)
    found = page.evaluate(
        "parts => window.axe.run({include: parts.map(part => [part])},"
        " {resultTypes: ['violations']})",
        parts,
    )
    return [
        f"{fault['impact']} {fault['id']}: {node['html'][:200]} {node['failureSummary']}"
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]
