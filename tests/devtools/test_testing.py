"""How many processes the tests run in."""

from __future__ import annotations

import os
import shutil

import pytest

from devtools import testing

GIB = 2**30


def machine(monkeypatch: pytest.MonkeyPatch, cores: int, memory: int, card: bool = False) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    sizes = {"SC_PAGE_SIZE": page, "SC_PHYS_PAGES": memory // page}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if card else None)


@pytest.mark.parametrize(
    ("cores", "gib", "workers"),
    [(1, 24, 1), (2, 24, 2), (3, 24, 3), (16, 128, 4), (16, 16, 3), (16, 8, 1), (16, 4, 1)],
)
def test_each_process_has_a_core_and_its_memory(
    monkeypatch: pytest.MonkeyPatch, cores: int, gib: int, workers: int
) -> None:
    machine(monkeypatch, cores, gib * GIB)
    assert testing._all_at_once()[:2] == ["-n", str(workers)]


def test_where_there_is_a_card_it_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 16, 128 * GIB, card=True)
    assert testing._all_at_once() == []
