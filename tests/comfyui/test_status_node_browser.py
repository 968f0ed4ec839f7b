"""Courier Status in a real browser: the text appears on the node, and outlives a reload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from devtools.comfyui_host import ComfyUIHost
from devtools.page import WAIT_MS, Trouble, open_page, prepare, save_picture
from devtools.paths import Paths

TEXT = "textarea.courier-status-text"


def node(node_id: int, kind: str, place: int, **more: Any) -> dict[str, Any]:
    """One node of a workflow in the form that the page saves."""
    return {
        "id": node_id,
        "type": kind,
        "pos": [40 + 420 * place, 80],
        "flags": {},
        "order": place,
        "mode": 0,
        "properties": {},
        **more,
    }


def status_node(link: int, type_: str, place: int) -> dict[str, Any]:
    return node(
        9,
        "CourierStatus",
        place,
        size=[620, 420],
        inputs=[{"name": "anything", "type": type_, "link": link}],
        outputs=[
            {"name": "anything", "type": "*", "links": []},
            {"name": "text", "type": "STRING", "links": []},
            {"name": "json", "type": "STRING", "links": []},
        ],
    )


def workflow(nodes: list[dict[str, Any]], links: list[list[Any]]) -> dict[str, Any]:
    return {
        "last_node_id": 9,
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


LATENT = workflow(
    [
        node(
            1,
            "EmptyLatentImage",
            0,
            size=[315, 110],
            outputs=[{"name": "LATENT", "type": "LATENT", "links": [1]}],
            widgets_values=[64, 64, 1],
        ),
        status_node(1, "LATENT", 1),
    ],
    [[1, 1, 0, 9, 0, "LATENT"]],
)

MODEL = workflow(
    [
        node(
            1,
            "CourierLoadDiffusionModel",
            0,
            size=[380, 150],
            outputs=[{"name": "MODEL", "type": "MODEL", "links": [1]}],
            widgets_values=["courier_wan_small_bf16.safetensors", "default"],
        ),
        status_node(1, "MODEL", 1),
    ],
    [[1, 1, 0, 9, 0, "MODEL"]],
)


@pytest.fixture
def page(server: ComfyUIHost, browser: Browser) -> Iterator[Page]:
    """ComfyUI's page, ready; every complaint about us fails the test."""
    prepare(server)
    page, trouble = (
        browser.new_page(viewport={"width": 1500, "height": 900}),
        Trouble(server.address),
    )
    trouble.watch(page)
    open_page(page, server.address)
    yield page
    page.close()
    assert trouble.lines == []


@pytest.fixture
def picture(courier_checkout: Paths, request: pytest.FixtureRequest) -> Callable[[Page], Path]:
    """Save what the page shows, for people to look at."""

    def save(page: Page) -> Path:
        return save_picture(page, courier_checkout.logs / f"{request.node.name}.png")

    return save


def load(page: Page, graph: dict[str, Any]) -> None:
    page.evaluate("graph => window.app.loadGraphData(graph)", graph)
    expect(page.locator(TEXT)).to_have_count(1, timeout=WAIT_MS)


def run(page: Page) -> None:
    page.evaluate("() => window.app.queuePrompt(0, 1)")


def text_of(page: Page, part: str) -> str:
    """The node's text, once it contains ``part``."""
    page.wait_for_function(
        "([selector, part]) => document.querySelector(selector)?.value.includes(part)",
        arg=[TEXT, part],
        timeout=WAIT_MS,
    )
    return page.locator(TEXT).input_value()


def test_status_text_appears_on_the_node_after_a_run(
    page: Page, picture: Callable[[Page], Path]
) -> None:
    load(page, LATENT)
    assert "appears here" in page.locator(TEXT).input_value()
    run(page)
    text = text_of(page, "Courier 0")
    picture(page)
    assert text.splitlines()[1].startswith("device  ")
    assert not page.locator(TEXT).is_editable()


def test_status_of_a_loaded_model_names_its_layers(
    page: Page, picture: Callable[[Page], Path]
) -> None:
    load(page, MODEL)
    run(page)
    text = text_of(page, "courier_wan_small_bf16")
    picture(page)
    assert "file     courier_wan_small_bf16.safetensors" in text
    assert "diffusion_model.blocks.0" in text


def test_text_outlives_a_reload_of_the_workflow_and_stays_out_of_the_prompt(page: Page) -> None:
    load(page, LATENT)
    run(page)
    text = text_of(page, "Courier 0")
    saved = page.evaluate("() => window.app.graph.serialize()")
    load(page, saved)
    assert page.locator(TEXT).input_value() == f"(from an earlier run)\n{text}"
    prompt = page.evaluate("async () => (await window.app.graphToPrompt()).output")
    assert list(prompt["9"]["inputs"]) == ["anything"]


def test_hostile_name_is_shown_as_text(page: Page) -> None:
    load(page, LATENT)
    hostile = "<img src=x onerror=window.courierWasHere=1>"
    page.evaluate(
        "text => window.app.graph.getNodeById(9).onExecuted({ text: [text] })",
        hostile,
    )
    assert page.locator(TEXT).input_value() == hostile
    assert page.evaluate("() => window.courierWasHere") is None
