"""Which contenders there are, and what each needs. Pure, standard library only."""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.units import GIB

CHUNKS_HOST_GIB = 0.11
"""What staging alone takes: seven threads with two chunks of 8 MiB and a page each."""
SMALL_HOST_GIB = 8.0


class Kind(enum.Enum):
    """How a contender loads the model."""

    RESIDENT = "resident"
    """The core's own loader with the whole card free: everything stays on it."""
    CORE = "core"
    """The core's own loader, offloading as it sees fit."""
    COURIER = "courier"


@dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
        device_gib: Courier's device budget; None is automatic.
        host_gib: Courier's host budget; None is automatic.
        limited_card: a second process holds all but the free figure of the suite.
        held_host: a second process holds host memory too.
        newer: runs in the newer ComfyUI.
        dynamic: that ComfyUI's dynamic VRAM is switched on as its main.py does.
        comfyui_args: for ComfyUI's command line.
    """

    name: str
    label: str
    kind: Kind
    device_gib: float | None = None
    host_gib: float | None = None
    limited_card: bool = True
    held_host: bool = False
    newer: bool = False
    dynamic: bool = False
    comfyui_args: str = ""

    @property
    def needs_cuda(self) -> bool:
        """Without a card the core never offloads, and there is no peak to compare a budget with."""
        return self.kind is Kind.CORE or self.held_host or self.name.startswith("budget-")


@dataclass(frozen=True)
class Limits:
    """The figures that rows are made for.

    Attributes:
        model_gib: size of the model's file.
        device_gib: Courier's device budget in rows with a limited card; None is automatic.
        budgets_gib: device budgets of the family that compares them with the measured peak.
        host_available_gib: what the rows with held host memory leave.
        newer: whether a newer ComfyUI was named.
    """

    model_gib: float
    device_gib: float | None
    budgets_gib: Sequence[float]
    host_available_gib: float
    newer: bool


def all_rows(limits: Limits) -> list[Row]:
    """Every row, in the order of the table; the resident one is first."""
    return [
        Row("resident", "core, all resident", Kind.RESIDENT, limited_card=False),
        *_courier_rows(limits),
        Row("core", "core, its own offload", Kind.CORE),
        *(_newer_rows() if limits.newer else ()),
        *_held_host_rows(limits),
        *_budget_rows(limits),
    ]


def _courier_rows(limits: Limits) -> Iterator[Row]:
    ample = limits.model_gib + 1
    for name, words, host_gib in (
        ("ample", "ample", ample),
        ("8gib", f"{SMALL_HOST_GIB:g} GiB", SMALL_HOST_GIB),
        ("chunks", "only chunks", CHUNKS_HOST_GIB),
        ("0", "0", 0.0),
    ):
        label = f"Courier, host {words}"
        yield Row(f"courier-{name}", label, Kind.COURIER, limits.device_gib, host_gib)


def _newer_rows() -> Iterator[Row]:
    yield Row("newer-dynamic", "newer core, dynamic VRAM", Kind.CORE, newer=True, dynamic=True)
    yield Row(
        "newer-core",
        "newer core, dynamic VRAM off",
        Kind.CORE,
        newer=True,
        comfyui_args="--disable-dynamic-vram",
    )


def _held_host_rows(limits: Limits) -> Iterator[Row]:
    words = f"{limits.host_available_gib:g} GiB of RAM left"
    device_gib = limits.device_gib
    yield Row(
        "courier-low-host", f"Courier, {words}", Kind.COURIER, device_gib, None, held_host=True
    )
    yield Row("core-low-host", f"core, {words}", Kind.CORE, held_host=True)
    if limits.newer:
        yield Row(
            "newer-low-host",
            f"newer core, dynamic VRAM, {words}",
            Kind.CORE,
            held_host=True,
            newer=True,
            dynamic=True,
        )


def _budget_rows(limits: Limits) -> Iterator[Row]:
    for budget in limits.budgets_gib:
        yield Row(
            f"budget-{budget:g}",
            f"Courier, device budget {budget:g} GiB",
            Kind.COURIER,
            budget,
            limits.model_gib + 1,
            limited_card=False,
        )


def choose(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows whose names match; all of them without patterns.

    Args:
        patterns: names, or shell patterns such as ``budget-*``.
    Raises: ValueError for a pattern that matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(row.name, pattern) for row in rows):
            names = ", ".join(row.name for row in rows)
            raise ValueError(f"no row is called {pattern}; there are: {names}")
    if not patterns:
        return list(rows)
    return [row for row in rows if any(fnmatch.fnmatchcase(row.name, p) for p in patterns)]


def budget_bytes(budget_gib: float | None) -> int | None:
    """Bytes of a budget as the nodes compute them; None stays automatic."""
    return None if budget_gib is None else int(budget_gib * GIB)


def obstacle(
    row: Row, cuda: bool, free_gib: float, available_bytes: int | None, host_gib: float
) -> str | None:
    """Why ``row`` cannot run on this machine with these figures, or None."""
    if row.needs_cuda and not cuda:
        return "needs CUDA"
    if row.kind is Kind.CORE and not free_gib:
        return "needs a limited card (--free-gib)"
    if row.held_host and available_bytes is not None and available_bytes < host_gib * GIB:
        have = available_bytes / GIB
        return f"needs {host_gib:g} GiB of available RAM, and {have:.1f} GiB is there"
    return None
