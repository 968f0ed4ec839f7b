"""One read-only, shared mapping of a checkpoint, and tensors that lie straight on it.

Shared and read-only is the one kind that can be page-locked in place without a copy; a private one
costs anonymous memory, or hangs the process (docs/engine.md, "Page locks"). Python's
``ACCESS_READ`` asks for exactly that on every system, and holds one descriptor for as long as the
mapping lives.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch

from ..values import (
    CheckpointChangedError,
    CheckpointError,
    MappingError,
    align_down,
    whole_pages,
)
from .checkpoint import CheckpointHeader, TensorEntry, read_header
from .identity import (
    FileIdentity,
    check_not_rewritten,
    check_unchanged,
    difference_text,
    file_text,
    sizes_text,
)
from .process_memory import MemoryKind, memory_kind

PAGE_BYTES = mmap.PAGESIZE

ReadAt = Callable[[memoryview, int], int]
"""Fill the memory, in part or whole, with the file's bytes from an offset; 0 at its end."""


class FileMapping:
    """A whole checkpoint in our address space, without one byte of anonymous memory.

    The mapping lives exactly as long as the last holder of ``owner``: this object, every tensor
    from ``tensor`` and every locked range. There is no ``close``: pulling a mapping from under a
    view would crash the process.

    The tensors must never be written: their pages are read-only, and a write ends the process with
    SIGSEGV, which Python cannot catch. Who wants to write clones first.

    Threads: any; nothing here changes after it was built.
    """

    def __init__(self, header: CheckpointHeader, region: mmap.mmap) -> None:
        """Use ``open_mapping``: it alone sees to it that header and mapping are of one file."""
        self.header = header
        self._region = region
        self._address = _address_of(region)
        self._bytes = (ctypes.c_ubyte * len(region)).from_address(self._address)
        # What torch holds on to is this array, so the array has to hold the mapping.
        self._bytes.region = region  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"FileMapping({file_text(self.header.path)!r}, {self.header.identity.size_bytes})"

    @property
    def owner(self) -> object:
        """Whoever holds this keeps the file mapped."""
        return self._bytes

    @property
    def base_address(self) -> int:
        """Where the file's first byte lies."""
        return self._address

    @cached_property
    def kind(self) -> MemoryKind:
        """What the kernel says that this mapping is; asked once, for it never changes."""
        return memory_kind(self._address, len(self._bytes))

    def holds(self, address: int) -> bool:
        """Whether ``address`` lies in this mapping."""
        return self._address <= address < self._address + len(self._bytes)

    def unmapped(self) -> Callable[[], bool]:
        """A question that can be asked later, without keeping anything: is the mapping gone?"""
        region = weakref.ref(self._region)
        return lambda: region() is None

    def address(self, entry: TensorEntry) -> int:
        """Where the entry's first byte lies in our address space."""
        return self._address + entry.file_offset

    def mappable(self, entry: TensorEntry) -> str | None:
        """Why ``tensor`` cannot give a view of this entry; None when it can."""
        if self.address(entry) % entry.dtype.itemsize:
            return (
                f"tensor {entry.name!r} starts at byte {entry.file_offset}, which is not a "
                f"multiple of the {entry.dtype.itemsize} bytes of its elements"
            )
        return None

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """A view of the file's own pages: no copy, on the CPU, never to be written.

        Raises: MappingError where ``mappable`` gives a reason.
        """
        if entry.size_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        reason = self.mappable(entry)
        if reason is not None:
            raise MappingError(f"{file_text(self.header.path)}: {reason}; read() it instead")
        count = entry.size_bytes // entry.dtype.itemsize
        flat = torch.frombuffer(
            self._bytes, dtype=entry.dtype, count=count, offset=entry.file_offset
        )
        return flat.reshape(entry.shape)

    def lockable_range(self, file_offset: int, size_bytes: int) -> tuple[int, int]:
        """Address and length of the whole pages inside a byte range of the file.

        The length may be 0. Only pages that lie fully inside: two neighbours never share one, and
        locking a shared page twice is refused by the driver (docs/engine.md, "Page locks").
        """
        first, size = whole_pages(file_offset, file_offset + size_bytes, PAGE_BYTES)
        return self._address + first, size

    def is_cached(self, file_offset: int, size_bytes: int) -> bool:
        """Whether a sample of these bytes is in the page cache; True where nobody can tell."""
        first = align_down(file_offset, PAGE_BYTES)
        pages = max(1, (file_offset + size_bytes - first) // PAGE_BYTES)
        step = max(1, pages // _SAMPLES)
        return all(
            _is_page_cached(self._address + first + page * PAGE_BYTES)
            for page in range(0, pages, step)
        )

    def advise(self, file_offset: int, size_bytes: int) -> bool:
        """Ask the system to read these bytes ahead; False where it takes no such advice.

        How much to ask for is the caller's to decide: the pages count as page cache, not as ours.
        """
        first = align_down(file_offset, PAGE_BYTES)
        advise = getattr(self._region, "madvise", None)
        willneed = getattr(mmap, "MADV_WILLNEED", None)
        if size_bytes <= 0 or advise is None or willneed is None:
            return False
        try:
            advise(willneed, first, file_offset + size_bytes - first)
        except OSError:
            return False
        return True

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """``read_tensor`` of this file."""
        return read_tensor(self.header, entry)

    def check_not_rewritten(self) -> None:
        """Raises: CheckpointChangedError if the very file that is mapped has other bytes now.

        A path that leads elsewhere, or nowhere, says nothing about the bytes that are mapped.
        """
        check_not_rewritten(self.header.path, self.header.identity)

    def check_unchanged(self) -> None:
        """Raises: CheckpointChangedError if the path no longer leads to the mapped file."""
        check_unchanged(self.header.path, self.header.identity)


_SAMPLES = 32


def _is_page_cached(address: int) -> bool:
    mincore = _mincore()
    if mincore is None:
        return True
    state = (ctypes.c_ubyte * 1)()
    # A refusal says nothing about the page; read-ahead is then left to the system.
    return mincore(address, PAGE_BYTES, state) != 0 or bool(state[0] & 1)


@functools.cache
def _mincore() -> Callable[..., int] | None:
    if sys.platform == "win32":
        return None
    call = getattr(ctypes.CDLL(None), "mincore", None)
    if call is not None:
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        call.restype = ctypes.c_int
    return call


def open_mapping(source: CheckpointHeader | str | os.PathLike[str]) -> FileMapping:
    """Map a whole checkpoint, read-only and shared.

    The descriptor that is mapped is compared with the header's identity first: a header of one file
    over the bytes of another would be silent noise.

    Raises: CheckpointChangedError if the file changed since its header was read, MappingError if
        the system will not map it, CheckpointError as ``read_header`` does. Nothing stays open.
    """
    header = source if isinstance(source, CheckpointHeader) else read_header(source)
    path, identity = header.path, header.identity
    check_unchanged(path, identity)
    try:
        with path.open("rb") as file:
            _refuse_another_file(path, identity, file.fileno())
            region = mmap.mmap(file.fileno(), identity.size_bytes, access=mmap.ACCESS_READ)
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise MappingError(
            f"{file_text(path)} of {sizes_text(identity.size_bytes)} could not be mapped: {reason};"
            " raise the limit on address space (ulimit -v; on Windows the page file), close other "
            "models, or load it with a loader that reads into memory"
        ) from error
    return FileMapping(header, region)


def read_tensor(header: CheckpointHeader, entry: TensorEntry) -> torch.Tensor:
    """The entry's bytes in ordinary memory of their own; needs no mapping.

    Raises: CheckpointChangedError when the path leads to another file now, CheckpointError with
        file and offset when the disk fails.
    """
    path, identity = header.path, header.identity
    check_unchanged(path, identity)
    out = torch.empty(entry.shape, dtype=entry.dtype)
    if entry.size_bytes == 0:
        return out
    target = memoryview((ctypes.c_ubyte * entry.size_bytes).from_address(out.data_ptr()))
    try:
        with path.open("rb", buffering=0) as file:
            _refuse_another_file(path, identity, file.fileno())

            def read_at(part: memoryview, offset: int) -> int:
                file.seek(offset)
                return file.readinto(part) or 0

            fill(read_at, target.cast("B"), entry.file_offset, path)
    except OSError as error:
        raise CheckpointError(
            f"{file_text(path)} cannot be opened: {error.strerror}; load the model again"
        ) from error
    return out


def fill(read_at: ReadAt, out: memoryview, file_offset: int, path: Path) -> None:
    """Fill ``out`` from ``file_offset`` on, however small the pieces that ``read_at`` gives.

    Raises: CheckpointChangedError if the file ends first, CheckpointError naming file and offset if
        a read fails. An interrupted read is asked again.
    """
    done, needed = 0, len(out)
    while done < needed:
        try:
            count = read_at(out[done:], file_offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            raise CheckpointError(
                f"{file_text(path)} could not be read at byte {file_offset + done} "
                f"({needed - done} bytes left of {needed}): {error.strerror}; check the disk, then "
                "download the file again"
            ) from error
        if count == 0:
            raise CheckpointChangedError(
                f"{file_text(path)} ended at byte {file_offset + done}, {needed - done} bytes too "
                "early; it was truncated while it was read: load the model again"
            )
        done += count


def _refuse_another_file(path: Path, identity: FileIdentity, descriptor: int) -> None:
    now = FileIdentity.of(descriptor)
    if now != identity:
        raise CheckpointChangedError(
            f"{file_text(path)} {difference_text(identity, now)} since its header was read; "
            "load the model again"
        )


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer`` (stable ABI since 3.11, unchanged since 3.0)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address_of(region: mmap.mmap) -> int:
    """Where a mapping begins. ``ctypes.from_buffer`` refuses a read-only one; the C call does not.

    The buffer is given back at once: a mapping moves only in ``resize``, which a read-only one does
    not have.
    """
    buffer = _PyBuffer()
    get = ctypes.pythonapi.PyObject_GetBuffer
    give_back = ctypes.pythonapi.PyBuffer_Release
    get.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
    give_back.argtypes = (ctypes.POINTER(_PyBuffer),)
    give_back.restype = None
    get(region, ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        give_back(ctypes.byref(buffer))
