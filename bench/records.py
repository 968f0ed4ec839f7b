"""What was measured, as frozen records and as JSON. Pure, standard library only."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SETTLING_STEPS = 3
"""Steps before the steady ones: the first loads, and plans may still move after it."""


@dataclass(frozen=True)
class PeakRecord:
    """Highest figures of one phase, in bytes; None where the system does not tell.

    Attributes:
        device_bytes: taken on the card since before the load, by the driver's count.
        reserved_bytes: torch's ``max_memory_reserved``.
        allocated_bytes: torch's ``max_memory_allocated``.
        anon_bytes: RssAnon of the process.
    """

    device_bytes: int | None = None
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    anon_bytes: int | None = None


@dataclass(frozen=True)
class CourierRecord:
    """What Courier's own snapshot said after a run, in bytes; layers by placement."""

    device_peak_bytes: int
    activation_peak_bytes: int | None
    locked_bytes: int
    staging_bytes: int
    copied_bytes: int
    placements: Mapping[str, int]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class RunRecord:
    """One call of the sampler.

    Attributes:
        step_seconds: one figure a step; the first counts from the call of the sampler.
        streamed_bytes: weights that cross the link in one steady step; None if nobody knows.
        sha256: of the latent's bytes.
        finite: no NaN and no infinity in the latent.
        latent_file: the name of the file that the latent was saved in.
    """

    latent: str
    step_seconds: Sequence[float]
    total_seconds: float
    streamed_bytes: int | None
    sha256: str
    finite: bool
    latent_file: str
    peak: PeakRecord = PeakRecord()
    courier: CourierRecord | None = None

    @property
    def first_seconds(self) -> float:
        return self.step_seconds[0]

    @property
    def steady_seconds(self) -> float:
        return steady(self.step_seconds)


@dataclass(frozen=True)
class ContenderRecord:
    """One process: its load, its runs, and what it consists of.

    Attributes:
        again_seconds: a second load and its first step after all that, at the first latent.
    """

    load_seconds: float
    load_peak: PeakRecord
    free_bytes_before: int | None
    anon_bytes_before: int | None
    versions: Mapping[str, str]
    runs: Sequence[RunRecord]
    again_seconds: float | None = None

    def runs_of(self, latent: str) -> list[RunRecord]:
        return [run for run in self.runs if run.latent == latent]

    def latents(self) -> list[str]:
        return list(dict.fromkeys(run.latent for run in self.runs))


@dataclass(frozen=True)
class RowRecord:
    """One row of the suite: a contender's figures, or why there are none.

    Attributes:
        boot_id: of the machine's start; figures of different starts are never set in relation.
        problem: why ``contender`` is None, in words.
        equal: by latent, whether all its latents were those of the resident row, bit for bit.
    """

    name: str
    label: str
    boot_id: str
    kind: str
    link_bytes_per_second: float | None = None
    device_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    problem: str | None = None
    detail: Sequence[str] = ()
    contender: ContenderRecord | None = None
    equal: Mapping[str, bool] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Everything that one call of the suite knows, earlier rows included."""

    date: str
    machine: Mapping[str, str]
    model: str
    commands: Sequence[str]
    rows: Sequence[RowRecord]


def steady(step_seconds: Sequence[float]) -> float:
    """Median of the steps after the third; with fewer than five steps, of those after the first."""
    settled = step_seconds[SETTLING_STEPS:]
    # One step alone would say more about what else the machine did then.
    later = settled if len(settled) > 1 else step_seconds[1:]
    return statistics.median(later or step_seconds)


def to_json(report: Report) -> dict[str, Any]:
    return dataclasses.asdict(report)


def report_from(data: Mapping[str, Any]) -> Report:
    """The inverse of ``to_json``; fields of a newer or older suite are passed over.

    Raises: KeyError or TypeError for what is no report at all.
    """
    fields = _known(Report, data)
    return Report(**{**fields, "rows": tuple(row_from(row) for row in data["rows"])})


def row_from(data: Mapping[str, Any]) -> RowRecord:
    contender = data.get("contender")
    made = contender_from(contender) if contender is not None else None
    return RowRecord(**{**_known(RowRecord, data), "contender": made})


def contender_from(data: Mapping[str, Any]) -> ContenderRecord:
    runs = tuple(_run_from(run) for run in data["runs"])
    peak = PeakRecord(**_known(PeakRecord, data["load_peak"]))
    return ContenderRecord(**{**_known(ContenderRecord, data), "runs": runs, "load_peak": peak})


def _run_from(data: Mapping[str, Any]) -> RunRecord:
    fields = _known(RunRecord, data)
    fields["peak"] = PeakRecord(**_known(PeakRecord, data["peak"]))
    courier = data.get("courier")
    fields["courier"] = CourierRecord(**_known(CourierRecord, courier)) if courier else None
    return RunRecord(**fields)


def _known(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in data.items() if name in names}
