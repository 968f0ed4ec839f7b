"""A report as Markdown, and as a few columns for a terminal. Pure, standard library only."""

from __future__ import annotations

from collections.abc import Sequence

from bench.comparing import Baselines, anon_peak_bytes, highest, link_floor
from bench.records import ContenderRecord, Report, RowRecord, RunRecord
from bench.units import GIB, gib

NONE = "-"
_STEP_HEAD = (
    "row",
    "equal",
    "load s",
    "first step s",
    "both again s",
    "s/step",
    "vs resident",
    "s/step, run 1",
    "GiB streamed/step",
    "link floor s",
    "step / floor",
    "layers",
)
_MEMORY_HEAD = (
    "row",
    "card, peak by driver",
    "torch reserved",
    "torch allocated",
    "RssAnon before load",
    "RssAnon peak",
    "locked",
    "staging",
    "copied",
)
_BUDGET_HEAD = ("row", "budget", "peak by driver", "beyond budget", "Courier's own peak", "s/step")
_SHORT_HEAD = ("", "load s", "first step s", "s/step", "vs resident", "equal", "RssAnon peak GiB")


def markdown(report: Report) -> str:
    """The whole report as a page."""
    latents = _latents(report.rows)
    lines = [f"# {report.date}, {report.machine.get('device', 'no card')}", ""]
    lines += [f"- {name}: {value}" for name, value in report.machine.items()]
    lines += [f"- model: {report.model}", "", *_fenced(report.commands), ""]
    for latent in latents:
        lines += [f"## Latent {latent}", "", *step_table(report.rows, latent), ""]
        lines += ["Memory, GiB:", "", *memory_table(report.rows, latent), ""]
    budgets = budget_table(report.rows, latents)
    if budgets:
        lines += ["## Device budget and measured peak, GiB", "", *budgets, ""]
    problems = [row for row in report.rows if row.problem is not None]
    if problems:
        lines += ["## Without figures", "", *problem_lines(problems), ""]
    return "\n".join([*lines, *NOTES]) + "\n"


NOTES = (
    "s/step is the median of the steps after the third in the last run; ratios are to the resident",
    "row of the same start of the machine. The link floor is the streamed bytes over the measured",
    "copy rate of page-locked memory. The driver's peak counts all that the process took since its",
    "CUDA context was there. Both again: a load and a first step later in the same process, after",
    "the model was let go. What the core streams in a step is what it has not loaded, by its own",
    "count. \"equal\" compares every latent with the resident row's, bit for bit.",
)  # fmt: skip


def step_table(rows: Sequence[RowRecord], latent: str) -> list[str]:
    """Time and traffic of every row at one latent."""
    baselines = Baselines.of(rows)
    lines = [_step_cells(row, latent, baselines) for row in rows if _concerns(row, latent)]
    return table(_STEP_HEAD, lines)


def _step_cells(row: RowRecord, latent: str, baselines: Baselines) -> list[str]:
    if row.contender is None:
        return [row.label, problem_text(row), *[NONE] * (len(_STEP_HEAD) - 2)]
    first, last = _ends(row.contender, latent)
    floor = link_floor(row, last)
    return [
        row.label,
        equal_text(row, latent),
        f"{row.contender.load_seconds:.2f}",
        f"{first.first_seconds:.2f}",
        _number(row.contender.again_seconds if latent == row.contender.latents()[0] else None, 2),
        f"{last.steady_seconds:.4f}",
        _number(baselines.ratio(row, last), 2),
        f"{first.steady_seconds:.4f}",
        _gib(last.streamed_bytes),
        _number(floor, 4),
        _number(last.steady_seconds / floor if floor else None, 2),
        placements_text(last),
    ]


def memory_table(rows: Sequence[RowRecord], latent: str) -> list[str]:
    """Memory of every row that has figures at one latent; the peaks of all its runs there."""
    lines = []
    for row in rows:
        if row.contender is None or not row.contender.runs_of(latent):
            continue
        runs = row.contender.runs_of(latent)
        courier = runs[-1].courier
        lines.append(
            [
                row.label,
                _gib(highest(run.peak.device_bytes for run in runs)),
                _gib(highest(run.peak.reserved_bytes for run in runs)),
                _gib(highest(run.peak.allocated_bytes for run in runs)),
                _gib(row.contender.anon_bytes_before),
                _gib(anon_peak_bytes(row.contender)),
                _gib(courier.locked_bytes if courier else None),
                _gib(courier.staging_bytes if courier else None),
                _gib(courier.copied_bytes if courier else None),
            ]
        )
    return table(_MEMORY_HEAD, lines)


def budget_table(rows: Sequence[RowRecord], latents: Sequence[str]) -> list[str]:
    """Courier rows on a free card: what the budget allowed against what the driver counted."""
    lines = []
    for row in rows:
        if not row.name.startswith("budget-") or row.contender is None:
            continue
        budget = row.device_budget_bytes or 0
        for latent in latents:
            runs = row.contender.runs_of(latent)
            peak = highest(run.peak.device_bytes for run in runs)
            if peak is None or runs[-1].courier is None:
                continue
            courier = runs[-1].courier
            own = courier.device_peak_bytes + (courier.activation_peak_bytes or 0)
            step = f"{runs[-1].steady_seconds:.4f}"
            beyond = f"{(peak - budget) / GIB:+.2f}"
            lines.append([f"{row.label}, {latent}", gib(budget), gib(peak), beyond, gib(own), step])
    return table(_BUDGET_HEAD, lines) if lines else []


def short_table(rows: Sequence[RowRecord], latent: str) -> list[str]:
    """A few aligned columns for a terminal."""
    baselines = Baselines.of(rows)
    lines: list[Sequence[str]] = [_SHORT_HEAD]
    for row in rows:
        if row.contender is None:
            lines.append([row.label, problem_text(row), *[""] * (len(_SHORT_HEAD) - 2)])
        elif row.contender.runs_of(latent):
            cells = _step_cells(row, latent, baselines)
            anon = _gib(anon_peak_bytes(row.contender))
            lines.append([cells[0], *cells[2:6], cells[1], anon])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def problem_lines(rows: Sequence[RowRecord]) -> list[str]:
    """Why rows have no figures, with the end of what they wrote."""
    lines = []
    for row in rows:
        lines.append(f"- {row.label}: {row.problem}")
        lines += [f"  `{line.replace('`', chr(39))}`" for line in row.detail]
    return lines


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; a bar inside a cell is escaped."""
    made = [head, *lines]
    text = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in made]
    return [text[0], "|" + "---|" * len(head), *text[1:]]


def problem_text(row: RowRecord) -> str:
    """Why there are no figures, short: an error has its own lines below the table."""
    return "failed" if row.detail else row.problem or NONE


def equal_text(row: RowRecord, latent: str) -> str:
    assert row.contender is not None
    if not all(run.finite for run in row.contender.runs_of(latent)):
        return "NOT FINITE"
    equal = row.equal.get(latent)
    return NONE if equal is None else "yes" if equal else "NO"


def placements_text(run: RunRecord) -> str:
    if run.courier is None:
        return NONE
    counts = run.courier.placements.items()
    return ", ".join(f"{count} {name}" for name, count in counts if count) or "none"


def _latents(rows: Sequence[RowRecord]) -> list[str]:
    found = [latent for row in rows if row.contender for latent in row.contender.latents()]
    return list(dict.fromkeys(found))


def _concerns(row: RowRecord, latent: str) -> bool:
    return row.contender is None or bool(row.contender.runs_of(latent))


def _ends(contender: ContenderRecord, latent: str) -> tuple[RunRecord, RunRecord]:
    runs = contender.runs_of(latent)
    return runs[0], runs[-1]


def _gib(count_bytes: int | None) -> str:
    return NONE if count_bytes is None else gib(count_bytes)


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _fenced(commands: Sequence[str]) -> list[str]:
    return ["```", *commands, "```"]
