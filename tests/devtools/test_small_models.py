from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from devtools import small_models
from devtools.small_models import (
    MANIFEST_NAME,
    SmallModel,
    small_model_set,
    write_all,
    write_sd3,
    write_sd3_lora,
    write_wan,
    write_wan_lora,
)


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first = write_wan(tmp_path / "a.safetensors", depth=2, seed=5)
    again = write_wan(tmp_path / "b.safetensors", depth=2, seed=5)
    assert first.read_bytes() == again.read_bytes()


def test_other_seed_gives_other_weights(tmp_path: Path) -> None:
    first = load_file(write_wan(tmp_path / "a.safetensors", depth=1, seed=1))
    other = load_file(write_wan(tmp_path / "b.safetensors", depth=1, seed=2))
    name = "blocks.0.ffn.0.weight"
    assert not torch.equal(first[name], other[name])


def test_deeper_model_has_the_same_first_blocks(tmp_path: Path) -> None:
    short = load_file(write_wan(tmp_path / "a.safetensors", depth=1))
    deep = load_file(write_wan(tmp_path / "b.safetensors", depth=3))
    assert all(torch.equal(tensor, deep[name]) for name, tensor in short.items())


def test_fp8_file_has_narrow_blocks_and_a_wide_rest(tmp_path: Path) -> None:
    fp8 = torch.float8_e4m3fn
    tensors = load_file(write_wan(tmp_path / "a.safetensors", depth=1, dtype=fp8))
    narrow = {name for name, tensor in tensors.items() if tensor.dtype == fp8}
    assert "blocks.0.self_attn.q.weight" in narrow
    assert all(name.startswith("blocks.") for name in narrow)
    assert tensors["head.head.weight"].dtype == torch.bfloat16
    assert all(tensors[name].float().isfinite().all() for name in narrow)


def test_width_that_is_no_multiple_of_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 128, not 100"):
        write_wan(tmp_path / "a.safetensors", width=100)


@pytest.mark.parametrize("kind", ["wan", "sd3"])
def test_lora_changes_every_matrix_of_every_block_by_as_much_as_it_is(
    tmp_path: Path, kind: str
) -> None:
    pairs = {"wan": (write_wan, write_wan_lora), "sd3": (write_sd3, write_sd3_lora)}
    write, write_lora = pairs[kind]
    path = write(tmp_path / "model.safetensors", depth=2)
    model = load_file(path)
    lora = load_file(write_lora(tmp_path / "lora.safetensors", path))
    stems = {name.rsplit(".lora_", 1)[0].removeprefix("diffusion_model.") for name in lora}
    expected = {
        name.removesuffix(".weight")
        for name, tensor in model.items()
        if "blocks." in name and name.endswith(".weight") and tensor.ndim == 2
    }
    assert stems == expected
    for stem in stems:
        down = lora[f"diffusion_model.{stem}.lora_A.weight"].float()
        up = lora[f"diffusion_model.{stem}.lora_B.weight"].float()
        ratio = (up @ down).std() / model[f"{stem}.weight"].float().std()
        assert 0.1 < ratio < 3


def test_lora_for_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    save_file({"x.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no block matrices"):
        write_wan_lora(tmp_path / "lora.safetensors", tmp_path / "model.safetensors")


@pytest.fixture
def small_set(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A set of one file; the list fills with each writing of it."""
    written: list[str] = []

    def write(path: Path) -> Path:
        written.append(path.name)
        return write_wan(path, depth=1)

    def one_file(_: Path) -> list[SmallModel]:
        return [SmallModel("wan", "diffusion_models/w.safetensors", "wan depth=1", write)]

    monkeypatch.setattr(small_models, "small_model_set", one_file)
    return written


def test_set_is_written_once(tmp_path: Path, small_set: list[str]) -> None:
    assert write_all(tmp_path) == write_all(tmp_path)
    assert small_set == ["w.safetensors"]


def test_other_recipe_shortened_or_lost_file_is_written_anew(
    tmp_path: Path, small_set: list[str]
) -> None:
    path = write_all(tmp_path)["wan"]
    manifest = tmp_path / MANIFEST_NAME
    entry = json.loads(manifest.read_text())
    entry["diffusion_models/w.safetensors"]["recipe"] = "another"
    manifest.write_text(json.dumps(entry))
    write_all(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    write_all(tmp_path)
    path.unlink()
    write_all(tmp_path)
    manifest.write_text("{ half")
    write_all(tmp_path)
    assert len(small_set) == 5


def test_interrupted_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: dict[str, torch.Tensor], path: Path, **__: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(small_models, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        write_wan(tmp_path / "a.safetensors", depth=1)
    assert list(tmp_path.iterdir()) == []


def test_keys_and_files_of_the_set_are_unique(tmp_path: Path) -> None:
    models = small_model_set(tmp_path)
    assert len({small.key for small in models}) == len(models)
    assert len({small.file for small in models}) == len(models)
