"""The panel with 300 layers: 1,000 updates leave nothing behind, and what one of them takes."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from playwright.sync_api import expect

from devtools.comfyui_host import ComfyUIHost
from devtools.panel_states import STATES
from devtools.paths import PACK_NAME, Paths

from .panel_stage import Stage

BENCH = (Path(__file__).parent / "scripts" / "panel_speed.js").read_text(encoding="utf-8")
TRIES = 7


def test_1000_updates_add_no_elements(
    server: ComfyUIHost, stage: Stage, courier_checkout: Paths
) -> None:
    stage.show(STATES["300-layers"])
    expect(stage.panel).to_contain_text("300 layers", use_inner_text=True)
    base = f"{server.address}/extensions/{PACK_NAME}/main.js"
    found = stage.page.evaluate(BENCH, [base, TRIES])
    first, update = median(found["first"]), median(found["updates"])
    figures = f"300 layers: first render {first:.1f} ms, update {update:.2f} ms (medians)\n"
    # For people to look at: how quick it is on a machine that others use too fails no test.
    file = courier_checkout.logs / "panel" / "speed.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(figures, encoding="utf-8")
    assert len(found["updates"]) == 1000
    assert found["after"] == found["nodes"], "elements grow"
    assert found["left"] == 0


def test_1000_updates_leave_no_memory_behind(server: ComfyUIHost, stage: Stage) -> None:
    """By the browser's own count, after a collection."""
    stage.show(STATES["300-layers"])
    expect(stage.panel).to_contain_text("300 layers", use_inner_text=True)
    base = f"{server.address}/extensions/{PACK_NAME}/main.js"
    session = stage.page.context.new_cdp_session(stage.page)
    session.send("Performance.enable")

    def used() -> tuple[float, float]:
        session.send("HeapProfiler.collectGarbage")
        metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
        return metrics["JSHeapUsedSize"], metrics["JSEventListeners"]

    stage.page.evaluate(BENCH, [base, 1])
    before = used()
    stage.page.evaluate(BENCH, [base, 1])
    after = used()
    # The rest of the page has a few that come and go; one for each update would be a thousand.
    assert after[1] - before[1] < 100, "listeners are left behind"
    assert after[0] - before[0] < 2 * 2**20
