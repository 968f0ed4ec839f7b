"""The commands that take a workflow: run, check, convert."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..client import calls
from ..client.blocking import CourierClient
from ..client.ends import check_ended_well
from ..client.records import Run, RunFailedError, RunOptions
from ..convert.convert import Converted, to_api
from ..errors import FaultKind, RefusedError, UsageError, WorkflowFileError
from ..interrupts import held_back
from ..text import some_of, text_of
from ..workflow.change import BudgetChoice, Changes, change_workflow
from ..workflow.check import Checked, check_workflow
from ..workflow.load import Form, Workflow, load_workflow
from ..workflow.schema import Catalog
from ..workflow.texts import fill_texts
from .connecting import client_of
from .console import Console
from .reports import T, run_text, sleep_lines, told
from .saving import make_folder, save_files

_LONGEST_NAME = 200
_TURN_SECONDS = 0.5


def run_command(options: argparse.Namespace, console: Console) -> int:
    if options.no_wait and (options.save is not None or options.comfyui is not None):
        raise UsageError("--no-wait goes before there are pictures, or a ComfyUI could be ended")
    if options.on_use is not None and not options.sleep_after:
        raise UsageError("--on-use is for models that --sleep-after puts to sleep; give that too")
    if options.save is not None and not Path(options.save).is_dir() and Path(options.save).exists():
        raise UsageError(f"--save {text_of(options.save)} is no folder")
    workflow = load_workflow(options.workflow)
    with client_of(options, console) as client:
        prompt = _prepared(options, console, client, workflow, must_fit=not options.no_check)
        asked = _run_options(options, workflow)
        if options.save is not None:
            make_folder(Path(options.save))  # whoever cannot have it is not to know after the run
        run = _run_to_its_end(
            client, lambda: client.start(prompt, asked), console, waits=not options.no_wait
        )
        saved = [] if options.save is None else save_files(client, run, Path(options.save))
    value = {**run.raw, "saved": [text_of(str(path)) for path in saved]}
    console.result(value, told(run_text, run, value["saved"]))
    return 0


def _run_options(options: argparse.Namespace, workflow: Workflow) -> RunOptions:
    return RunOptions(
        name=text_of(options.name or workflow.name)[:_LONGEST_NAME] or None,
        # A saved form that says something else than what ran would be a lie in the picture.
        workflow=None if _changes(options).any else workflow.ui,
        wake_before=options.wake_before,
        sleep_after=options.sleep_after,
        on_use=options.on_use or RunOptions.on_use,
        time_limit_seconds=options.time_limit,
    )


def _run_to_its_end(
    client: CourierClient, begin: Callable[[], Run], console: Console, waits: bool
) -> Run:
    """The run at its end, or as it begins if nobody ``waits``.

    Raises: RunFailedError; KeyboardInterrupt once it is cancelled.
    """
    run: Run | None = None
    try:
        with held_back() as stopped:
            run = begin()
        console.note(f"run {run.id}")
        if stopped:
            raise KeyboardInterrupt
        if not waits:
            return run
        return check_ended_well(_at_its_end(client, run.id, console))
    except RunFailedError as error:
        for line in told(sleep_lines, error.run):
            console.note(line)
        raise
    except KeyboardInterrupt:
        if run is None:
            raise
        console.note("stopping the run")
        in_turn(functools.partial(client.cancel, run.id))
        # Until it has stopped, so that the next one finds the card free. Ctrl-C again ends that.
        for event in client.follow(run.id):
            if event.run.has_ended:
                break
        raise


def _at_its_end(client: CourierClient, run_id: str, console: Console) -> Run:
    for event in client.follow(run_id):
        told(console.progress, event.run)
        if event.kind == "end":
            return event.run
    return client.run(run_id)


def in_turn(change: Callable[[], T]) -> T:
    """What a change is answered with, also where others have asked for so much that there is no
    turn for it just now."""
    while True:
        answered, answer = _tried(change)
        if answered:
            return answer
        time.sleep(_TURN_SECONDS)


def _tried(change: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, change()
    except RefusedError as error:
        if error.code != "too_many_requests":
            raise
        return False, None


def check_command(options: argparse.Namespace, console: Console) -> int:
    workflow = load_workflow(options.workflow)
    with client_of(options, console) as client:
        prompt = _prepared(options, console, client, workflow)
        _note_sleepers(client, console)
    text = f"{workflow.name}: {len(prompt)} nodes, nothing is wrong"
    console.result({"name": workflow.name, "nodes": len(prompt), "faults": []}, text)
    return 0


def _note_sleepers(client: CourierClient, console: Console) -> None:
    """A workflow that fits may still be refused, for as long as a model sleeps that it needs."""
    try:
        models = client.models()
    except RefusedError:
        return  # a ComfyUI without Courier, where no model sleeps
    names = [str(model.get("name")) for model in models if model.get("state") == "asleep"]
    if names:
        console.note(f"asleep: {some_of(names)}; run --wake-before wakes what a run needs")


def convert_command(options: argparse.Namespace, console: Console) -> int:
    workflow = load_workflow(options.workflow)
    with client_of(options, console) as client:
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
    """A file whole or not at all; a pipe or a device as it comes, and never replaced."""
    data = f"{text}\n".encode()
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    target = Path(os.path.realpath(path))  # of a link, the file that it leads to
    number, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    partial = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        # mkstemp's are for the owner alone; a new file is as the user's others.
        mode = target.stat().st_mode if target.exists() else 0o666 & ~_umask()
        partial.chmod(stat.S_IMODE(mode))
        partial.replace(target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _prepared(
    options: argparse.Namespace,
    console: Console,
    client: CourierClient,
    workflow: Workflow,
    must_fit: bool = True,
) -> dict[str, Any]:
    """The workflow as it will run: converted, changed and checked."""
    object_info = client.call(calls.object_info())
    if not isinstance(object_info, dict):
        raise RefusedError(f"{client.address} tells of no nodes; is it a ComfyUI?", 200, "no_json")
    catalog = Catalog(object_info)
    converted = to_api(workflow, object_info, _page_version(client, workflow))
    checked, notes = _changed_and_checked(options, converted, catalog)
    if workflow.form is Form.API and workflow.ui is not None and _is_outdated(checked):
        saved = Workflow(Form.UI, workflow.ui, workflow.name, workflow.ui)
        found = _of_the_saved_form(options, client, saved, object_info)
        if found is not None and len(found[0].faults) < len(checked.faults):
            checked, notes = found
            console.note(_SAVED_FORM)
    for note in notes:
        console.note(note)
    if must_fit:
        checked.require()
    return checked.prompt


_SAVED_FORM = (
    "its API form does not fit this ComfyUI; the saved form beside it fits better, and is taken"
)


def _is_outdated(checked: Checked) -> bool:
    """Whether something is wrong that another form of the same workflow may have right. A model or
    a file that is not there is not."""
    missing = (FaultKind.MISSING_MODEL, FaultKind.MISSING_FILE)
    return any(fault.kind not in missing for fault in checked.faults)


def _of_the_saved_form(
    options: argparse.Namespace,
    client: CourierClient,
    workflow: Workflow,
    object_info: dict[str, Any],
) -> tuple[Checked, list[str]] | None:
    """None: it cannot be converted, or lacks what is to be changed."""
    try:
        converted = to_api(workflow, object_info, _page_version(client, workflow))
        return _changed_and_checked(options, converted, Catalog(object_info))
    except (WorkflowFileError, UsageError):
        return None


def _changed_and_checked(
    options: argparse.Namespace, converted: Converted, catalog: Catalog
) -> tuple[Checked, list[str]]:
    changed = change_workflow(converted.prompt, _changes(options), catalog)
    now = datetime.datetime.now()  # as the page takes it: where the person is
    prompt, filled = fill_texts(changed.prompt, converted.nodes, now)
    checked = check_workflow(prompt, catalog, converted.broadcasters)
    return checked, [*converted.notes, *changed.notes, *filled, *checked.notes]


def _page_version(client: CourierClient, workflow: Workflow) -> str | None:
    """Of the page that belongs to the server; None: it does not say, or it does not matter."""
    if workflow.form is Form.API:
        return None
    try:
        stats = client.call(calls.system_stats())
    except RefusedError:
        return None
    system = stats.get("system")
    found = system.get("required_frontend_version") if isinstance(system, dict) else None
    return found if isinstance(found, str) else None


def _changes(options: argparse.Namespace) -> Changes:
    budget = None
    if options.vram is not None or options.ram is not None:
        budget = BudgetChoice(options.vram, options.ram, options.together)
    elif options.together:
        raise UsageError("--together says what --vram and --ram are for; give one of them")
    return Changes(
        [text_of(value) for value in options.values], options.seed, budget, options.courier
    )
