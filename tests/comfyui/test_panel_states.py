"""Every state of the side panel, on the page of a real ComfyUI: looked at, and accessible.

Most of these states are none that a small model on a CPU gets into. So the answers of Courier's
routes are those of ``devtools.panel_states``; the page, the pack's scripts and their door into
ComfyUI are real. What the server itself does is in test_panel_browser.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from devtools.comfyui_host import ComfyUIHost
from devtools.page import open_page, prepare, save_picture
from devtools.panel_states import HOSTILE, LONG, STATES, Model, answers
from devtools.paths import Paths

from .panel_stage import HEIGHT, Stage, violations

WIDTHS = (250, 600)
SIDEBAR = 290
"""As wide as ComfyUI makes it on a screen of 1,500 pixels."""
REFUSE = "message => window.app.api.dispatchCustomEvent('courier.refused', { message })"
THEMES = ("dark", "light")
SENTENCES = {
    "no-server": "ComfyUI does not answer.",
    "loading": "",
    "empty": "No model is loaded",
    "ready": "12.0 GiB",
    "running": "running",
    "falling-asleep": "Putting to sleep: wan (1 of 3 done)",
    "asleep": "asleep, level 1",
    "waking": "Waking: wan (0 of 1 done)",
    "failed": "the device refused 640 MiB",
    "refused": "ready",
    "waiting": "Sleep waits for the queue",
    "unsupported": "Pages cannot be locked in place",
    "cpu": "RAM (ComfyUI runs on the CPU)",
    "older-server": "This server has an older Courier",
    "no-courier": "This server has no Courier that answers",
    "garbage": "The answer was not understood",
    "error": "The answer was not understood: HTTP 500",
    "other-version": "the server 9.9.9. Reload the page.",
    "no-layers": "no repeated blocks were found",
    "one-layer": "1 layer",
    "300-layers": "300 layers",
    "12-models": "model number 11",
    "names": HOSTILE,
}
"""By state, something that has to be read there."""


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", list(STATES))
def test_every_state_is_told_accessible_and_fits(
    pages: Callable[[str], Stage], courier_checkout: Paths, name: str, theme: str
) -> None:
    stage = pages(theme)
    sentence = SENTENCES[name]
    for width in WIDTHS:
        stage.show(STATES[name], width)
        expect(stage.panel).to_contain_text(sentence, use_inner_text=True)
        for part in (stage.panel, *stage.panel.locator(".courier-card").all()):
            wide = part.evaluate("element => element.scrollWidth - element.clientWidth")
            assert wide <= 0, f"{wide} pixels too wide at {width}"
        picture = courier_checkout.logs / "panel" / f"{name}-{theme}-{width}.png"
        clip = {"x": 0, "y": 0, "width": width, "height": HEIGHT}
        save_picture(stage.page, picture, clip=clip)
        assert violations(stage.page, ".courier-panel") == [], f"at {width}"


@pytest.mark.parametrize("theme", THEMES)
def test_the_box_of_a_refused_workflow_is_accessible_and_fits(
    pages: Callable[[str], Stage], courier_checkout: Paths, theme: str
) -> None:
    stage = pages(theme)
    box = stage.page.get_by_role("alertdialog", name="A model sleeps")
    for width in WIDTHS:
        stage.show(STATES["asleep"], width)
        expect(stage.panel).to_contain_text("asleep, level 1", use_inner_text=True)
        stage.page.evaluate(REFUSE, f"{LONG} is asleep. Wake it with POST /courier/v1/wake")
        expect(box).to_be_visible()
        assert box.evaluate("element => element.scrollWidth - element.clientWidth") <= 0
        expect(box.get_by_role("button", name="Wake and run again")).to_be_focused()
        save_picture(stage.page, courier_checkout.logs / "panel" / f"refused-{theme}-{width}.png")
        assert violations(stage.page, ".courier-panel", ".courier-refused") == [], f"at {width}"
        stage.page.keyboard.press("Escape")
        expect(box).to_have_count(0)


def test_the_card_has_one_name_whatever_the_machine_has(stage: Stage) -> None:
    for name in ("ready", "cpu"):
        stage.show(STATES[name])
        expect(stage.panel).to_contain_text(SENTENCES[name], use_inner_text=True)
        expect(stage.panel.locator("dt").first).to_have_text("Card")
        stage.panel.get_by_role("button", name="Budget").click()
        expect(stage.panel.get_by_label("Card, GiB")).to_be_visible()
        expect(stage.panel).not_to_contain_text("Device", use_inner_text=True)
        # Where there is none, that is said.
        help_text = stage.panel.get_by_text("ComfyUI uses no card here")
        expect(help_text).to_be_visible(visible=name == "cpu")


def test_before_anything_was_read_it_says_that_it_reads(
    server: ComfyUIHost, browser: Browser, courier_checkout: Paths
) -> None:
    """On a page of its own: the others have read something."""
    prepare(server)
    page = browser.new_page(viewport={"width": 900, "height": HEIGHT})
    stage = Stage(page)
    stage.answers = STATES["loading"]
    open_page(page, server.address)
    stage.show(STATES["loading"])
    expect(stage.panel).to_contain_text("Reading the status", use_inner_text=True)
    expect(stage.panel).to_have_attribute("aria-busy", "true")
    assert violations(page, ".courier-panel") == []
    save_picture(page, courier_checkout.logs / "panel" / "loading-first.png")
    page.close()


def test_markup_in_a_name_is_text(stage: Stage) -> None:
    stage.show(STATES["names"])
    expect(stage.panel.locator("h3", has_text="<img src=x")).to_have_text(HOSTILE)
    assert stage.panel.locator("img").count() == 0
    assert stage.page.evaluate("() => window.courierWasHere") is None


def test_a_cell_has_a_colour_a_pattern_and_words(stage: Stage) -> None:
    stage.show(answers([Model(places="rpmaP")]))
    cells = stage.panel.locator(".courier-strip .courier-cell")
    expect(cells).to_have_count(6)
    looks = cells.evaluate_all(
        "cells => cells.map(c => getComputedStyle(c).backgroundImage + '|' +"
        " getComputedStyle(c).backgroundColor + getComputedStyle(c, '::after').borderBottomStyle)"
    )
    assert len(set(looks[:5])) == 5, "no two placements look alike"
    labels = cells.evaluate_all("cells => cells.map(c => c.ariaLabel)")
    assert labels[0] == (
        "diffusion_model.blocks.0, 670 MiB, bfloat16: resident. fits the device budget"
    )
    assert "pinned, 13 % on the card. streams from its file pages" in labels[1]
    assert "pinned, 13 % on the card, in use. streams" in labels[4]


def test_the_strip_is_walked_with_the_keyboard_and_read(stage: Stage) -> None:
    stage.show(answers([Model(places="rpm" * 5)]))
    strip = stage.panel.get_by_role("listbox")
    detail = stage.panel.locator(".courier-detail").first
    expect(detail).to_be_hidden()
    strip.focus()
    expect(detail).to_contain_text("diffusion_model.blocks.0,")
    for key, layer in (("ArrowRight", "1"), ("End", "(outside the blocks)"), ("Home", "0")):
        stage.page.keyboard.press(key)
        expect(detail).to_contain_text(layer if layer[0] == "(" else f"blocks.{layer},")
    active = strip.get_attribute("aria-activedescendant")
    assert stage.page.locator(f"#{active}").get_attribute("aria-selected") == "true"
    stage.page.keyboard.press("Tab")
    expect(detail).to_be_hidden()
    strip.locator(".courier-cell").nth(2).hover()
    expect(detail).to_contain_text("blocks.2,")


def test_everything_is_reached_with_the_tab_key(stage: Stage) -> None:
    stage.show(STATES["ready"])
    expect(stage.panel).to_contain_text("WanVAE", use_inner_text=True)
    stage.page.evaluate("() => document.activeElement.blur()")
    seen = []
    for _ in range(12):
        stage.page.keyboard.press("Tab")
        seen.append(
            stage.page.evaluate(
                "() => document.activeElement.closest('.courier-panel') &&"
                " (document.activeElement.ariaLabel || document.activeElement.textContent)"
            )
        )
    reached = [name for name in seen if name]
    for name in ("Sleep all", "Wake all", "Level of sleep", "Sleep: WanVAE", "Budget", "Table"):
        assert name in reached, reached


def test_a_button_that_cannot_be_used_keeps_the_focus_and_says_why(stage: Stage) -> None:
    stage.show(STATES["falling-asleep"])
    button = stage.panel.get_by_role("button", name="Sleep all")
    expect(button).to_have_attribute("aria-disabled", "true")
    why = button.get_attribute("aria-describedby")
    expect(stage.page.locator(f"#{why}")).to_have_text("An order is being carried out.")
    before = list(stage.posts)
    button.focus()
    button.click(force=True)
    stage.page.keyboard.press("Enter")
    assert stage.posts == before
    expect(button).to_be_focused()


def test_while_a_prompt_runs_orders_to_all_say_that_they_wait(stage: Stage) -> None:
    for state, waits in (("running", True), ("ready", False)):
        stage.show(STATES[state])
        for name in ("Sleep all", "Wake all"):
            texts = {f"{name} after the queue": waits, name: not waits}
            for text, is_there in texts.items():
                button = stage.panel.get_by_role("button", name=text, exact=True)
                expect(button).to_have_count(int(is_there))


def test_the_table_is_searched_and_sorted(stage: Stage, courier_checkout: Paths) -> None:
    stage.show(STATES["300-layers"])
    stage.panel.get_by_role("button", name="Table").click()
    rows = stage.panel.locator("tbody tr")
    expect(rows).to_have_count(301)
    stage.panel.get_by_label("Search layers").fill("pinned 12")
    expect(stage.panel).to_contain_text("of 301 layers", use_inner_text=True)
    names = rows.locator("th").all_inner_texts()
    assert names
    assert all("12" in name for name in names)
    stage.panel.get_by_label("Search layers").fill("")
    stage.panel.get_by_role("button", name="Placement").click()
    expect(stage.panel.get_by_role("columnheader", name="Placement")).to_have_attribute(
        "aria-sort", "ascending"
    )
    expect(rows.first).to_contain_text("mapped")
    stage.panel.get_by_role("button", name="Placement").click()
    expect(rows.first).to_contain_text("resident")
    assert violations(stage.page, ".courier-panel") == []
    save_picture(stage.page, courier_checkout.logs / "panel" / "table.png")
    stage.panel.get_by_label("Search layers").fill("no such layer")
    expect(stage.panel).to_contain_text("No layer matches.", use_inner_text=True)


@pytest.mark.parametrize("theme", THEMES)
def test_the_table_shows_all_it_has_at_every_width(
    pages: Callable[[str], Stage], courier_checkout: Paths, theme: str
) -> None:
    """Columns that have no room stand below the name and the placement."""
    stage = pages(theme)
    for width in (250, SIDEBAR, 600):
        stage.show(answers([Model(places="rpPma" * 8)]), width)
        stage.panel.get_by_role("button", name="Table").click()
        frame = stage.panel.get_by_role("region", name="Table of the layers of wan")
        assert frame.evaluate("element => element.scrollWidth - element.clientWidth") <= 0
        row = frame.locator("tbody tr").nth(2)
        for text in ("blocks.2", "670 MiB", "bfloat16", "pinned, 13 % on the card, in use"):
            expect(row.get_by_text(text, exact=True).locator("visible=true")).to_have_count(1)
        why = row.get_by_text("streams from its file pages, locked in place", exact=True)
        expect(why.locator("visible=true")).to_have_count(1)
        expect(row.locator("th")).to_have_attribute("title", "diffusion_model.blocks.2")
        picture = courier_checkout.logs / "panel" / f"table-{theme}-{width}.png"
        save_picture(stage.page, picture, clip={"x": 0, "y": 0, "width": width, "height": HEIGHT})
        assert violations(stage.page, ".courier-panel") == [], f"at {width}"


def test_a_refused_order_is_told_and_nothing_is_lost(stage: Stage) -> None:
    stage.show(STATES["refused"])
    stage.panel.get_by_role("button", name="Sleep: wan").click()
    expect(stage.page.get_by_text("a prompt runs; nothing was changed").first).to_be_visible()
    assert stage.posts[-1] == ("sleep", {"models": ["model-1"], "level": 1, "when": "now"})
    expect(stage.panel.locator(".courier-aloud")).to_contain_text("Not done. a prompt runs")
    expect(stage.panel).to_contain_text("ready", use_inner_text=True)


def test_a_receipt_is_a_toast_in_bytes(stage: Stage) -> None:
    held = {"locked_bytes": 0, "copied_bytes": 0, "staging_bytes": 0}
    gib = 2**30
    receipt = {
        "ok": True, "action": "sleep", "message": "", "seconds": 0.061,
        "models": [
            {
                "id": "model-1", "changed": True, "before": {**held, "device_bytes": 11 * gib},
                "after": {**held, "device_bytes": 0},
            }
        ],
        "machine": {"before": {}, "after": {"device_used_bytes": 412 * 2**20}}, "not_ours": [],
    }  # fmt: skip
    asleep = Model(state="asleep", rest="asleep", level=1, places="m")
    stage.show(answers([Model()], post=(200, receipt)))
    expect(stage.panel).to_contain_text("ready", use_inner_text=True)
    stage.answers = answers([asleep], post=(200, receipt))
    stage.panel.get_by_role("button", name="Sleep: wan").click()
    text = "Freed 11.0 GiB of the card in 0.06 s; 412 MiB belongs to other programs."
    expect(stage.page.get_by_text(text).first).to_be_visible()
    expect(stage.panel.locator(".courier-aloud")).to_have_text(f"Asleep. {text}")


def test_an_order_that_waits_is_withdrawn_and_one_under_way_cancelled(stage: Stage) -> None:
    # Narrow: the toasts of the tests before lie over a wider one for some seconds.
    stage.show(STATES["falling-asleep"], 250)
    expect(stage.panel.get_by_role("button", name="Withdraw")).to_have_count(0)
    expect(stage.panel.get_by_role("button", name="Cancel")).to_be_visible()
    stage.show(STATES["waiting"], 250)
    expect(stage.panel).to_contain_text("An order waits for the queue.", use_inner_text=True)
    stage.panel.get_by_role("button", name="Withdraw").click()
    expect(stage.panel).to_contain_text("Sleep waits", use_inner_text=True)
    assert stage.posts[-1] == ("cancel", {})


def plan(**more: Any) -> dict[str, Any]:
    """A plan for the model of the state "ready": its pinned layers all on the card."""
    layers = Model(places="r" * 32 + "m" * 8).status(1)["layers"]
    figures = {"device_bytes": 20 * 2**30, "host_bytes": 16 * 2**30}
    return {
        "model": "model-1", "fits": True, "message": "", "asked": figures,
        "smallest": {"device_bytes": 2**31, "host_bytes": None},
        "planned": {"device_bytes": 2**34, "activation_bytes": 2**30, "host_locked_bytes": 0},
        "counts": {}, "bytes": {}, "changes": 20, "layers": layers, **more,
    }  # fmt: skip


def test_a_budget_is_seen_before_it_is_applied(stage: Stage, courier_checkout: Paths) -> None:
    stage.show(answers([Model()], post=(200, plan())))
    stage.panel.get_by_role("button", name="Budget").click()
    editor = stage.panel.get_by_role("group", name="Budget of wan")
    card = editor.get_by_label("Card, GiB")
    expect(card).to_have_value("11.25")
    expect(card).to_be_focused()
    card.fill("20")
    expect(editor).to_contain_text("32 of 40 layers on the card whole", use_inner_text=True)
    expect(editor).to_contain_text("20 layers change.", use_inner_text=True)
    body = {"model": "model-1", "device_gib": 20, "host_gib": 16}
    assert stage.posts[-1] == ("plan", body)
    expect(editor.locator(".courier-is-new")).to_have_count(20)
    assert violations(stage.page, ".courier-panel") == []
    save_picture(stage.page, courier_checkout.logs / "panel" / "budget.png")
    stage.answers = answers([Model()], post=(200, plan(applied="now")))
    editor.get_by_role("button", name="Apply").click()
    expect(stage.page.get_by_text("The new budget is in force.").first).to_be_visible()
    assert stage.posts[-1] == ("budget", {**body, "when": "now"})
    expect(editor).to_have_count(0)


def test_too_small_a_budget_offers_the_smallest(stage: Stage, courier_checkout: Paths) -> None:
    text = "a device budget of 1.00 GiB is too small"
    misfit = plan(fits=False, message=text, layers=[], planned=None)
    stage.show(answers([Model()], post=(200, misfit)))
    stage.panel.get_by_role("button", name="Budget").click()
    editor = stage.panel.get_by_role("group", name="Budget of wan")
    editor.get_by_label("Card, GiB").fill("1")
    expect(editor).to_contain_text(f"Too small: {text}", use_inner_text=True)
    apply = editor.get_by_role("button", name="Apply")
    expect(apply).to_have_attribute("aria-disabled", "true")
    assert violations(stage.page, ".courier-panel") == []
    save_picture(stage.page, courier_checkout.logs / "panel" / "budget-too-small.png")
    editor.get_by_role("button", name="Use the smallest, 2 GiB").click()
    expect(editor.get_by_label("Card, GiB")).to_have_value("2")
    editor.get_by_label("Card, GiB").fill("many")
    expect(editor).to_contain_text("Type a number of GiB between 0 and 1024", use_inner_text=True)
    expect(editor.get_by_label("Card, GiB")).to_have_attribute("aria-invalid", "true")
    before = len(stage.posts)
    stage.page.keyboard.press("Enter")
    assert len(stage.posts) == before
    stage.page.keyboard.press("Escape")
    expect(editor).to_have_count(0)
    expect(stage.panel.get_by_role("button", name="Budget")).to_be_focused()


def test_a_slow_answer_is_waited_for_and_a_stale_one_is_dropped(stage: Stage) -> None:
    """Closing the panel breaks off what is under way; the next opening reads anew."""
    stage.show(STATES["loading"])
    stage.show(STATES["ready"])
    expect(stage.panel).to_contain_text("WanVAE", use_inner_text=True)


def test_another_boot_is_noticed_and_said_until_it_was_seen(stage: Stage) -> None:
    stage.show(STATES["ready"])
    expect(stage.panel).to_contain_text("WanVAE", use_inner_text=True)
    stage.answers = answers([], boot_id="c" * 32)
    stage.page.evaluate("() => window.app.api.dispatchCustomEvent('reconnected')")
    expect(stage.panel).to_contain_text(
        "ComfyUI was restarted. Everything here was read anew.", use_inner_text=True
    )
    expect(stage.panel).to_contain_text("No model is loaded", use_inner_text=True)
    stage.panel.get_by_role("button", name="Dismiss").click()
    expect(stage.panel).not_to_contain_text("was restarted", use_inner_text=True)
    stage.show(answers([], boot_id="c" * 32))


def test_chinese(server: ComfyUIHost, browser: Browser, courier_checkout: Paths) -> None:
    prepare(server, **{"Comfy.Locale": "zh"})
    try:
        page = browser.new_page(viewport={"width": 900, "height": HEIGHT})
        stage = Stage(page)
        open_page(page, server.address)
        stage.show(STATES["asleep"], 250)
        expect(stage.panel).to_contain_text("休眠, 1 级", use_inner_text=True)
        expect(stage.panel.get_by_role("button", name="全部唤醒")).to_be_visible()
        save_picture(page, courier_checkout.logs / "panel" / "chinese.png")
        page.close()
    finally:
        prepare(server, **{"Comfy.Locale": "en"})


def test_reduced_motion_stands_still(stage: Stage) -> None:
    stage.page.emulate_media(reduced_motion="reduce")
    stage.show(STATES["running"])
    expect(stage.panel).to_contain_text("running", use_inner_text=True)
    moves = "() => document.getAnimations().some(a => a.effect.target.closest('.courier-panel'))"
    assert not stage.page.evaluate(moves)
    stage.page.emulate_media(reduced_motion="no-preference")
    stage.show(STATES["running"])
    expect(stage.panel).to_contain_text("running", use_inner_text=True)
    assert stage.page.evaluate(moves)
