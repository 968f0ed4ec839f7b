"""The side panel against a real ComfyUI with real models: what it shows is what is, what it orders
is done, and a server that was killed and came back is noticed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from devtools.comfyui_host import ComfyUIHost
from devtools.page import WAIT_MS, open_page, prepare, save_picture
from devtools.paths import Paths
from devtools.small_workflows import node

from .panel_studio import STATUS, TAB_BUTTON, Gate, Studio, card, gib, number_is, panel, says

LONG_STEPS = 400
"""Enough time to click in, twice."""
SEEN_STEPS = 200
"""Some seconds, with several events in each."""
QUIET_SECONDS = 1.8
"""In which a panel that polls each second asks once at least."""


@pytest.fixture(scope="module")
def servers(
    server_factory: Callable[..., ComfyUIHost], browser: Browser, small_models: Any
) -> Iterator[Studio]:
    original = small_models["wan"]
    file = original.with_name("panel 模型 <b>.safetensors")
    shutil.copyfile(original, file)
    server = server_factory()
    prepare(server, **{"Courier.PollSeconds": 1, "Courier.ConfirmSleepAll": True})
    yield Studio(server, browser, small_models, file)
    server.stop()
    file.unlink()


@pytest.fixture
def studio(servers: Studio) -> Iterator[Studio]:
    """The server, awake and with its own budget; a word of trouble in a page fails the test."""
    yield servers
    lines = servers.close_pages()
    servers.post("wake", when="idle")
    assert lines == []


def test_opening_the_page_and_the_panel_changes_nothing(studio: Studio) -> None:
    studio.run()
    before = studio.server.client.request(STATUS)
    orders = studio.server.client.request("/courier/v1/models")["last_order"]
    page = studio.page()
    says(page, studio.file.stem)
    after = studio.server.client.request(STATUS)
    assert after["models"] == before["models"]
    assert studio.server.client.request("/courier/v1/models")["last_order"] == orders
    assert page.evaluate("() => document.querySelectorAll('.courier-panel b').length") == 0


def test_a_run_moves_cells_and_ends_with_the_figures_of_the_status(studio: Studio) -> None:
    page = studio.page()
    page.evaluate(
        """() => {
          window.seen = new Set();
          window.watch = setInterval(() => {
            for (const cell of document.querySelectorAll('article .courier-cell')) {
              for (const name of cell.classList) window.seen.add(name);
            }
            for (const state of document.querySelectorAll('.courier-state')) {
              window.seen.add(state.textContent);
            }
            const courier = document.querySelector('.courier-facts')?.textContent ?? '';
            if (courier.includes('/s')) window.seen.add('rate');
          }, 20);
        }"""
    )
    studio.run(steps=SEEN_STEPS)
    model = studio.model()
    assert model["counts"]["mapped"] > 0
    assert model["traffic"]["layers_shipped"] > 0
    wanted = {"courier-is-mapped", "courier-is-flight", "courier-is-resident", "running", "rate"}
    seen = set(page.evaluate("() => [...window.seen]"))
    assert wanted <= seen, wanted - seen
    expect(card(page, studio).locator(".courier-on-loaded")).to_be_visible(timeout=15_000)
    expect(card(page, studio)).to_contain_text(gib(model["measured"]["device_bytes"]))
    cells = card(page, studio).locator(".courier-strip .courier-cell")
    for place, count in model["counts"].items():
        expect(
            cells.locator(f"xpath=self::*[contains(@class, 'courier-is-{place}')]")
        ).to_have_count(count)


def test_sleep_empties_the_card_truly_and_wake_restores(
    studio: Studio, courier_checkout: Paths
) -> None:
    studio.run(device_bytes=1 << 30)
    before = studio.model()
    page = studio.page()
    says(page, studio.file.stem)
    held = studio.resident_memory()
    button = card(page, studio).get_by_role("button", name="Sleep")
    expect(button).to_have_text("Sleep")
    button.click()
    expect(page.get_by_text("Freed").first).to_be_visible(timeout=15_000)
    says(page, "asleep, level 1")
    asleep = studio.model()
    assert (asleep["state"], asleep["measured"]["device_bytes"]) == ("asleep", 0)
    expect(card(page, studio)).to_contain_text("0 B of 1.00 GiB")
    freed = before["measured"]["device_bytes"]
    expect(page.get_by_text(f"Freed {gib(freed)} of RAM").first).to_be_visible()
    # On a CPU the card is the process's own memory, of which its allocator keeps what it likes.
    assert studio.resident_memory() < held + freed // 2
    number_is(page, "1")
    save_picture(page, courier_checkout.logs / "panel" / "live-asleep.png")
    card(page, studio).get_by_role("button", name="Wake").click()
    expect(card(page, studio).locator(".courier-on-loaded")).to_be_visible(timeout=15_000)
    assert studio.model()["measured"] == {
        **before["measured"],
        "device_peak_bytes": studio.model()["measured"]["device_peak_bytes"],
    }
    number_is(page, "")


def test_two_tabs_agree(studio: Studio) -> None:
    studio.run()
    one, other = studio.page(), studio.page()
    says(other, studio.file.stem)
    card(one, studio).get_by_role("button", name="Sleep").click()
    says(one, "asleep, level 1")
    says(other, "asleep, level 1")
    card(other, studio).get_by_role("button", name="Wake").click()
    for page in (one, other):
        expect(card(page, studio).locator(".courier-on-loaded")).to_be_visible(timeout=15_000)


def test_the_number_on_the_icon_is_the_same_in_all_pages(studio: Studio) -> None:
    """With the panel open, closed, and with a first answer that is older than what came of it."""
    studio.run()
    opened, (closed, _) = studio.page(), studio.plain_page()
    says(opened, studio.file.stem)
    gate = Gate()
    late, _ = studio.plain_page(before=gate.stand_before)
    gate.wait(late, answers=2)
    studio.post("sleep")
    gate.open()
    pages = (opened, closed, late)
    for page in pages:
        number_is(page, "3")
    studio.post("wake", when="idle")
    for page in pages:
        number_is(page, "")
    studio.post("sleep", on_use="wake")
    for page in pages:
        number_is(page, "3")
    # No order: the run itself wakes what it uses, which is all but the text encoder.
    studio.run()
    for page in pages:
        number_is(page, "1")


def test_cards_keep_their_order_whatever_sleeps(studio: Studio) -> None:
    studio.run()
    page = studio.page()
    says(page, studio.file.stem)
    names = panel(page).locator("article h3")
    before = names.all_inner_texts()
    assert len(before) == 3
    last = studio.server.client.request("/courier/v1/models")["models"][-1]
    for models in ([last["id"]], "all"):
        studio.post("sleep", models=models)
        number_is(page, "1" if models != "all" else "3")
        expect(names).to_have_text(before)
    studio.post("wake", models=[last["id"]], when="idle")
    number_is(page, "2")
    expect(names).to_have_text(before)


def test_sleep_that_was_clicked_during_a_run_waits_for_it_or_is_cancelled(studio: Studio) -> None:
    studio.run()
    page = studio.page()
    prompt_id = studio.server.client.queue(studio.prompt(steps=LONG_STEPS))
    button = card(page, studio).get_by_role("button", name="Sleep after the queue")
    button.click()
    says(page, "Sleep waits for the queue")
    panel(page).get_by_role("button", name="Withdraw").click()
    expect(panel(page).locator(".courier-aloud")).to_contain_text("cancelled while it waited")
    assert studio.model()["state"] == "running"
    button.click()
    says(page, "asleep, level 1", timeout=WAIT_MS)
    finished = studio.server.client.request(f"/history/{prompt_id}")[prompt_id]
    assert finished["status"]["status_str"] == "success", "the run was not disturbed"


def test_a_refused_workflow_is_woken_and_run_again(studio: Studio) -> None:
    studio.run()
    page = studio.page()
    page.evaluate("prompt => window.app.loadApiJson(prompt, 'test')", studio.prompt())
    studio.post("sleep", models=[studio.model()["id"]])
    page.evaluate("() => window.app.queuePrompt(0, 1)")
    notice = page.get_by_role("alertdialog", name="A model sleeps")
    expect(notice).to_contain_text("is asleep", timeout=15_000)
    runs = len(studio.server.client.request("/history"))
    notice.get_by_role("button", name="Wake and run again").click()
    expect(notice).to_have_count(0, timeout=15_000)
    deadline = time.monotonic() + 60
    while len(studio.server.client.request("/history")) == runs:
        assert time.monotonic() < deadline, "it did not run again"
        time.sleep(0.1)
    assert studio.model()["state"] in ("loaded", "running")


def test_a_budget_is_tried_and_applied(studio: Studio, courier_checkout: Paths) -> None:
    studio.run()
    page = studio.page()
    card(page, studio).get_by_role("button", name="Budget").click()
    editor = page.get_by_role("group", name=f"Budget of {studio.file.stem}")
    before = studio.model()
    editor.get_by_label("Card, GiB").fill("")
    says(page, "Everything is on the card; nothing streams.")
    assert studio.model() == before, "a preview changes nothing"
    editor.get_by_label("Card, GiB").fill("0.000001")
    says(page, "Too small: a device budget of")
    editor.get_by_role("button", name="Use the smallest").click()
    says(page, "0 of 8 layers on the card whole")
    save_picture(page, courier_checkout.logs / "panel" / "live-budget.png")
    editor.get_by_role("button", name="Apply").click()
    expect(page.get_by_text("The new budget is in force.").first).to_be_visible(timeout=15_000)
    says(page, "budget set here")
    now = studio.model()
    assert now["asked"]["by"] == "order"
    assert now["measured"]["device_bytes"] < before["measured"]["device_bytes"] + 1
    # What was held under the budget of before would look like a breach of this one.
    assert now["measured"]["device_peak_bytes"] <= now["budgets"]["device_bytes"]
    studio.run()
    assert studio.model()["asked"]["by"] == "order", "it holds over runs"


def test_commands_do_what_the_buttons_do_and_ask_first(studio: Studio) -> None:
    studio.run()
    page, _ = studio.plain_page()

    def order(command: str) -> None:
        page.evaluate(
            "id => void window.app.extensionManager.command.execute(id)", f"Courier.{command}"
        )

    def state_is(state: str) -> None:
        deadline = time.monotonic() + 15
        while studio.model()["state"] != state:
            assert time.monotonic() < deadline, f"it is {studio.model()['state']}"
            time.sleep(0.05)

    order("SleepAll")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Put models to sleep?")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert studio.model()["state"] == "loaded"
    order("SleepAll")
    page.get_by_role("button", name="Confirm").click()
    state_is("asleep")
    page.locator("canvas").first.focus()
    page.keyboard.press("Alt+Shift+W")
    state_is("loaded")


def test_nodes_have_badges_with_the_state(studio: Studio) -> None:
    studio.run()
    page, _ = studio.plain_page()
    prompt = {**studio.prompt(), "20": node("CourierStatus")}
    page.evaluate("prompt => window.app.loadApiJson(prompt, 'test')", prompt)
    texts = """() => Object.fromEntries(window.app.graph.nodes
      .filter(node => node.comfyClass?.startsWith('Courier'))
      .map(node => [node.comfyClass, node.badges.map(
        badge => (typeof badge === 'function' ? badge() : badge).text).join('')]))"""

    def badge_is(kind: str, text: str) -> None:
        page.wait_for_function(
            f"([kind, text]) => ({texts})()[kind]?.includes(text)", arg=[kind, text]
        )

    badge_is("CourierLoadDiffusionModel", "ready")
    studio.post("sleep", models=[studio.model()["id"]])
    badge_is("CourierLoadDiffusionModel", "asleep")
    badge_is("CourierStatus", "1 asleep")


def requests_within(page: Page, seconds: float, act: Callable[[], Any]) -> list[str]:
    """Ours, that a page sends in that time after ``act``."""
    found: list[str] = []
    page.on(
        "request", lambda request: found.append(request.url) if "/courier/" in request.url else None
    )
    act()
    found.clear()
    page.wait_for_timeout(seconds * 1000)
    return [url for url in found if "/courier/" in url]


def test_nothing_is_asked_while_the_tab_is_closed_or_the_page_hidden(studio: Studio) -> None:
    studio.run()
    page = studio.page()
    says(page, studio.file.stem)
    assert len(requests_within(page, QUIET_SECONDS, lambda: None)) >= 2, "it polls while it is seen"
    hide = """state => {
      Object.defineProperty(document, 'visibilityState', { value: state, configurable: true });
      document.dispatchEvent(new Event('visibilitychange'));
    }"""
    assert requests_within(page, QUIET_SECONDS, lambda: page.evaluate(hide, "hidden")) == []
    with page.expect_request("**/courier/v1/status"):
        page.evaluate(hide, "visible")
    button = page.locator(TAB_BUTTON)

    def close() -> None:
        button.click()
        expect(panel(page)).to_have_count(0)

    assert requests_within(page, QUIET_SECONDS, close) == []
    with page.expect_request("**/courier/v1/status"):
        button.click()
    says(page, studio.file.stem)


def test_a_server_that_was_killed_and_came_back_is_noticed(
    studio: Studio, courier_checkout: Paths
) -> None:
    """CASES 62: two tabs, without a reload, with the state read anew. No event is needed for it."""
    studio.run()
    one, other = studio.page(), studio.page()
    for page in (one, other):
        says(page, studio.file.stem)
    boot_id = studio.server.client.request(STATUS)["boot_id"]
    studio.server.stop()
    for page in (one, other):
        says(page, "ComfyUI does not answer. What is shown is from before.", timeout=WAIT_MS)
        expect(card(page, studio).get_by_role("button", name="Sleep")).to_have_attribute(
            "aria-disabled", "true"
        )
    save_picture(one, courier_checkout.logs / "panel" / "live-no-server.png")
    # One of them hears nothing of the websocket, as after the sleep of a laptop.
    other.evaluate(
        "() => { window.app.api.socket.onopen = null; window.app.api.createSocket = () => {}; }"
    )
    studio.server.start()
    assert studio.server.client.request(STATUS)["boot_id"] != boot_id
    for page in (one, other):
        says(page, "ComfyUI was restarted. Everything here was read anew.", timeout=WAIT_MS)
        says(page, "No model is loaded")
    save_picture(one, courier_checkout.logs / "panel" / "live-restarted.png")
    studio.run()
    for page in (one, other):
        says(page, studio.file.stem)


def test_scripts_of_another_version_ask_for_a_reload(studio: Studio) -> None:
    """CASES 62: the browser has kept those of an older pack."""
    page = studio.browser.new_page(viewport={"width": 1500, "height": 1000})
    studio.pages.append(page)
    page.route(
        "**/panel/version.js",
        lambda route: route.fulfill(
            body='export const VERSION = "0.0.1";', content_type="text/javascript"
        ),
    )
    open_page(page, studio.server.address)
    page.locator(TAB_BUTTON).click()
    says(page, "This page has Courier 0.0.1, the server 0.1.0. Reload the page.")
    page.unroute("**/panel/version.js")
    with page.expect_navigation():
        page.get_by_role("button", name="Reload").click()
    page.locator(TAB_BUTTON).wait_for(timeout=WAIT_MS)
