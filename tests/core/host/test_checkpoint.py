from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from offload_core.host import MAX_HEADER_BYTES, file_text, read_header, torch_dtype
from offload_core.values import CheckpointError, CheckpointFormatError

WriteRaw = Callable[..., Path]


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(path: Path) -> str:
    """The text with which the file is refused; it always names the file and a remedy."""
    with pytest.raises(CheckpointFormatError) as caught:
        read_header(path)
    text = str(caught.value)
    assert text.startswith(file_text(path))
    assert "; " in text
    return text


def test_header_says_what_safetensors_says(checkpoint: Path) -> None:
    header = read_header(checkpoint)
    data = checkpoint.read_bytes()
    with safe_open(checkpoint, framework="pt") as file:
        assert header.metadata == file.metadata()
        assert set(header.entries) == set(file.keys())
        for name, found in header.entries.items():
            expected = file.get_tensor(name)
            stored = data[found.file_offset : found.file_offset + found.size_bytes]
            assert (found.name, found.dtype, found.shape) == (
                name,
                expected.dtype,
                tuple(expected.shape),
            )
            assert stored == expected.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_entries_are_in_file_order_whatever_the_header_order(write_raw: WriteRaw) -> None:
    path = write_raw({"b": entry("U8", [3], 2, 5), "a": entry("U8", [2], 0, 2)}, b"abcde")
    header = read_header(path)
    assert list(header.entries) == ["a", "b"]
    assert header.entries["b"].file_offset == header.data_offset + 2


def test_identity_is_that_of_the_file(checkpoint: Path) -> None:
    found = os.stat(checkpoint)
    identity = read_header(str(checkpoint)).identity
    assert (identity.device, identity.inode) == (found.st_dev, found.st_ino)
    assert (identity.size_bytes, identity.mtime_ns) == (found.st_size, found.st_mtime_ns)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("F64", torch.float64),
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2),
        ("I64", torch.int64),
        ("I32", torch.int32),
        ("I16", torch.int16),
        ("I8", torch.int8),
        ("U8", torch.uint8),
        ("BOOL", torch.bool),
        ("C64", torch.complex64),
    ],
)
def test_every_stored_type_becomes_the_torch_type(
    write_raw: WriteRaw, name: str, dtype: torch.dtype
) -> None:
    size = 2 * dtype.itemsize
    path = write_raw({"t": entry(name, [2], 0, size)}, bytes(size))
    assert read_header(path).entries["t"].dtype == dtype


@pytest.mark.parametrize("name", ["U16", "U32", "U64", "F8_E8M0"])
def test_types_of_newer_torch_are_known_when_torch_knows_them(name: str) -> None:
    attribute = {"U16": "uint16", "U32": "uint32", "U64": "uint64", "F8_E8M0": "float8_e8m0fnu"}
    assert torch_dtype(name) == getattr(torch, attribute[name], None)


def test_a_checkpoint_without_tensors_is_a_checkpoint(write_raw: WriteRaw) -> None:
    header = read_header(write_raw(b"{}"))
    assert dict(header.entries) == {}
    assert header.identity.size_bytes == 10


def test_spaces_after_the_header_are_padding(write_raw: WriteRaw) -> None:
    header = read_header(write_raw(b"{}      "))
    assert header.data_offset == 16


def test_a_sound_file_that_begins_like_a_pickle_is_read(write_raw: WriteRaw) -> None:
    path = write_raw(b"{}".ljust(0x280))
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert read_header(path).data_offset == 8 + 0x280


# Case 43: six files that are not what they should be.


def test_a_body_cut_short_is_called_truncated_with_both_sizes(checkpoint: Path) -> None:
    size = checkpoint.stat().st_size
    os.truncate(checkpoint, size - 100)
    text = refusal(checkpoint)
    assert f"is truncated: expected {size} bytes" in text
    assert f"found {size - 100} bytes" in text
    assert "100 bytes are missing; the download did not finish: download it again" in text


def test_a_header_cut_short_is_called_an_unfinished_download(checkpoint: Path) -> None:
    length = int.from_bytes(checkpoint.read_bytes()[:8], "little")
    os.truncate(checkpoint, 60)
    text = refusal(checkpoint)
    assert f"ends inside its header: expected at least {8 + length} bytes, found 60 bytes" in text
    assert "download it again" in text


def test_trailing_bytes_are_called_padding_with_both_sizes(checkpoint: Path) -> None:
    size = checkpoint.stat().st_size
    with checkpoint.open("ab") as file:
        file.write(b"\0\0\0\0")
    text = refusal(checkpoint)
    assert f"is padded: expected {size} bytes" in text
    assert f"found {size + 4} bytes" in text
    assert "4 bytes belong to nothing" in text


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    path.touch()
    assert refusal(path) == f"{path} is empty (0 bytes); download it again"


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"<!DOCTYPE html><html><head><title>Sign in</title>", "is an HTML or XML page"),
        (b"\n\n  <html lang=en>", "is an HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "is a git-lfs pointer"),
        (b"PK\x03\x04\x00\x00\x08\x08\x00\x00archive/data.pkl", "is a zip archive"),
        (b"\x80\x02}q\x00X\x05\x00\x00\x00modelq\x01", "is a Python pickle"),
        (b"GGUF\x03\x00\x00\x00\x10\x00\x00\x00", "is a GGUF file"),
        (b"<", "is an HTML or XML page"),
    ],
)
def test_a_foreign_file_is_named_for_what_it_is(tmp_path: Path, start: bytes, words: str) -> None:
    path = tmp_path / "foreign.safetensors"
    path.write_bytes(start)
    assert words in refusal(path)


def test_an_lfs_pointer_says_how_to_get_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "pointer.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "run `git lfs pull`" in refusal(path)


def test_a_file_written_by_torch_save_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    torch.save({"a": torch.ones(3)}, path)
    assert "is a zip archive, as torch.save writes" in refusal(path)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63 - 1, 2**64 - 1])
def test_an_absurd_header_length_is_refused_before_anything_is_read(
    write_raw: WriteRaw, length: int
) -> None:
    text = refusal(write_raw(b"{}", length=length))
    assert f"claims a header of {length} bytes" in text
    assert "in a file of 10 bytes; at most 100000000 bytes are allowed" in text


@pytest.mark.parametrize("size", [1, 7, 9])
def test_a_file_too_small_for_any_header_says_so(tmp_path: Path, size: int) -> None:
    path = tmp_path / "tiny.safetensors"
    path.write_bytes(bytes(size))
    assert f"has {size} bytes; the smallest safetensors file has 10" in refusal(path)


# Case 43, continued: headers that lie.


def test_overlapping_tensors_are_refused_by_name(write_raw: WriteRaw) -> None:
    path = write_raw({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, bytes(6))
    assert "lets tensor 'b' overlap tensor 'a' by 2 bytes" in refusal(path)


def test_two_tensors_on_the_same_bytes_are_refused(write_raw: WriteRaw) -> None:
    path = write_raw({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, bytes(4))
    assert "lets tensor 'b' overlap tensor 'a' by 4 bytes" in refusal(path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (
            {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 4, 6)},
            "has 2 bytes between tensor 'a' and tensor 'b' that belong to nothing",
        ),
        (
            {"a": entry("U8", [2], 4, 6)},
            "has 4 bytes between the header and tensor 'a' that belong to nothing",
        ),
    ],
)
def test_a_hole_is_refused_as_safetensors_refuses_it(
    write_raw: WriteRaw, header: dict[str, object], words: str
) -> None:
    assert words in refusal(write_raw(header, bytes(6)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[]", "does not begin with '{'"),
        (b'{"a": ', "is not JSON"),
        (b'{"\xff\xfe": 1}', "is not UTF-8 at byte 2"),
        (b'{"a":' + b"[" * 200_000, "is not JSON"),
        (b'{"a": {}, "a": {}}', "names 'a' twice"),
        (b'{"a": {"dtype": "U8", "dtype": "I8"}}', "names 'dtype' twice"),
        (b'{"a": {"dtype": "U8"}}', "tensor 'a' without dtype, shape and data_offsets"),
        (b'{"a": 7}', "tensor 'a' without dtype, shape and data_offsets"),
        (b'{"__metadata__": {"a": 7}}', "__metadata__ that is not a table of text"),
        (b'{"__metadata__": "a"}', "__metadata__ that is not a table of text"),
    ],
)
def test_a_header_that_is_not_one_is_refused(write_raw: WriteRaw, text: bytes, words: str) -> None:
    assert words in refusal(write_raw(text))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "Q4_K"}, "tensor 't' of type 'Q4_K', which torch"),
        ({"dtype": 5}, "tensor 't' of type 5, which torch"),
        ({"shape": [-1, 4]}, "the shape [-1, 4]"),
        ({"shape": [True, 4]}, "the shape [True, 4]"),
        ({"shape": [1.0, 4]}, "the shape [1.0, 4]"),
        ({"shape": "4"}, "the shape '4'"),
        ({"shape": [5]}, "4 bytes; U8 of shape [5] needs 5"),
        ({"shape": [10**30]}, "needs " + str(10**30)),
        ({"dtype": "F32"}, "4 bytes; F32 of shape [4] needs 16"),
        ({"data_offsets": [4, 0]}, "the data_offsets [4, 0]"),
        ({"data_offsets": [-4, 0]}, "the data_offsets [-4, 0]"),
        ({"data_offsets": [0]}, "the data_offsets [0]"),
        ({"data_offsets": None}, "the data_offsets None"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(
    write_raw: WriteRaw, change: dict[str, object], words: str
) -> None:
    assert words in refusal(write_raw({"t": {**entry("U8", [4], 0, 4), **change}}, bytes(4)))


def test_an_unknown_type_says_what_to_do(write_raw: WriteRaw) -> None:
    text = refusal(write_raw({"t": entry("F99", [4], 0, 4)}, bytes(4)))
    assert "update torch, or use a version of the model in another precision" in text


def test_offsets_beyond_the_end_are_a_truncated_file(write_raw: WriteRaw) -> None:
    path = write_raw({"t": entry("U8", [2**62], 0, 2**62)}, b"abc")
    size = path.stat().st_size
    text = refusal(path)
    assert f"is truncated: expected {size - 3 + 2**62} bytes" in text
    assert f"found {size} bytes, {2**62 - 3} bytes are missing" in text


@pytest.mark.parametrize(("name", "words"), [("gone", "No such file"), (".", "Is a directory")])
def test_a_path_that_is_no_file_is_refused_with_the_systems_reason(
    tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(CheckpointError, match=f"cannot be read: {words}.*check the path"):
        read_header(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    with pytest.raises(CheckpointFormatError, match="is a pipe, socket or device and not a file"):
        read_header(path)


# Case 46.

NAMES = {
    "cjk and horse": "模型 x/ä b/tiny model 🐎 (1).safetensors",
    "newline": "two\nlines.safetensors",
    "250 bytes": "模" * 79 + "x.safetensors",
    "composed": "caf\u00e9.safetensors",
    "decomposed": "cafe\u0301.safetensors",
    "ends like deleted": "a (deleted)",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_survives_into_the_header_and_the_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.ones(3)}, path)
    assert read_header(path).path == path
    os.truncate(path, 9)
    assert str(refusal(path)).startswith(f"{path} ")


def test_names_keep_their_unicode_under_the_c_locale(
    tmp_path: Path, run_python: Callable[..., object]
) -> None:
    code = (
        "import sys, json\n"
        "from offload_core.host import read_header, open_mapping, maps_lookup\n"
        "good, bad = sys.argv[1:]\n"
        "assert sys.getfilesystemencoding() == 'ascii' or sys.flags.utf8_mode, 'not the C locale'\n"
        "m = open_mapping(good)\n"
        "t = m.tensor(m.header.entries['a'])\n"
        "assert maps_lookup(t.data_ptr()).path == good\n"
        "try:\n"
        "    read_header(bad)\n"
        "except Exception as error:\n"
        "    sys.stdout.buffer.write(str(error).encode('utf-8'))\n"
    )
    folder = tmp_path / "模型 x"
    folder.mkdir()
    good, bad = folder / "good 🐎\n.safetensors", folder / "bad 🐎 (1).safetensors"
    save_file({"a": torch.ones(3)}, good)
    bad.touch()
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_python(code, good, bad, env=env)
    assert done.returncode == 0, done.stderr.decode()  # type: ignore[attr-defined]
    text = done.stdout.decode()  # type: ignore[attr-defined]
    assert text == f"{bad} is empty (0 bytes); download it again"


def test_header_of_a_real_file_survives_json_with_escapes(write_raw: WriteRaw) -> None:
    name = "blocks.0.模型\U0001f40e"
    path = write_raw(json.dumps({name: entry("U8", [1], 0, 1)}).encode("ascii"), b"x")
    assert list(read_header(path).entries) == [name]
