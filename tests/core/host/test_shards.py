from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offload_core.host import resolve_shards
from offload_core.values import CheckpointError, CheckpointFormatError

FIRST, SECOND = "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"


def write_shard(folder: Path, name: str, *tensors: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({tensor: torch.ones(2) for tensor in tensors}, path)
    return path


def write_index(folder: Path, weight_map: object, name: str = "m.safetensors.index.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two shards without an index."""
    return write_shard(tmp_path, FIRST, "a", "b"), write_shard(tmp_path, SECOND, "c")


def test_a_single_file_is_itself_and_is_not_even_opened(tmp_path: Path) -> None:
    path = tmp_path / "not there.safetensors"
    assert resolve_shards(str(path)) == (path,)


def test_an_index_gives_its_shards_in_the_order_of_their_names(pair: tuple[Path, Path]) -> None:
    index = write_index(pair[0].parent, {"c": SECOND, "b": FIRST, "a": FIRST})
    assert resolve_shards(index) == pair


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("indexed", [True, False])
def test_one_shard_stands_for_all(pair: tuple[Path, Path], which: int, indexed: bool) -> None:
    if indexed:
        write_index(pair[0].parent, {"a": FIRST, "b": FIRST, "c": SECOND})
    assert resolve_shards(pair[which]) == pair


def test_a_variant_finds_the_index_of_its_variant(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, "m.fp16-00001-of-00001.safetensors", "a")
    other = write_shard(tmp_path, "extra.safetensors", "b")
    index = write_index(
        tmp_path, {"a": shard.name, "b": other.name}, "m.safetensors.index.fp16.json"
    )
    assert resolve_shards(shard) == resolve_shards(index) == (other, shard)


def test_names_with_newline_and_horse_resolve(tmp_path: Path) -> None:
    names = [f"模型 🐎\n-0000{number}-of-00002.safetensors" for number in (1, 2)]
    paths = tuple(write_shard(tmp_path, name, name) for name in names)
    assert resolve_shards(paths[1]) == paths


@pytest.mark.skipif(os.name != "posix", reason="symbolic links as Hugging Face's cache makes them")
def test_shards_that_are_links_elsewhere_are_accepted(tmp_path: Path) -> None:
    blob = write_shard(tmp_path, "blobs/0123", "a")
    link = tmp_path / FIRST.replace("00002", "00001")
    link.symlink_to(blob)
    assert resolve_shards(link) == (link,)


def test_a_folder_below_the_index_is_inside(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, "sub/x.safetensors", "a")
    assert resolve_shards(write_index(tmp_path, {"a": "sub/x.safetensors"})) == (shard,)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/passwd",
        "sub/../../x",
        "..\\x",
        "C:\\x",
        "C:x",
        "\\\\s\\x",
        "a\0",
        "",
    ],
)
def test_an_index_that_points_outside_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    write_shard(tmp_path, "x.safetensors", "a")
    folder = tmp_path / "folder"
    folder.mkdir()
    expected = re.escape(f"names {name!r}, which is not a file in its own folder")
    with pytest.raises(CheckpointFormatError, match=expected):
        resolve_shards(write_index(folder, {"a": name}))


def test_all_missing_shards_are_listed_at_once(tmp_path: Path) -> None:
    index = write_index(tmp_path, {name: f"{name}.safetensors" for name in "abc"})
    write_shard(tmp_path, "b.safetensors", "b")
    expected = re.escape("needs 2 more shards in its folder: a.safetensors, c.safetensors;")
    with pytest.raises(CheckpointError, match=expected):
        resolve_shards(index)


def test_without_an_index_every_sibling_must_be_there(tmp_path: Path) -> None:
    path = write_shard(tmp_path, "m-00002-of-00003.safetensors", "a")
    expected = "2 more shards in its folder: m-00001-of-00003.safetensors, m-00003-of-00003"
    with pytest.raises(CheckpointError, match=expected):
        resolve_shards(path)


def test_a_shard_numbered_beyond_the_count_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path, "m-00003-of-00002.safetensors", "a")
    with pytest.raises(CheckpointError, match="is numbered 3 of 2; rename it"):
        resolve_shards(path)


def test_a_tensor_missing_from_its_shard_is_refused(pair: tuple[Path, Path]) -> None:
    index = write_index(pair[0].parent, {"a": FIRST, "z": SECOND, "y": SECOND})
    with pytest.raises(CheckpointFormatError, match=r"lacks 2 tensors that .*, the first is 'y'"):
        resolve_shards(index)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_shards_is_refused(tmp_path: Path, indexed: bool) -> None:
    path = write_shard(tmp_path, FIRST, "a", "b")
    write_shard(tmp_path, SECOND, "b")
    if indexed:
        write_index(tmp_path, {"a": FIRST, "b": SECOND})
    with pytest.raises(CheckpointFormatError, match=f"tensor 'b' is in both .* and {SECOND}"):
        resolve_shards(path)


def test_a_damaged_shard_is_named(pair: tuple[Path, Path]) -> None:
    os.truncate(pair[1], pair[1].stat().st_size - 1)
    with pytest.raises(CheckpointFormatError, match=f"{SECOND} is truncated"):
        resolve_shards(pair[0])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON in UTF-8"),
        (b"\xff", "is not JSON in UTF-8"),
        (b"[" * 200_000, "is not JSON in UTF-8"),
        (b"[]", "has no weight_map, or an empty one"),
        (b'{"weight_map": {}}', "has no weight_map, or an empty one"),
        (b'{"weight_map": {"a": 5}}', "has a weight_map that does not give file names"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    index = tmp_path / "m.safetensors.index.json"
    index.write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=f"{words}.*download the index again"):
        resolve_shards(index)


def test_an_index_with_a_byte_order_mark_is_read(pair: tuple[Path, Path]) -> None:
    index = write_index(pair[0].parent, {"a": FIRST, "c": SECOND})
    index.write_bytes(b"\xef\xbb\xbf" + index.read_bytes())
    assert resolve_shards(index) == pair


def test_an_index_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read: No such file.*check the path"):
        resolve_shards(tmp_path / "m.safetensors.index.json")


def test_a_name_that_claims_more_shards_than_any_model_has_is_refused_at_once(
    tmp_path: Path,
) -> None:
    path = write_shard(tmp_path, "z-00001-of-999999999.safetensors", "a")
    with pytest.raises(CheckpointError, match="one of 999999999 shards, more than any model has"):
        resolve_shards(path)
