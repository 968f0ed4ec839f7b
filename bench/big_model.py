"""Writes a Wan 2.1 t2v transformer of any shape with random weights, tensor by tensor.

``python3 -m bench.big_model FILE [--shape DEPTHxWIDTHxFFN]``: 28.6 GB in bfloat16 by default. The
whole model is never in memory. Values are made on the card where there is one, and scaled so that
a signal keeps its size through the layers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bench.units import GIB, ModelShape, gib
from devtools.model_shapes import Shape, Shapes, wan

DEFAULT_SHAPE = ModelShape(40, 5120, 13824)
MADE_BY = "bench.big_model"
ITEM_BYTES = 2  # bfloat16
PIECE_ITEMS = 128 * 2**20
"""One write: 256 MiB. Its float32 values take 512 MiB where they are made."""
SPARE_BYTES = 256 * 2**20
_ALIGNMENT = 8


class ModelFileError(Exception):
    """The file cannot be written, or is not ours to replace; the text says what to do."""


@dataclass(frozen=True)
class Spread:
    """Values of one tensor: ``shift + scale * normal``."""

    scale: float
    shift: float = 0.0


def spread_of(name: str, shape: Shape) -> Spread:
    """What keeps activations finite and of about one size, by what the tensor is for."""
    if name.endswith(("modulation", ".bias")):
        return Spread(0.05)
    if len(shape) == 1:
        return Spread(0.05, 1.0)
    return Spread(1 / math.sqrt(math.prod(shape[1:])))


def shapes_of(shape: ModelShape) -> Shapes:
    """Every tensor of the model in the order of the file, which is the one that savers use."""
    return dict(sorted(wan(shape.depth, shape.width, shape.ffn).items()))


def header_of(shape: ModelShape) -> bytes:
    """Length and JSON of the safetensors header, padded so that the data is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "made_by": MADE_BY}}
    offset = 0
    for name, dimensions in shapes_of(shape).items():
        end = offset + math.prod(dimensions) * ITEM_BYTES
        entry = {"dtype": "BF16", "shape": list(dimensions), "data_offsets": [offset, end]}
        entries[name] = entry
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def file_bytes(shape: ModelShape) -> int:
    """Size of the whole file."""
    tensors = sum(math.prod(dimensions) for dimensions in shapes_of(shape).values())
    return len(header_of(shape)) + tensors * ITEM_BYTES


def is_ready(path: Path, shape: ModelShape) -> bool:
    """Whether ``path`` is this model already, by its size and header."""
    header = header_of(shape)
    if not path.is_file() or path.stat().st_size != file_bytes(shape):
        return False
    with path.open("rb") as file:
        return file.read(len(header)) == header


def check_replaceable(path: Path) -> None:
    """Raises: ModelFileError if ``path`` is a file that this module did not write."""
    if not path.exists():
        return
    with path.open("rb") as file:
        if f'"made_by":"{MADE_BY}"'.encode() in file.read(4096):
            return
    raise ModelFileError(
        f"{path} is there and is not a benchmark model of the shape asked for; name another path, "
        "or measure this very file with --as-is"
    )


def check_disk(path: Path, needed_bytes: int) -> None:
    """Raises: ModelFileError, with the figures, if the file will not fit."""
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < needed_bytes + SPARE_BYTES:
        raise ModelFileError(
            f"writing {path.name} needs {gib(needed_bytes + SPARE_BYTES)} GiB of disk and "
            f"{gib(free_bytes)} GiB is free; free some, name another folder, or ask for a smaller "
            "--shape"
        )


def ensure_model(path: Path, shape: ModelShape, seed: int = 0) -> bool:
    """Write the model unless it is there. Returns: whether it was written.

    It is on the disk, not only in the page cache, when this returns: rows that are measured next
    would otherwise share the disk with it.

    Raises: ModelFileError.
    """
    if is_ready(path, shape):
        return False
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_disk(path, file_bytes(shape))
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(header_of(shape))
            _write_tensors(file, shapes_of(shape), seed)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return True


def _write_tensors(file: BinaryIO, shapes: Shapes, seed: int) -> None:
    import torch

    cuda = torch.cuda.is_available()
    items = min(PIECE_ITEMS, max(math.prod(shape) for shape in shapes.values()))
    # One page-locked buffer for all: copies into fresh memory would wait for its pages each time.
    buffer = torch.empty(items, dtype=torch.bfloat16, pin_memory=cuda)
    for name, shape in shapes.items():
        for values in _pieces(name, shape, seed, torch.device("cuda" if cuda else "cpu")):
            part = buffer[: values.numel()]
            part.copy_(values)
            file.write(memoryview(part.view(torch.uint8).numpy()))


def _pieces(name: str, shape: Shape, seed: int, device: Any) -> Iterator[Any]:
    """Flat bfloat16 tensors on ``device``; one after the other they fill one tensor of the file."""
    import torch

    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    spread, left = spread_of(name, shape), math.prod(shape)
    while left:
        items = min(left, PIECE_ITEMS)
        values = torch.randn(items, generator=generator, device=device)
        # Narrowed where they were made: half the bytes to bring here.
        yield values.mul_(spread.scale).add_(spread.shift).to(torch.bfloat16)
        left -= items


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.big_model", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", type=ModelShape.parse, default=DEFAULT_SHAPE)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    try:
        written = ensure_model(options.file, options.shape)
    except ModelFileError as error:
        print(f"bench.big_model: {error}", file=sys.stderr)
        return 1
    seconds, size = time.perf_counter() - started, options.file.stat().st_size
    how = f"written in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s" if written else "is there"
    print(f"{options.file.name}: {size / GIB:.2f} GiB, {how}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
