"""The header of a safetensors file: what lies where, checked before one weight is touched.

Ours and not the library's, because our own mapping needs absolute offsets, and because a file that
will not load deserves a sentence about *that file*. What is accepted is what safetensors accepts.
Source: the safetensors file format.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import torch

from ..values import CheckpointError, CheckpointFormatError
from .identity import FileIdentity, file_text, sizes_text

MAX_HEADER_BYTES = 100_000_000
"""The library's own cap: a larger figure is a damaged or foreign file, not a large model."""

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_DAMAGED = "the file is damaged: download or convert it again"
_FOREIGN = {
    b"version https://git-lfs": (
        "a git-lfs pointer, not the weights themselves",
        "run `git lfs pull`, or download the real file",
    ),
    b"PK\x03\x04": (
        "a zip archive, as torch.save writes (.pt, .pth, .ckpt)",
        "convert it to safetensors first",
    ),
    b"\x80": (
        "a Python pickle, as old versions of torch.save wrote (.pt, .pth, .ckpt)",
        "convert it to safetensors first",
    ),
    b"GGUF": ("a GGUF file", "use a loader for GGUF, or the safetensors version of the model"),
    b"<": (
        "an HTML or XML page, as a download link gives when it wants a login",
        "download the file again from the model's own page",
    ),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint. ``file_offset`` counts from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file_offset: int
    size_bytes: int


@dataclass(frozen=True)
class CheckpointHeader:
    """A checked header. ``entries`` are in the order in which their bytes lie in the file."""

    path: Path
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    identity: FileIdentity
    data_offset: int


def read_header(path: str | os.PathLike[str]) -> CheckpointHeader:
    """The header of one safetensors file.

    Raises: CheckpointFormatError when the file is not what it must be, CheckpointError when the
        system will not let it be read. Both name the file and what to do.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a directory says what it is
            # Opening a pipe that nobody writes to would wait for ever.
            raise CheckpointFormatError(
                f"{file_text(path)} is a pipe, socket or device and not a file; choose a model file"
            )
        with path.open("rb") as file:
            identity = FileIdentity.of(file.fileno())
            text = _read_json_text(path, file, identity.size_bytes)
    except OSError as error:
        raise CheckpointError(
            f"{file_text(path)} cannot be read: {error.strerror}; check the path, its permissions "
            "and the disk"
        ) from error
    data_offset = _LENGTH_BYTES + len(text)
    metadata, described = _parse(path, text)
    entries = sorted(
        (_entry(path, name, value, data_offset) for name, value in described.items()),
        key=lambda entry: (entry.file_offset, entry.size_bytes),
    )
    _check_layout(path, entries, data_offset, identity.size_bytes)
    return CheckpointHeader(
        path=path,
        entries=MappingProxyType({entry.name: entry for entry in entries}),
        metadata=MappingProxyType(metadata),
        identity=identity,
        data_offset=data_offset,
    )


def torch_dtype(name: str) -> torch.dtype | None:
    """The torch dtype that safetensors calls ``name``; None if this torch has none."""
    found = getattr(torch, _DTYPES.get(name, ""), None)
    return found if isinstance(found, torch.dtype) else None


# By name, because an older torch lacks some of them and must still import this.
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


def _broken(path: Path, what: str, remedy: str = _DAMAGED) -> CheckpointFormatError:
    return CheckpointFormatError(f"{file_text(path)} {what}; {remedy}")


def _read_json_text(path: Path, file: BinaryIO, file_bytes: int) -> bytes:
    if file_bytes == 0:
        raise _broken(path, "is empty (0 bytes)", "download it again")
    start = file.read(512)
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    needed = _LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or needed > file_bytes:
        # Only now: the length of a sound file may begin with the same bytes as a pickle.
        _refuse_foreign(path, start)
    if file_bytes < _LENGTH_BYTES + 2:
        raise _broken(
            path, f"has {file_bytes} bytes; the smallest safetensors file has 10", _DAMAGED
        )
    if length > MAX_HEADER_BYTES:
        raise _broken(
            path,
            f"claims a header of {sizes_text(length)} in a file of {sizes_text(file_bytes)}; at "
            f"most {MAX_HEADER_BYTES} bytes are allowed",
            "it is damaged or not a safetensors file: download it again",
        )
    if needed > file_bytes:
        raise _broken(
            path,
            f"ends inside its header: expected at least {sizes_text(needed)}, found "
            f"{sizes_text(file_bytes)}",
            "the download did not finish: download it again",
        )
    file.seek(_LENGTH_BYTES)
    text = file.read(length)
    if len(text) < length:
        raise _broken(path, f"ended after {len(text)} of {length} header bytes while it was read")
    return text


def _refuse_foreign(path: Path, start: bytes) -> None:
    stripped = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    for magic, (what, remedy) in _FOREIGN.items():
        if stripped.startswith(magic):
            raise _broken(path, f"is {what}", remedy)


def _parse(path: Path, text: bytes) -> tuple[dict[str, str], dict[str, object]]:
    """The metadata and the undecoded entries."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise _broken(path, f"names {key!r} twice in its header")
            found[key] = value
        return found

    if not text.startswith(b"{"):
        _refuse_foreign(path, text)
        raise _broken(path, "has a header that does not begin with '{'")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise _broken(path, f"has a header that is not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"has a header that is not JSON ({error})") from error
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(path, f"has a {_METADATA} that is not a table of text")
    return metadata, header


def _entry(path: Path, name: str, value: object, data_offset: int) -> TensorEntry:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise _broken(path, f"describes tensor {name!r} without dtype, shape and data_offsets")
    dtype = torch_dtype(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise _broken(
            path,
            f"holds tensor {name!r} of type {value['dtype']!r}, which torch {torch.__version__} "
            "does not know",
            "update torch, or use a version of the model in another precision",
        )
    shape, span = value["shape"], value["data_offsets"]
    if not _counts(shape):
        raise _broken(path, f"gives tensor {name!r} the shape {shape!r}")
    if not _counts(span) or len(span) != 2 or span[0] > span[1]:
        raise _broken(path, f"gives tensor {name!r} the data_offsets {span!r}")
    begin, end = span
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes != end - begin:
        raise _broken(
            path,
            f"gives tensor {name!r} {end - begin} bytes; {value['dtype']} of shape {shape} "
            f"needs {size_bytes}",
        )
    return TensorEntry(name, dtype, tuple(shape), data_offset + begin, size_bytes)


def _counts(value: object) -> bool:
    # bool is an int to Python and not to the format.
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(
    path: Path, entries: list[TensorEntry], data_offset: int, file_bytes: int
) -> None:
    """Every byte after the header belongs to exactly one tensor, and none is missing."""
    end, before = data_offset, "the header"
    for entry in entries:
        if entry.file_offset < end:
            raise _broken(
                path,
                f"lets tensor {entry.name!r} overlap {before} by {end - entry.file_offset} bytes",
            )
        if entry.file_offset > end:
            raise _broken(
                path,
                f"has {entry.file_offset - end} bytes between {before} and tensor "
                f"{entry.name!r} that belong to nothing",
            )
        end, before = entry.file_offset + entry.size_bytes, f"tensor {entry.name!r}"
    sizes = f"expected {sizes_text(end)}, found {sizes_text(file_bytes)}"
    if file_bytes < end:
        raise _broken(
            path,
            f"is truncated: {sizes}, {end - file_bytes} bytes are missing",
            "the download did not finish: download it again",
        )
    if file_bytes > end:
        raise _broken(
            path,
            f"is padded: {sizes}, {file_bytes - end} bytes belong to nothing",
            "the file was altered or damaged: download it again",
        )
