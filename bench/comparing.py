"""Rows set in relation: ratios, merging of calls, equality of latents. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.records import ContenderRecord, Report, RowRecord, RunRecord

RESIDENT = "resident"


@dataclass(frozen=True)
class Baselines:
    """Steady seconds of the resident row by boot and latent.

    Figures of two starts of a machine are not compared: clocks, neighbours and the page cache
    differ more than contenders do.
    """

    seconds: Mapping[tuple[str, str], float]

    @staticmethod
    def of(rows: Sequence[RowRecord]) -> Baselines:
        found = {
            (row.boot_id, latent): row.contender.runs_of(latent)[-1].steady_seconds
            for row in rows
            if row.name == RESIDENT and row.contender is not None
            for latent in row.contender.latents()
        }
        return Baselines(found)

    def ratio(self, row: RowRecord, run: RunRecord) -> float | None:
        """Of ``run``'s steady step; None without a resident row of that boot and latent."""
        base = self.seconds.get((row.boot_id, run.latent))
        return run.steady_seconds / base if base else None


def merge(earlier: Sequence[Report], now: Report, order: Sequence[str]) -> Report:
    """One report of all calls: a row of a later one takes the place of an earlier one.

    A row without figures takes nobody's place. ``equal`` is worked out, by the latents' hashes,
    for rows whose resident row came from another call of the same boot.

    Args:
        order: names of rows as the table should have them; others follow.
    """
    rows: dict[str, RowRecord] = {}
    commands: list[str] = []
    for report in (*earlier, now):
        for row in report.rows:
            if row.contender is not None or row.name not in rows:
                rows[row.name] = row
        commands += [command for command in report.commands if command not in commands]
    known = [rows[name] for name in order if name in rows]
    others = [row for name, row in rows.items() if name not in order]
    compared = [with_equality(row, rows.get(RESIDENT)) for row in (*known, *others)]
    return replace(now, rows=tuple(compared), commands=tuple(commands))


def with_equality(row: RowRecord, resident: RowRecord | None) -> RowRecord:
    """``row`` with ``equal`` for the latents that it shares with the resident row of its boot.

    What is known already stays: it came from the latents themselves.
    """
    if row.contender is None or resident is None or resident.contender is None:
        return row
    if resident.boot_id != row.boot_id:
        return row
    equal = dict(row.equal)
    for latent in row.contender.latents():
        wanted = _outcomes(resident.contender, latent)
        found = _outcomes(row.contender, latent)
        # With another number of steps another latent comes out, whoever computes it.
        if latent not in equal and {steps for steps, _ in wanted} == {steps for steps, _ in found}:
            equal[latent] = found == wanted
    return replace(row, equal=equal)


def _outcomes(contender: ContenderRecord, latent: str) -> set[tuple[int, str]]:
    """Steps and hash of each run."""
    return {(len(run.step_seconds), run.sha256) for run in contender.runs_of(latent)}


def link_floor(row: RowRecord, run: RunRecord) -> float | None:
    """Seconds in which the link could carry what one step streams; None if nothing is known."""
    if not run.streamed_bytes or not row.link_bytes_per_second:
        return None
    return run.streamed_bytes / row.link_bytes_per_second


def highest(figures: Iterable[int | None]) -> int | None:
    """The highest of those that are known."""
    return max((figure for figure in figures if figure is not None), default=None)


def anon_peak_bytes(contender: ContenderRecord) -> int | None:
    """Highest RssAnon of the load and of all runs."""
    peaks = [contender.load_peak, *(run.peak for run in contender.runs)]
    return highest(peak.anon_bytes for peak in peaks)
