"""The command: options in, an exit status out."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..client.blocking import CourierClient
from ..client.records import RunFailedError
from ..errors import STOPPED_STATUS, CheckError, HeadlessError, RefusedError, UsageError
from ..interrupts import HANG_UP, hang_up, stop
from ..text import make_writable
from .connecting import client_of
from .console import Console
from .options import build_parser
from .reports import plan_text, runs_text, status_text, told
from .workflow_commands import check_command, convert_command, in_turn, run_command

_ASLEEP = "is asleep. Wake"
"""In what ComfyUI says of a model that sleeps; how to wake it from here is ours to say."""


def main(arguments: list[str]) -> int:
    """Run the command. Returns: its exit status; docs/headless.md."""
    make_writable()
    # As exceptions, so that a run is cancelled and a ComfyUI of ours ended on the way.
    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler):
        signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    if HANG_UP is not None and signal.getsignal(HANG_UP) is not signal.SIG_IGN:
        signal.signal(HANG_UP, hang_up)
    try:
        return _answered(arguments)
    except BrokenPipeError:
        # Whoever read our output went away; there is nobody to tell, and Python would try once
        # more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return HeadlessError.exit_status


def _answered(arguments: list[str]) -> int:
    console = Console("--json" in arguments)
    try:
        options = build_parser().parse_args(arguments)
        console = Console(options.json, options.quiet)
        return COMMANDS[options.command](options, console)
    except HeadlessError as error:
        console.failure(error, _more(error))
        if _ASLEEP in str(error):
            console.note("courier.py wake wakes it; so does --wake-before, with the run itself")
        return error.exit_status
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        console.failure(_Stopped("stopped"))
        return STOPPED_STATUS
    except Exception as error:
        traceback.print_exc()
        console.failure(HeadlessError(f"an error of ours ({type(error).__name__}: {error})"))
        return HeadlessError.exit_status


class _Stopped(HeadlessError):
    exit_status = STOPPED_STATUS
    code = "stopped"


def _more(error: HeadlessError) -> dict[str, Any]:
    """What --json tells of a failure beside its code and its sentence."""
    if isinstance(error, CheckError):
        return {"faults": [fault.as_json() for fault in error.faults]}
    if isinstance(error, RunFailedError):
        return {"run": dict(error.run.raw)}
    if isinstance(error, RefusedError):
        return {"status": error.status, "answer": error.body}
    return {}


# Models


def _status(options: argparse.Namespace, console: Console) -> int:
    with client_of(options, console) as client:
        status = client.status()
        models = client.models()
    console.result({**status, "all_models": models}, told(status_text, status, models))
    return 0


def _sleep(options: argparse.Namespace, console: Console) -> int:
    with client_of(options, console) as client, _order_of(client, console):
        receipt = client.sleep(options.models or None, options.level, options.when, options.on_use)
    console.result(receipt, told(_message, receipt))
    return 0


def _wake(options: argparse.Namespace, console: Console) -> int:
    with client_of(options, console) as client, _order_of(client, console):
        receipt = client.wake(options.models or None, options.when)
    console.result(receipt, told(_message, receipt))
    return 0


def _message(receipt: Mapping[str, Any]) -> str:
    message = receipt["message"]
    if not isinstance(message, str):
        raise TypeError(message)
    return message


@contextmanager
def _order_of(client: CourierClient, console: Console) -> Iterator[None]:
    """Ctrl-C ends the order too: one that waits would be carried out when nobody expects it."""
    try:
        yield
    except KeyboardInterrupt:
        answer = in_turn(client.cancel_orders)
        console.note(f"cancelling the order: {told(_message, answer)}")
        raise


def _runs(options: argparse.Namespace, console: Console) -> int:
    with client_of(options, console) as client:
        runs = client.runs()
    console.result([dict(run.raw) for run in runs], told(runs_text, runs))
    return 0


def _cancel(options: argparse.Namespace, console: Console) -> int:
    with client_of(options, console) as client:
        run = client.cancel(options.id)
    # It ends at its next step.
    state = run.state if run.has_ended else f"{run.state}, and told to stop"
    console.result(dict(run.raw), f"run {run.id}: {state}")
    return 0


def _plan(options: argparse.Namespace, console: Console) -> int:
    try:
        from ..plan.dry_run import DryRun, dry_run
    except ImportError as error:
        raise UsageError(
            f"plan needs {error.name}, which this Python does not have; run it with ComfyUI's own"
        ) from None
    asked = DryRun(
        options.model,
        options.card,
        options.vram,
        options.ram,
        options.activations,
        options.link,
        options.measure_link,
    )
    plan = dry_run(asked)
    console.result(plan, plan_text(plan, options.layers))
    return 0 if plan["fits"] else CheckError.exit_status


COMMANDS: Mapping[str, Callable[[argparse.Namespace, Console], int]] = {
    "run": run_command,
    "check": check_command,
    "convert": convert_command,
    "status": _status,
    "runs": _runs,
    "cancel": _cancel,
    "sleep": _sleep,
    "wake": _wake,
    "plan": _plan,
}
