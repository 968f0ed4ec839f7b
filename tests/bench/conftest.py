"""Makes ``bench`` importable by name: the repository root itself must stay off ``sys.path``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "bench"


def import_bench() -> None:
    if "bench" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "bench", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench"] = module
    spec.loader.exec_module(module)


import_bench()


@pytest.fixture
def make_row() -> Callable[..., Any]:
    """``make_row(name, step=0.5, ...)``: a row with two runs of one latent."""
    from bench.records import ContenderRecord, CourierRecord, PeakRecord, RowRecord, RunRecord

    def make(
        name: str,
        step: float = 0.5,
        boot_id: str = "boot",
        sha256: str = "same",
        latent: str = "1x2x3",
        streamed_bytes: int | None = None,
        placements: dict[str, int] | None = None,
        peak: PeakRecord | None = None,
        again_seconds: float | None = None,
        **fields: Any,
    ) -> RowRecord:
        courier = CourierRecord(2**30, 2**29, 2**31, 2**28, 0, placements) if placements else None
        run = RunRecord(
            latent=latent,
            step_seconds=(2.0, 1.0, 1.0, step, step),
            total_seconds=5.0,
            streamed_bytes=streamed_bytes,
            sha256=sha256,
            finite=True,
            latent_file="x.pt",
            peak=peak or PeakRecord(),
            courier=courier,
        )
        contender = ContenderRecord(0.25, PeakRecord(), None, 2**30, {}, (run, run), again_seconds)
        known = {"label": name, "kind": "courier", "contender": contender, **fields}
        return RowRecord(name=name, boot_id=boot_id, **known)

    return make
