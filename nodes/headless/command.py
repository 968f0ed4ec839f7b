"""The command: options in, an exit status out."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from . import calls
from .change import BudgetChoice, Changes, change_workflow
from .check import Checked, check_workflow
from .client import CourierClient
from .console import Console
from .convert import to_api
from .ends import check_ended_well
from .errors import (
    STOPPED_STATUS,
    CheckError,
    HeadlessError,
    RefusedError,
    RunFailedError,
    UsageError,
)
from .launch import find_program, running
from .load import Workflow, load_workflow
from .options import build_parser
from .records import Run, RunOptions
from .reports import plan_text, run_text, runs_text, status_text
from .saving import save_files
from .schema import Catalog
from .text import make_writable, text_of


def main(arguments: list[str]) -> int:
    """Run the command. Returns: its exit status; docs/headless.md."""
    make_writable()
    # As an exception, so that a run is cancelled and a ComfyUI of ours ended on the way.
    signal.signal(signal.SIGTERM, _stop)
    console = Console("--json" in arguments)
    try:
        options = build_parser().parse_args(arguments)
        console = Console(options.json, options.quiet)
        return COMMANDS[options.command](options, console)
    except HeadlessError as error:
        console.failure(error, _more(error))
        return error.exit_status
    except BrokenPipeError:
        # Whoever read our output went away; there is nobody to tell, and Python would try once
        # more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return HeadlessError.exit_status
    except KeyboardInterrupt:
        console.failure(_Stopped("stopped"))
        return STOPPED_STATUS


class _Stopped(HeadlessError):
    exit_status = STOPPED_STATUS
    code = "stopped"


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _more(error: HeadlessError) -> dict[str, Any]:
    """What --json tells of a failure beside its code and its sentence."""
    if isinstance(error, CheckError):
        return {"faults": [fault.as_json() for fault in error.faults]}
    if isinstance(error, RunFailedError):
        return {"run": dict(error.run.raw)}
    if isinstance(error, RefusedError):
        return {"status": error.status, "answer": error.body}
    return {}


# Workflows


def _run(options: argparse.Namespace, console: Console) -> int:
    workflow = load_workflow(options.workflow)
    with _client(options, console) as client:
        prompt = _prepared(options, console, client, workflow, must_fit=not options.no_check)
        run = client.start(
            prompt,
            RunOptions(
                name=text_of(options.name or workflow.name)[:200],
                workflow=workflow.ui,
                wake_before=options.wake_before,
                sleep_after=options.sleep_after,
                on_use=options.on_use,
                time_limit_seconds=options.time_limit,
            ),
        )
        console.note(f"run {run.id}")
        if not options.no_wait:
            run = _followed(client, run, console)
        saved = [] if options.save is None else save_files(client, run, Path(options.save))
    value = {**run.raw, "saved": [text_of(str(path)) for path in saved]}
    console.result(value, run_text(run, value["saved"]))
    return 0


def _followed(client: CourierClient, run: Run, console: Console) -> Run:
    """The run at its end. Raises: RunFailedError; KeyboardInterrupt once it is cancelled."""
    try:
        for event in client.follow(run.id):
            console.progress(event.run)
            if event.kind == "end":
                return check_ended_well(event.run)
        return check_ended_well(client.run(run.id))
    except KeyboardInterrupt:
        console.note("stopping the run")
        client.cancel(run.id)
        # Until it has stopped, so that the next one finds the card free. Ctrl-C again ends that.
        for event in client.follow(run.id):
            if event.run.has_ended:
                break
        raise


def _check(options: argparse.Namespace, console: Console) -> int:
    workflow = load_workflow(options.workflow)
    with _client(options, console) as client:
        prompt = _prepared(options, console, client, workflow)
    text = f"{workflow.name}: {len(prompt)} nodes, nothing is wrong"
    console.result({"name": workflow.name, "nodes": len(prompt), "faults": []}, text)
    return 0


def _convert(options: argparse.Namespace, console: Console) -> int:
    workflow = load_workflow(options.workflow)
    with _client(options, console) as client:
        prompt = _prepared(options, console, client, workflow, must_fit=False)
    text = json.dumps(prompt, indent=2)
    if options.output is None:
        console.result(prompt, text)
        return 0
    try:
        _write(Path(options.output), text)
    except OSError as error:
        raise UsageError(f"--output {text_of(options.output)}: {error.strerror}") from None
    console.note(f"{len(prompt)} nodes, written to {text_of(options.output)}")
    return 0


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(f"{text}\n", encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _prepared(
    options: argparse.Namespace,
    console: Console,
    client: CourierClient,
    workflow: Workflow,
    must_fit: bool = True,
) -> dict[str, Any]:
    """The workflow as it will run: converted, changed and checked."""
    object_info = client.call(calls.object_info())
    catalog = Catalog(object_info)
    converted = to_api(workflow, object_info)
    for warning in converted.warnings:
        console.note(f"comfy-cli: {warning}")
    if must_fit:
        # Also before it is changed: overrides name nodes, and a wrong file has others.
        _require_nodes(converted.prompt)
    changed = change_workflow(converted.prompt, _changes(options), catalog)
    for note in changed.notes:
        console.note(note)
    checked = check_workflow(changed.prompt, catalog)
    for note in checked.notes:
        console.note(note)
    if must_fit:
        checked.require()
    return checked.prompt


def _require_nodes(prompt: Mapping[str, Any]) -> None:
    if not any(isinstance(node, dict) for node in prompt.values()):
        Checked({}, check_workflow(prompt, Catalog({})).faults).require()


def _changes(options: argparse.Namespace) -> Changes:
    budget = None
    if options.vram is not None or options.ram is not None:
        budget = BudgetChoice(options.vram, options.ram, options.together)
    elif options.together:
        raise UsageError("--together says what --vram and --ram are for; give one of them")
    return Changes(
        [text_of(value) for value in options.values], options.seed, budget, options.courier
    )


# Models


def _status(options: argparse.Namespace, console: Console) -> int:
    with _client(options, console) as client:
        status = client.status()
        models = client.call(calls.models())
    console.result({**status, **{"all_models": models["models"]}}, status_text(status, models))
    return 0


def _sleep(options: argparse.Namespace, console: Console) -> int:
    with _client(options, console) as client:
        receipt = client.sleep(options.models or None, options.level, options.when, options.on_use)
    console.result(receipt, str(receipt["message"]))
    return 0


def _wake(options: argparse.Namespace, console: Console) -> int:
    with _client(options, console) as client:
        receipt = client.wake(options.models or None, options.when)
    console.result(receipt, str(receipt["message"]))
    return 0


def _runs(options: argparse.Namespace, console: Console) -> int:
    with _client(options, console) as client:
        runs = client.runs()
    console.result([dict(run.raw) for run in runs], runs_text(runs))
    return 0


def _cancel(options: argparse.Namespace, console: Console) -> int:
    with _client(options, console) as client:
        run = client.cancel(options.id)
    console.result(dict(run.raw), f"run {run.id}: {run.state}")
    return 0


def _plan(options: argparse.Namespace, console: Console) -> int:
    try:
        from .dry_run import ASSUMED_ACTIVATION_GIB, DryRun, dry_run
    except ImportError as error:
        raise UsageError(
            f"plan needs {error.name}, which this Python does not have; run it with ComfyUI's own"
        ) from None
    assumed = ASSUMED_ACTIVATION_GIB if options.activations is None else options.activations
    asked = DryRun(
        options.model,
        options.card,
        options.vram,
        options.ram,
        assumed,
        options.link,
        options.measure_link,
    )
    plan = dry_run(asked)
    console.result(plan, plan_text(plan, options.layers))
    return 0 if plan["fits"] else CheckError.exit_status


COMMANDS: Mapping[str, Callable[[argparse.Namespace, Console], int]] = {
    "run": _run,
    "check": _check,
    "convert": _convert,
    "status": _status,
    "runs": _runs,
    "cancel": _cancel,
    "sleep": _sleep,
    "wake": _wake,
    "plan": _plan,
}


@contextmanager
def _client(options: argparse.Namespace, console: Console) -> Iterator[CourierClient]:
    folder = getattr(options, "comfyui", None)
    if folder is None:
        yield CourierClient(options.server, options.token)
        return
    extra = shlex.split(options.comfyui_args, posix=os.name != "nt")
    program = find_program(folder, options.comfyui_python, extra)
    console.note(f"starting ComfyUI in {text_of(str(program.folder))}")
    with running(program) as client:
        yield client
        console.note("ending ComfyUI")
