"""Runs the contenders one after the other and writes a table of them.

``python3 -m bench.suite --model FILE`` from the repository root; docs/benchmarks.md explains rows
and options. Each row is a fresh process. A second process holds the card, so that a limited row
finds exactly the free memory that was asked for.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import machine, tables
from bench.big_model import ModelFileError
from bench.comparing import RESIDENT, merge, with_equality
from bench.options import Settings, parse
from bench.processes import ChildError, LineProcess
from bench.records import Report, RowRecord, to_json
from bench.rows import Row, all_rows, choose
from bench.running import Bench, holding, measure_row, prepare
from bench.units import GIB
from devtools.paths import checkout


def run_suite(settings: Settings, command: str) -> Report:
    """Measure, print and write. Rows that fail are rows; only what concerns all of them raises.

    Raises: ModelFileError, ChildError (no model, or no torch), ValueError (no such row).
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="courier-bench-") as folder:
        bench = prepare(settings, Path(folder).resolve())
        rows = all_rows(settings.limits())
        chosen, order = choose(rows, settings.only), [row.name for row in rows]
        now = Report(
            date=str(datetime.date.today()),
            machine=machine.describe(bench.facts, bench.ground.root),
            model=_model_text(settings),
            commands=(command,),
            rows=(),
        )
        report = merge(settings.merge, now, order)
        with holding(bench, chosen) as holder:
            for record in measured(bench, chosen, holder, started):
                now = dataclasses.replace(now, rows=(*now.rows, record))
                report = merge(settings.merge, now, order)
                write(settings, report)  # after each row: a call that is cut short keeps the others
    return report


def measured(
    bench: Bench, rows: Sequence[Row], holder: LineProcess | None, started: float
) -> Iterator[RowRecord]:
    """The rows' records, each as soon as it is there."""
    settings = bench.settings
    resident: RowRecord | None = None
    for row in rows:
        limit = settings.stop_after_seconds
        if limit is not None and time.monotonic() - started > limit:
            say(f"{row.name}: not started, the time of this call is over")
            continue
        record = measure_row(bench, row, holder)
        if row.name == RESIDENT:
            resident = record
        record = _compare_latents(record, resident, bench.scratch)
        if row.held_host and record.contender is not None:
            machine.warm(settings.model)  # the held memory pushed the file out
        yield record
        say(_row_text(record))


def write(settings: Settings, report: Report) -> None:
    """The Markdown page and, beside it, the JSON that --merge takes."""
    settings.out.mkdir(parents=True, exist_ok=True)
    stem = settings.out / f"{report.date}-{settings.name}"
    text = json.dumps(to_json(report), indent=1) + "\n"
    stem.with_suffix(".json").write_text(text, encoding="utf-8")
    stem.with_suffix(".md").write_text(tables.markdown(report), encoding="utf-8")


def say(text: str) -> None:
    print(text, flush=True)


def _compare_latents(record: RowRecord, resident: RowRecord | None, scratch: Path) -> RowRecord:
    """``equal`` by torch.equal, of the latents that this call has on disk."""
    if record.contender is None or resident is None or resident.contender is None:
        return record
    try:
        import torch
    except ImportError:
        return with_equality(record, resident)  # this interpreter only starts the others
    equal = {}
    for latent in record.contender.latents():
        wanted = resident.contender.runs_of(latent)
        if wanted:
            runs = (*wanted, *record.contender.runs_of(latent))
            first, *others = (torch.load(scratch / run.latent_file) for run in runs)
            equal[latent] = all(torch.equal(other, first) for other in others)
    return dataclasses.replace(record, equal=equal)


def _row_text(record: RowRecord) -> str:
    if record.contender is None:
        return f"{record.name}: {record.problem}"
    steps = ", ".join(
        f"{run.latent} {run.first_seconds:.2f} s then {run.steady_seconds:.4f} s/step"
        for run in record.contender.runs
    )
    return f"{record.name}: load {record.contender.load_seconds:.2f} s; {steps}"


def _model_text(settings: Settings) -> str:
    size = f"{settings.model.stat().st_size / GIB:.2f} GiB"
    shape = f"Wan 2.1 t2v {settings.shape} (depth x width x ffn), bf16, random"
    return f"{size}, {shape if settings.shape else 'as it was'}"


def main(arguments: list[str]) -> int:
    settings = parse(arguments)
    command = machine.command_text("bench.suite", arguments, checkout().root)
    try:
        report = run_suite(settings, command)
    except (ChildError, ModelFileError, ValueError) as error:
        say(f"bench.suite: {error}")
        for line in getattr(error, "tail", ()):
            say(f"  {line}")
        return 1
    say("\n" + tables.markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
