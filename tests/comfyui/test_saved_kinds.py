"""Each kind of saved graph that was once read wrong, against ComfyUI's own page."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from devtools.page import open_page, prepare

from ..courier_command import headless_module
from .commanding import Bench
from .prompts import EXPORT, same_graph, what_runs
from .saved_graphs import KINDS, OUTPUT, PACK

FEWEST = 3
"""Of each kind."""
WRONG_PAGES = {
    ("groups", "1.49.6"): "this page itself reads some values of a group node one place off",
    (
        "proxy orders",
        "1.58.1",
    ): "this page itself sends null for a widget without a value",
}
"""Where we differ on purpose: docs/headless.md."""


@pytest.fixture(scope="module")
def page(bench: Bench, browser: Browser) -> Iterator[Page]:
    """ComfyUI's page, with a small pack of the tests' own in it."""
    prepare(bench.server)
    output = bench.server.base / "output" / OUTPUT
    output.parent.mkdir(exist_ok=True)
    output.write_bytes(b"")
    page = browser.new_page(viewport={"width": 1500, "height": 900})
    open_page(page, bench.server.address)
    page.evaluate(PACK)
    yield page
    page.close()
    output.unlink()


@pytest.fixture(scope="module")
def object_info(bench: Bench) -> Any:
    return bench.server.client.request("/object_info")


@pytest.fixture(scope="module")
def page_version(bench: Bench) -> str:
    return str(bench.server.client.request("/system_stats")["system"]["required_frontend_version"])


def exported(page: Page, graph: Any) -> tuple[Any, datetime.datetime]:
    """What the page makes of it, and when; a day that ends meanwhile is waited for."""
    while True:
        before = datetime.datetime.now()
        found = page.evaluate(EXPORT, graph)
        if before.date() == datetime.datetime.now().date():
            return found, before


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_graph_becomes_what_the_page_makes_of_it(
    page: Page, object_info: Any, page_version: str, kind: str
) -> None:
    if (kind, page_version) in WRONG_PAGES:
        pytest.skip(WRONG_PAGES[kind, page_version])
    convert, texts = headless_module("convert.convert"), headless_module("workflow.texts")
    graphs = KINDS[kind]()
    assert len(graphs) >= FEWEST
    for name, graph in graphs.items():
        theirs, now = exported(page, copy.deepcopy(graph))
        (found,) = convert.to_api_all([graph], object_info, page_version)
        assert not isinstance(found, Exception), f"{name}: {found}"
        prompt, _ = texts.fill_texts(found.prompt, found.nodes, now)
        want = what_runs(theirs, object_info)
        assert want, f"{name}: nothing of it runs, so nothing is compared"
        assert same_graph(what_runs(prompt, object_info), want), name
