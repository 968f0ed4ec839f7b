"""One row at a time: the children that a row needs, and what becomes of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from bench.big_model import ModelFileError
from bench.options import Settings
from bench.processes import ChildError, Deadline, LineProcess
from bench.records import ContenderRecord, RowRecord, contender_from
from bench.rows import Kind, Row, budget_bytes, obstacle
from bench.units import GIB
from devtools.comfyui_install import ensure_base
from devtools.paths import PACK_NAME, checkout

READY_SECONDS = 120.0
HOLD_SECONDS = 120.0
MODEL_SECONDS = 600.0
LINK_SECONDS = 120.0


@dataclass(frozen=True)
class Bench:
    """What all rows of one call share.

    Attributes:
        facts: what bench.link said.
        scratch: for latents, logs and ComfyUI's base directory; gone with the call.
        offered: the model's file as ComfyUI finds it.
    """

    settings: Settings
    ground: machine.Ground
    scratch: Path
    facts: dict[str, Any]
    boot_id: str
    offered: Path

    def child(self, module: str, arguments: Sequence[str], newer: bool = False) -> LineProcess:
        """A child that runs one of our modules."""
        command = [self.ground.interpreter(newer), "-m", module, *arguments]
        environment = self.ground.environment(newer, os.environ)
        log = self.scratch / f"{module}.log"
        return LineProcess(command, environment, self.ground.base, log)

    def without_folders(self, text: str) -> str:
        """``text`` for results that others read: the folders of this machine say nothing there."""
        pack = self.ground.base / "custom_nodes" / PACK_NAME
        for folder in (pack, self.scratch, self.ground.root):
            text = text.replace(f"{folder}{os.sep}", "")
        return text


def prepare(settings: Settings, scratch: Path) -> Bench:
    """The model's file and everything that rows share."""
    paths = checkout()
    base = ensure_base(paths, scratch / "base")
    ground = machine.Ground(
        paths.root, base, settings.comfyui, settings.python, settings.newer, settings.newer_python
    )
    bench = Bench(settings, ground, scratch, {}, machine.boot_id(), settings.model)
    with bench.child("bench.link", []) as child:
        facts = json.loads(child.hear(LINK_SECONDS))
    if settings.shape is not None:
        shape = str(settings.shape)
        with bench.child("bench.big_model", [str(settings.model), "--shape", shape]) as child:
            print(child.hear(MODEL_SECONDS), flush=True)
    elif not settings.model.is_file():
        raise ModelFileError(f"{settings.model} is not there")
    machine.warm(settings.model)
    offered = machine.offer_model(base, settings.model)
    return dataclasses.replace(bench, facts=facts, offered=offered)


@contextlib.contextmanager
def holding(bench: Bench, rows: Sequence[Row]) -> Iterator[LineProcess | None]:
    """The second process, if one of ``rows`` asks for it and there is a card."""
    limited = any(row.limited_card for row in rows) and bench.settings.free_gib
    wanted = limited or any(row.held_host for row in rows)
    if not wanted or not bench.facts.get("cuda"):
        yield None
        return
    with bench.child("bench.hold", []) as holder:
        yield holder


def measure_row(bench: Bench, row: Row, holder: LineProcess | None) -> RowRecord:
    """One row, whatever becomes of it."""
    record = RowRecord(
        name=row.name,
        label=row.label,
        boot_id=bench.boot_id,
        kind=row.kind.value,
        link_bytes_per_second=bench.facts.get("link_bytes_per_second"),
        device_budget_bytes=budget_bytes(row.device_gib) if row.kind is Kind.COURIER else None,
        host_budget_bytes=budget_bytes(row.host_gib) if row.kind is Kind.COURIER else None,
    )
    cuda, available = bool(bench.facts.get("cuda")), machine.available_bytes()
    free_gib, host_gib = bench.settings.free_gib, bench.settings.host_available_gib
    hindrance = obstacle(row, cuda, free_gib, available, host_gib)
    if hindrance is not None:
        return dataclasses.replace(record, problem=hindrance)
    try:
        contender = run_contender(bench, row, holder)
    except ChildError as error:
        detail = tuple(bench.without_folders(line) for line in error.tail)
        return dataclasses.replace(record, problem=bench.without_folders(str(error)), detail=detail)
    return dataclasses.replace(record, contender=contender)


def run_contender(bench: Bench, row: Row, holder: LineProcess | None) -> ContenderRecord:
    """Raises: ChildError for everything that goes wrong with it."""
    deadline = Deadline(bench.settings.row_seconds)
    arguments = contender_arguments(bench, row)
    with bench.child("bench.contender", arguments, row.newer) as child:
        answer = child.hear(min(READY_SECONDS, deadline.left()))
        if answer == "ready":
            with _held(row, bench.settings, holder):
                child.say("go")
                answer = child.hear(deadline.left())
        try:
            data = json.loads(answer)
            if "error" in data:
                raise ChildError(data["error"], child.tail())
            return contender_from(data["contender"])
        except (ValueError, KeyError, TypeError):
            raise ChildError(f"answered {answer[:200]!r}", child.tail()) from None


def contender_arguments(bench: Bench, row: Row) -> list[str]:
    """The contender's command line."""
    settings = bench.settings
    first, *others = settings.latents
    arguments = [f"--kind={row.kind.value}", f"--model={bench.offered}", f"--latent={first}"]
    arguments += [f"--also-latent={latent}" for latent in others]
    arguments += [f"--steps={settings.steps}", f"--runs={settings.runs}"]
    arguments += [f"--cfg={settings.cfg}", f"--lora-rank={settings.lora_rank}"]
    arguments.append(f"--latent-file={bench.scratch / row.name}")
    arguments.append(f"--comfyui-args={settings.comfyui_args} {row.comfyui_args}")
    if row.device_gib is not None:
        arguments.append(f"--device-gib={row.device_gib}")
    if row.host_gib is not None:
        arguments.append(f"--host-gib={row.host_gib}")
    if row.dynamic:
        arguments.append("--dynamic-vram")
    return arguments


@contextlib.contextmanager
def _held(row: Row, settings: Settings, holder: LineProcess | None) -> Iterator[None]:
    """The free memory that ``row`` is to find; given back after it."""
    if holder is None:
        yield
        return
    try:
        if row.limited_card and settings.free_gib:
            _order(holder, f"leave-free {int(settings.free_gib * GIB)}")
        if row.held_host:
            _order(holder, f"leave-host {int(settings.host_available_gib * GIB)}")
        yield
    finally:
        _order(holder, "release")


def _order(holder: LineProcess, command: str) -> None:
    holder.say(command)
    answer = holder.hear(HOLD_SECONDS)
    if not answer.startswith("ok"):
        raise ChildError(f"the memory could not be held: {answer}", holder.tail())
