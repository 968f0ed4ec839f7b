"""Which weights can be used where they lie in the file, as the engine decides it at a load."""

from __future__ import annotations

from collections.abc import Iterable

from ....offload_core.host import TensorEntry
from ....offload_core.values import size_text


def lies_well(entry: TensorEntry) -> bool:
    """Whether it begins at a multiple of its type's size. A file is mapped from a page's beginning,
    so places in it lie as addresses will; with a header of odd length, hardly any weight does."""
    return entry.file_offset % entry.dtype.itemsize == 0


def copied_text(entries: Iterable[TensorEntry]) -> str:
    """What is copied into RAM for that reason, and what helps; nothing where it is nothing."""
    loose = [entry for entry in entries if not lies_well(entry)]
    if not loose:
        return ""
    size = size_text(sum(entry.size_bytes for entry in loose))
    return (
        f"; {len(loose)} tensors ({size}) do not begin at a multiple of their type's size in the "
        "file and are copied into RAM: saved anew with safetensors, they are used in place"
    )
