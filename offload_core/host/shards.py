"""Which files make up one model: a single checkpoint, or the shards that an index names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..values import CheckpointError, CheckpointFormatError
from .checkpoint import CheckpointHeader, read_header
from .identity import file_text

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors", re.DOTALL)
# "model.safetensors.index.json", and with a variant "model.safetensors.index.fp16.json".
_INDEX = re.compile(r".+\.safetensors\.index(\.[^.]+)?\.json", re.DOTALL)


def resolve_shards(path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """All files of the model that ``path`` is, or is one shard or the index of.

    Shards come in the order of their names. The headers of shards are read and compared with the
    index; of a single file nothing is read.

    Raises: CheckpointError naming every missing shard at once; CheckpointFormatError for a damaged
        index, for one that names files outside its folder, and for a tensor that no shard or more
        than one shard holds.
    """
    path = Path(path)
    if _INDEX.fullmatch(path.name):
        return _by_index(path)
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return (path,)
    for index in _index_names(shard["stem"]):
        if path.with_name(index).is_file():
            return _by_index(path.with_name(index))
    return _by_number(path, shard)


_MOST_SHARDS = 10_000
"""Names claim anything, and each shard costs a look at the disk."""


def _index_names(stem: str) -> tuple[str, ...]:
    plain = f"{stem}.safetensors.index.json"
    base, dot, variant = stem.rpartition(".")
    return (plain, f"{base}.safetensors.index.{variant}.json") if base and dot else (plain,)


def _by_index(index: Path) -> tuple[Path, ...]:
    weight_map = _read_weight_map(index)
    names = sorted(set(weight_map.values()))
    for name in names:
        _refuse_outside(index, name)
    paths = tuple(index.parent / name for name in names)
    _refuse_missing(index, paths)
    headers = [read_header(path) for path in paths]
    _refuse_doubles(headers)
    for name, header in zip(names, headers, strict=True):
        absent = sorted(
            key for key, shard in weight_map.items() if shard == name and key not in header.entries
        )
        if absent:
            raise CheckpointFormatError(
                f"{file_text(header.path)} lacks {len(absent)} tensors that {file_text(index)} "
                f"places in it, the first is {absent[0]!r}; download index and shards again, from "
                "the same version of the model"
            )
    return paths


def _by_number(path: Path, shard: re.Match[str]) -> tuple[Path, ...]:
    count, width = int(shard["count"]), len(shard["number"])
    if count > _MOST_SHARDS:
        raise CheckpointError(
            f"{file_text(path)} is named as one of {count} shards, more than any model has; rename "
            "it as it was downloaded"
        )
    paths = tuple(
        path.with_name(f"{shard['stem']}-{number:0{width}d}-of-{shard['count']}.safetensors")
        for number in range(1, count + 1)
    )
    if path not in paths:
        raise CheckpointError(
            f"{file_text(path)} is numbered {int(shard['number'])} of {count}; rename it as it was "
            "downloaded"
        )
    _refuse_missing(path, paths)
    _refuse_doubles(read_header(one) for one in paths)
    return paths


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise CheckpointError(
            f"{file_text(index)} cannot be read: {error.strerror}; check the path and permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _broken(index, f"is not JSON in UTF-8 ({error})") from error
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _broken(index, "has no weight_map, or an empty one")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise _broken(index, "has a weight_map that does not give file names")
    return weight_map


def _refuse_outside(index: Path, name: str) -> None:
    # Both readings: an index made on Windows must not climb out on Linux, nor the reverse.
    readings = (PurePosixPath(name), PureWindowsPath(name))
    inside = all(not reading.anchor and ".." not in reading.parts for reading in readings)
    if not inside or "\0" in name or not readings[0].parts:
        raise _broken(index, f"names {name!r}, which is not a file in its own folder")


def _refuse_missing(named_by: Path, paths: Iterable[Path]) -> None:
    missing = [file_text(path.name) for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{file_text(named_by)} needs {len(missing)} more shards in its folder: "
            f"{', '.join(missing)}; download them too"
        )


def _refuse_doubles(headers: Iterable[CheckpointHeader]) -> None:
    holders: dict[str, CheckpointHeader] = {}
    for header in headers:
        for name in header.entries:
            if name in holders:
                raise CheckpointFormatError(
                    f"tensor {name!r} is in both {file_text(holders[name].path)} and "
                    f"{file_text(header.path.name)}; download all shards again, from the same "
                    "version of the model"
                )
            holders[name] = header


def _broken(index: Path, what: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"{file_text(index)} {what}; download the index again")
