from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.options import Settings, parse, read_report
from bench.records import Report, to_json
from bench.units import Latent


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    folder = tmp_path / "program"
    (folder / "comfy").mkdir(parents=True)
    (folder / "comfy" / "sd.py").touch()
    return folder


def settings(comfyui: Path, *arguments: str) -> Settings:
    return parse(["--model", "m.safetensors", "--comfyui", str(comfyui), *arguments])


def test_model_alone_is_the_whole_thing(comfyui: Path) -> None:
    found = settings(comfyui)
    assert found.latents == [Latent(5, 60, 104), Latent(1, 60, 104)]
    assert found.budgets_gib == [4.0, 6.0, 8.0, 12.0]
    assert (found.free_gib, found.device_gib, found.newer) == (12.0, 12.0, None)
    assert found.model.is_absolute()


@pytest.mark.parametrize(("text", "expected"), [("auto", None), ("11.25", 11.25), ("0", 0.0)])
def test_device_budget_may_differ_from_the_free_memory(
    comfyui: Path, text: str, expected: float | None
) -> None:
    assert settings(comfyui, "--device-gib", text).device_gib == expected


def test_card_that_is_not_limited_leaves_the_budget_automatic(comfyui: Path) -> None:
    assert settings(comfyui, "--free-gib", "0").device_gib is None


def test_folder_that_is_no_comfyui_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settings(tmp_path)
    assert "is not a ComfyUI; 'python3 dev.py demo' makes" in capsys.readouterr().err


def test_earlier_report_is_read_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(to_json(Report("2026-01-02", {}, "m", ("c",), ()))))
    assert read_report(file).commands == ["c"]
    file.write_text("{}")
    with pytest.raises(ValueError, match="is no report of this suite"):
        read_report(file)
