"""What the log says of a load: one line, for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def line(pack: Any, make_engine: Callable[..., Any]) -> Callable[..., str]:
    """``line(layers, device_bytes=None)``: of a model of 4 layers, loaded."""
    values = pack.module("offload_core.values")
    module = pack.module("nodes.models.load_line")

    def of(
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        kept: int = 0,
        patched: int = 0,
    ) -> str:
        engine = make_engine(4)
        engine.load(values.Budget(device_bytes=device_bytes))
        text = module.load_line("it", engine.snapshot(), 0, patched)
        engine.unload()
        assert "\n" not in text
        assert len(text) < 400
        return str(text)

    return of


def test_what_is_resident_whole_is_said_in_a_few_words(line: Callable[..., str]) -> None:
    text = line()
    assert text.startswith("it: ")
    assert text.endswith("resident, nothing streams")
    assert line(patched=3).endswith("nothing streams; 3 weights are patched at use")


def test_what_streams_is_said_with_the_reason(line: Callable[..., str]) -> None:
    text = line(device_bytes=1536)
    for word in ("resident, with", "of slots for", "pinned", "mapped", "pageable that stream"):
        assert word in text
    assert "the device budget is 1.50 KiB" in text
    assert "not all is pinned: its weights have no usable bytes in the file" in text


def test_what_is_kept_for_the_run_is_said(pack: Any, make_engine: Callable[..., Any]) -> None:
    module = pack.module("nodes.models.load_line")
    values = pack.module("offload_core.values")
    engine = make_engine(4)
    engine.load(values.Budget(device_bytes=1536))
    text = module.load_line("it", engine.snapshot(), 5 << 30, 0)
    assert "the device budget is 1.50 KiB, 5.00 GiB of it for the run itself" in text
    engine.unload()


def test_a_name_with_a_line_break_stays_one_line(
    pack: Any, make_engine: Callable[..., Any]
) -> None:
    module = pack.module("nodes.models.load_line")
    assert "\n" not in module.load_line("a\nb", make_engine(2).snapshot(), 0, 0)


@pytest.mark.parametrize(
    ("reason", "brief"),
    [
        (
            "the host budget is used up: of what streams 1 GiB are locked in place, 2 GiB stream",
            "the host budget is used up",
        ),
        ("the host budget is 0; streams from the file", "the host budget is 0"),
        ("pages cannot be locked: no right to", "pages cannot be locked: no right to"),
    ],
)
def test_of_a_reason_what_holds_for_one_layer_is_left_out(
    pack: Any, make_engine: Callable[..., Any], reason: str, brief: str
) -> None:
    module = pack.module("nodes.models.load_line")
    values = pack.module("offload_core.values")
    engine = make_engine(4)
    engine.load(values.Budget(device_bytes=1536))
    snapshot = engine.snapshot()
    engine.unload()
    layers = tuple(dataclasses.replace(layer, reason=reason) for layer in snapshot.layers)
    text = module.load_line("it", dataclasses.replace(snapshot, layers=layers), 0, 0)
    assert text.endswith(f"; not all is pinned: {brief}")
