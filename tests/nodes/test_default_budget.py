from __future__ import annotations

import json
from typing import Any

import pytest

GIB = 2**30


@pytest.fixture
def module(pack: Any) -> Any:
    return pack.module("nodes.default_budget")


@pytest.mark.parametrize(
    ("settings", "device", "host"),
    [
        ({}, None, None),
        ({"Courier.DefaultVramGib": 11.25}, 11.25 * GIB, None),
        ({"Courier.DefaultVramGib": 0, "Courier.DefaultHostGib": -1}, None, None),
        ({"Courier.DefaultHostGib": 0}, None, 0),
        ({"Courier.DefaultVramGib": 8, "Courier.DefaultHostGib": 16}, 8 * GIB, 16 * GIB),
        ({"Courier.DefaultVramGib": "8", "Courier.DefaultHostGib": True}, None, None),
        ({"Courier.DefaultVramGib": -3, "Courier.DefaultHostGib": 1e9}, None, None),
    ],
)
def test_a_default_is_a_figure_or_automatic(
    module: Any, settings: dict[str, Any], device: Any, host: Any
) -> None:
    found = module.default_budget(json.dumps(settings))
    assert (found.device_bytes, found.host_bytes, found.shared) == (device, host, False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "no JSON",
        "[" * 100_000,
        '{"Courier.DefaultVramGib": NaN}',
        '{"Courier.DefaultVramGib": 1' + "0" * 400 + "}",
    ],
)
def test_a_broken_file_is_automatic(module: Any, text: str) -> None:
    assert module.default_budget(text).device_bytes is None


def test_the_settings_are_those_that_the_page_registers(module: Any) -> None:
    from devtools.paths import checkout

    script = (checkout().root / "web" / "panel" / "settings.js").read_text(encoding="utf-8")
    for name in (module.CARD_SETTING, module.HOST_SETTING):
        assert json.dumps(name) in script
