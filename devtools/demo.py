"""The main job, shown: a real ComfyUI runs a workflow whose weights come under small budgets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from devtools.comfyui_client import HttpError
from devtools.comfyui_host import ComfyUIHost
from devtools.console import DevError, Progress, mib, say
from devtools.paths import PACK_NAME, Paths
from devtools.prepared import Prepared

WORKFLOW = "example_workflows/api/courier_wan_t2v_small.json"
STATUS_ROUTE = "/courier/v1/status"
MEASURED_NAMES = {
    "device_peak_bytes": "device, peak",
    "host_locked_bytes": "host, page-locked",
    "host_copied_bytes": "host, copied",
}


def run_demo(
    paths: Paths,
    prepared: Prepared,
    workflow: str | None,
    serve: bool = False,
    port: int | None = None,
) -> int:
    prompt = read_workflow(Path(workflow) if workflow else paths.root / WORKFLOW)
    host = ComfyUIHost(prepared.program, prepared.base, paths.logs / "demo.log", port=port)
    try:
        with Progress("Starting ComfyUI") as progress:
            host.start(progress=progress)
        _check_pack(host)
        pictures = _run_workflow(host, prompt)
        status = read_status(host)
        for line in [*report(status), "", *(f"picture: {picture}" for picture in pictures)]:
            say(line)
        if serve:
            _serve(host)
    finally:
        host.stop()
    return 0


def read_workflow(path: Path) -> dict[str, Any]:
    """A workflow file in API form: node id to class and inputs."""
    try:
        prompt = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DevError(f"cannot read the workflow {path}: {error}") from None
    nodes = prompt.values() if isinstance(prompt, dict) else ()
    if not nodes or not all(isinstance(node, dict) and "class_type" in node for node in nodes):
        raise DevError(
            f"{path} is no workflow in API form; in ComfyUI, use the menu's Export (API)"
        )
    return prompt


def _check_pack(host: ComfyUIHost) -> None:
    """ComfyUI goes on without a pack that it could not import; we do not."""
    failed = [line for line in host.log_text().splitlines() if "(IMPORT FAILED)" in line]
    if any(PACK_NAME in line for line in failed):
        raise DevError(f"ComfyUI could not import the pack, see {host.log}:\n{host.log_tail()}")


def _run_workflow(host: ComfyUIHost, prompt: dict[str, Any]) -> list[Path]:
    with Progress("Running the workflow") as progress:

        def on_poll() -> None:
            host.check_alive()
            progress.show()

        result = host.client.follow(host.client.queue(prompt), on_poll=on_poll)
    pictures = [
        host.base / image["type"] / image["subfolder"] / image["filename"]
        for image in result.images()
    ]
    missing = [picture for picture in pictures if not picture.is_file()]
    if missing or not pictures:
        names = [str(picture) for picture in missing] or "it named none"
        raise DevError(f"the workflow ended, but its pictures are missing: {names}")
    return pictures


def read_status(host: ComfyUIHost) -> dict[str, Any]:
    """The pack's own account of every layer.

    Raises: DevError if the pack does not answer, or has no model to speak of.
    """
    try:
        status = host.client.request(STATUS_ROUTE)
    except HttpError as error:
        raise DevError(
            f"the pack gave no status ({error}); it may have failed to load, see {host.log}:\n"
            f"{host.log_tail()}"
        ) from None
    if not isinstance(status, dict) or not status.get("models"):
        raise DevError(f"{STATUS_ROUTE} names no model after the run: {status}")
    return status


def report(status: dict[str, Any]) -> list[str]:
    """Tables of layers and of budgets against measured peaks; unknown fields are left alone."""
    lines: list[str] = []
    for model in status["models"]:
        name, state = model.get("name", "?"), model.get("state", "?")
        lines += ["", f"{name}: {state}, {_counts(model)}", *_layer_table(model.get("layers", []))]
        lines += _budget_table(model)
    return lines


def _counts(model: dict[str, Any]) -> str:
    sizes = model.get("bytes", {})
    parts = [
        f"{count} {placement} ({mib(sizes.get(placement, 0))})"
        for placement, count in model.get("counts", {}).items()
        if count
    ]
    return ", ".join(parts) or "no layers"


def _layer_table(layers: Iterable[dict[str, Any]]) -> list[str]:
    rows = [("layer", "bytes", "resident", "placement", "in place", "reason")]
    for layer in layers:
        in_place = {True: "yes", False: "no"}.get(layer.get("in_place"), "-")
        size, reason = f"{layer.get('bytes', 0):,}", str(layer.get("reason") or "")
        resident = f"{layer.get('resident_bytes', 0):,}"
        placement = layer.get("placement", "?")
        rows.append((layer.get("name", "?"), size, resident, placement, in_place, reason))
    return _columns(rows, right_aligned={1, 2})


def _budget_table(model: dict[str, Any]) -> list[str]:
    budgets, measured = model.get("budgets", {}), model.get("measured", {})
    rows = [("", "budget", "measured")]
    for key, label in MEASURED_NAMES.items():
        if measured.get(key) is not None:
            budget = budgets.get("device_bytes" if key.startswith("device") else "host_bytes")
            rows.append((label, "none" if budget is None else mib(budget), mib(measured[key])))
    return ["", *_columns(rows, right_aligned={1, 2})]


def _columns(rows: list[tuple[str, ...]], right_aligned: set[int]) -> list[str]:
    widths = [max(len(str(row[index])) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            str(cell).rjust(width) if index in right_aligned else str(cell).ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _serve(host: ComfyUIHost) -> None:
    say(f"\nComfyUI with the pack: {host.address}  (Ctrl-C ends it)")
    try:
        while True:
            host.check_alive()
            time.sleep(0.5)
    except KeyboardInterrupt:
        say("ending ComfyUI")
