from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench import big_model
from bench.big_model import (
    DEFAULT_SHAPE,
    ModelFileError,
    ensure_model,
    file_bytes,
    shapes_of,
    spread_of,
)
from bench.units import ModelShape
from devtools.model_shapes import wan

SMALL = ModelShape(2, 128, 256)


def test_default_shape_is_the_14b_model() -> None:
    assert 28.5e9 < file_bytes(DEFAULT_SHAPE) < 28.7e9


def test_file_has_every_tensor_with_its_shape(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    assert ensure_model(path, SMALL)
    tensors = load_file(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == wan(SMALL.depth, SMALL.width, SMALL.ffn)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert path.stat().st_size == file_bytes(SMALL)
    assert list(tmp_path.iterdir()) == [path]


def test_values_keep_a_signal_of_one_size(tmp_path: Path) -> None:
    ensure_model(tmp_path / "m.safetensors", SMALL)
    for name, tensor in load_file(tmp_path / "m.safetensors").items():
        spread = spread_of(name, tuple(tensor.shape))
        values = tensor.float()
        assert values.isfinite().all()
        if values.numel() > 1000:
            assert math.isclose(values.std().item(), spread.scale, rel_tol=0.1), name
            assert abs(values.mean().item() - spread.shift) < 0.2 * spread.scale, name
    assert spread_of("blocks.0.norm3.weight", (64,)).shift == 1.0


def test_tensor_longer_than_a_piece_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(big_model, "PIECE_ITEMS", 1000)
    ensure_model(tmp_path / "m.safetensors", SMALL)
    weight = load_file(tmp_path / "m.safetensors")["blocks.0.ffn.0.weight"]
    assert not torch.equal(weight.flatten()[:1000], weight.flatten()[1000:2000])


def test_same_model_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    ensure_model(path, SMALL)
    before = path.stat().st_mtime_ns
    assert not ensure_model(path, SMALL)
    assert path.stat().st_mtime_ns == before


def test_model_of_another_shape_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    ensure_model(path, SMALL)
    other = ModelShape(1, 128, 256)
    assert ensure_model(path, other)
    assert load_file(path).keys() == shapes_of(other).keys()


def test_file_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    before = path.read_bytes()
    with pytest.raises(ModelFileError, match="--as-is"):
        ensure_model(path, SMALL)
    assert path.read_bytes() == before


def test_full_disk_is_said_with_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 2**30))
    with pytest.raises(ModelFileError, match=r"needs 26\.\d\d GiB of disk and 1\.00 GiB is free"):
        ensure_model(tmp_path / "m.safetensors", DEFAULT_SHAPE)


def test_failure_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the drive is gone")

    monkeypatch.setattr(big_model, "_write_tensors", fail)
    with pytest.raises(OSError, match="the drive is gone"):
        ensure_model(tmp_path / "m.safetensors", SMALL)
    assert list(tmp_path.iterdir()) == []
