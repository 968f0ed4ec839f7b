"""Texts that the page fills in when it queues."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from ..conftest import Headless

NOW = datetime.datetime(2026, 3, 4, 5, 6, 7)


@pytest.fixture
def texts(headless: Headless) -> Any:
    return headless.module("workflow.texts")


def filled(texts: Any, prefix: str, inputs: Any = None) -> str:
    prompt = {
        "1": {"class_type": "KSampler", "inputs": {"seed": 42, "cfg": 3.0, **(inputs or {})}},
        "2": {"class_type": "SaveImage", "inputs": {"filename_prefix": prefix}},
    }
    nodes = [
        texts.NamedNode("1", ("KSampler", "My sampler"), {"seed": 1, "cfg": 2.5, "steps": 20}),
        texts.NamedNode("9", (None, "Off"), {"text": "a/b:c", "on": True}),
    ]
    found, notes = texts.fill_texts(prompt, nodes, NOW)
    text = found["2"]["inputs"]["filename_prefix"]
    assert (text != prefix) == bool(notes)
    return str(text)


@pytest.mark.parametrize(("prefix", "text"), [
    ("%date:yyyy-MM-dd%/x", "2026-03-04/x"),
    ("%date:d-M-yy h_m_s%", "4-3-26 5_6_7"),
    ("%date:d.M.yy%", "4"),
    ("%date:yyyy.MM%", "%date:yyyy.MM%"),
    ("%date:hhmmss yyy%", "050607 yyy"),
    ("%KSampler.seed%_run", "42_run"),
    ("%My sampler.cfg%", "3"),
    ("%KSampler.steps%", "20"),
    ("%Off.text%_%Off.on%", "a_b_c_true"),
    ("%width%_%Nobody.seed%_%KSampler.none%_100%", "%width%_%Nobody.seed%_%KSampler.none%_100%"),
])  # fmt: skip
def test_a_prefix_is_filled_in_as_the_page_does_it(texts: Any, prefix: str, text: str) -> None:
    assert filled(texts, prefix) == text


def test_what_a_link_gives_is_not_known_and_the_saved_value_stands(texts: Any) -> None:
    assert filled(texts, "%KSampler.seed%", {"seed": ["7", 0]}) == "1"


def test_only_the_prefix_of_what_saves_is_filled_in(texts: Any) -> None:
    prompt = {"1": {"class_type": "Other", "inputs": {"filename_prefix": "%date:yyyy%"}}}
    assert texts.fill_texts(prompt, [], NOW) == (prompt, ())
