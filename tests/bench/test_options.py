from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.big_model import ensure_model
from bench.options import Settings, parse, read_report
from bench.records import Report, to_json
from bench.units import Latent, ModelShape


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


def test_rows_that_there_are_not_are_refused_before_a_model_is_written(
    comfyui: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settings(comfyui, "--only", "budget-*,core").only == ["budget-*", "core"]
    with pytest.raises(SystemExit):
        settings(comfyui, "--only", "nosuch")
    assert "no row is called nosuch; there are: resident, " in capsys.readouterr().err


def test_a_model_of_another_shape_is_not_replaced_unasked(
    comfyui: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.safetensors"
    shape = ModelShape(1, 128, 256)
    ensure_model(file, shape)
    with pytest.raises(SystemExit):
        settings(comfyui, "--model", str(file))
    assert "is not the default model (40x5120x13824); name its --shape" in capsys.readouterr().err
    assert settings(comfyui, "--model", str(file), "--shape", "1x128x256").shape == shape
    assert settings(comfyui, "--model", str(file), "--as-is").shape is None


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
