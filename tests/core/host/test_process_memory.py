from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offload_core.host import (
    PAGE_BYTES,
    FileMapping,
    MemoryKind,
    maps_lines,
    maps_lookup,
    memory_kind,
    open_mapping,
    process_memory,
)
from offload_core.values import KIB, MIB

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

HEAD = b"7f0000000000-7f0000002000 r--s 00001000 fe:00 42 "


def fake_proc(tmp_path: Path, *, maps: bytes = b"", status: bytes = b"") -> Path:
    folder = tmp_path / "proc" / "self"
    folder.mkdir(parents=True)
    (folder / "maps").write_bytes(maps)
    (folder / "status").write_bytes(status)
    return tmp_path / "proc"


@linux
def test_anonymous_memory_is_counted_as_anonymous() -> None:
    before = process_memory().rss_anon_bytes
    # Above glibc's largest threshold: never out of what the heap has left from others.
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    grown = process_memory().rss_anon_bytes
    assert before is not None
    assert grown is not None
    assert 63 * MIB <= grown - before <= 72 * MIB
    assert block[0] == 1


def test_threads_and_descriptors_are_counted(tmp_path: Path) -> None:
    before = process_memory()
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    with (tmp_path / "open").open("wb"):
        during = process_memory()
    gate.set()
    thread.join()
    assert during.threads == before.threads + 1
    assert during.descriptors == before.descriptors + 1


def test_status_fields_are_read_in_kib(tmp_path: Path) -> None:
    status = b"Name:\ta: b\nVmLck:\t      12 kB\nRssAnon:\t 7 kB\nRssFile:\t 0 kB\n"
    memory = process_memory(fake_proc(tmp_path, status=status))
    assert (memory.locked_bytes, memory.rss_anon_bytes, memory.rss_file_bytes) == (
        12 * KIB,
        7 * KIB,
        0,
    )


def test_without_proc_the_unknown_is_none(tmp_path: Path) -> None:
    memory = process_memory(tmp_path / "no proc")
    assert (memory.rss_anon_bytes, memory.rss_file_bytes, memory.locked_bytes) == (None,) * 3
    assert memory.threads >= 1
    assert maps_lines(tmp_path / "no proc") == []
    assert maps_lookup(1, tmp_path / "no proc") is None


@linux
@pytest.mark.parametrize(
    "name", ["plain", "with  two spaces ", "two\nlines", "模型 🐎", "really named (deleted)"]
)
def test_a_mapped_file_is_found_under_its_own_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save_file({"a": torch.ones(5000)}, path)
    mapping = open_mapping(path)
    entry = mapping.header.entries["a"]
    line = maps_lookup(mapping.address(entry))
    assert line is not None
    assert (line.path, line.deleted, line.perms, line.offset) == (str(path), False, "r--s", 0)
    assert line.inode == os.stat(path).st_ino


@linux
def test_a_deleted_file_is_found_under_the_name_it_had(checkpoint: Path) -> None:
    mapping = open_mapping(checkpoint)
    checkpoint.unlink()
    line = maps_lookup(mapping.address(mapping.header.entries["weight"]))
    assert line is not None
    assert (line.path, line.deleted) == (str(checkpoint), True)


def test_an_address_on_no_mapping_is_not_found(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, maps=HEAD + b"/a b\n")
    first, end = 0x7F0000000000, 0x7F0000002000
    assert maps_lookup(first - 1, proc) is None
    assert maps_lookup(end, proc) is None
    for address in (first, end - 1):
        line = maps_lookup(address, proc)
        assert line is not None
        assert (line.start, line.end, line.offset, line.path) == (first, end, 0x1000, "/a b")


def test_anonymous_memory_has_no_path(tmp_path: Path) -> None:
    (line,) = maps_lines(fake_proc(tmp_path, maps=HEAD.rstrip() + b"\n"))
    assert line.path == ""


# What kind of memory a range is: what may be locked, and how


def maps(*lines: str) -> bytes:
    """Lines of one page each that follow each other from 0x1000 on; "" is a hole of one page."""
    text = ""
    for number, line in enumerate(lines, start=1):
        if line:
            text += f"{number:x}000-{number + 1:x}000 {line}\n"
    return text.encode()


FILE = "r--s 00000000 fe:00 42 /models/a b.safetensors"
PRIVATE_READ = "r--p 00000000 fe:00 42 /models/a.safetensors"
PRIVATE_WRITE = "rw-p 00000000 fe:00 42 /models/a.safetensors"
SHARED_WRITE = "rw-s 00000000 fe:00 42 /models/a.safetensors"
NAMELESS = "rw-p 00000000 00:00 0"
HEAP = "rw-p 00000000 00:00 0 [heap]"
CODE = "r-xp 00000000 fe:00 42 /lib/x.so"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ([FILE], MemoryKind.SHARED_READ_ONLY),
        ([FILE, FILE], MemoryKind.SHARED_READ_ONLY),
        ([PRIVATE_READ], MemoryKind.OTHER),
        ([PRIVATE_WRITE], MemoryKind.OTHER),
        ([SHARED_WRITE], MemoryKind.OTHER),
        ([CODE], MemoryKind.OTHER),
        (["---p 00000000 00:00 0"], MemoryKind.OTHER),
        (["r--p 00000000 00:00 0"], MemoryKind.OTHER),
        ([NAMELESS], MemoryKind.ANONYMOUS),
        ([NAMELESS, HEAP, NAMELESS], MemoryKind.ANONYMOUS),
        ([FILE, NAMELESS], MemoryKind.OTHER),
        ([NAMELESS, PRIVATE_WRITE], MemoryKind.OTHER),
        ([FILE, "", FILE], MemoryKind.UNKNOWN),
        (["", FILE], MemoryKind.UNKNOWN),
        ([FILE, ""], MemoryKind.UNKNOWN),
        ([""], MemoryKind.UNKNOWN),
    ],
    ids=lambda value: value.name if isinstance(value, MemoryKind) else None,
)
def test_a_range_is_of_one_kind_only_if_all_of_it_is(
    tmp_path: Path, lines: list[str], kind: MemoryKind
) -> None:
    proc = fake_proc(tmp_path, maps=maps(*lines))
    assert memory_kind(0x1000, 0x1000 * len(lines), proc) is kind


def test_neighbours_of_a_range_say_nothing_about_it(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, maps=maps(PRIVATE_READ, FILE, NAMELESS, "", FILE))
    assert memory_kind(0x2000, 0x1000, proc) is MemoryKind.SHARED_READ_ONLY
    assert memory_kind(0x2FFF, 1, proc) is MemoryKind.SHARED_READ_ONLY
    assert memory_kind(0x2000, 0x1001, proc) is MemoryKind.OTHER
    assert memory_kind(0x1FFF, 2, proc) is MemoryKind.OTHER
    assert memory_kind(0x3000, 0x1000, proc) is MemoryKind.ANONYMOUS
    assert memory_kind(0x3000, 0x1001, proc) is MemoryKind.UNKNOWN
    assert memory_kind(0x9000, 1, proc) is MemoryKind.UNKNOWN


def test_without_proc_no_kind_is_known(tmp_path: Path) -> None:
    assert memory_kind(0x1000, 0x1000, tmp_path / "no proc") is MemoryKind.UNKNOWN


@linux
def test_the_kernel_tells_a_checkpoint_from_a_private_mapping_and_from_ordinary_memory(
    checkpoint: Path,
) -> None:
    mapping = open_mapping(checkpoint)
    size = mapping.header.identity.size_bytes
    assert memory_kind(mapping.base_address, size) is MemoryKind.SHARED_READ_ONLY
    ordinary = torch.ones(3 * MIB, dtype=torch.uint8)
    assert memory_kind(ordinary.data_ptr(), ordinary.numel()) is MemoryKind.ANONYMOUS
    small = (ctypes.c_ubyte * 100)()
    assert memory_kind(ctypes.addressof(small), 100) is MemoryKind.ANONYMOUS
    for flags, kind in (
        (mmap.MAP_PRIVATE, MemoryKind.ANONYMOUS),
        (mmap.MAP_SHARED, MemoryKind.OTHER),  # Python's default: pages of a nameless tmpfs file
    ):
        pages = mmap.mmap(-1, 2 * PAGE_BYTES, flags=flags | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))
        assert memory_kind(address, 2 * PAGE_BYTES) is kind


@linux
@pytest.mark.parametrize("protection", [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE])
def test_a_private_mapping_of_a_file_is_never_taken_for_what_may_be_locked(
    checkpoint: Path, protection: int
) -> None:
    # What safetensors makes: to lock it copies every page, or hangs the process for ever.
    header = open_mapping(checkpoint).header
    size = header.identity.size_bytes
    with checkpoint.open("rb") as file:
        region = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=protection)
    private = FileMapping(header, region)
    assert memory_kind(private.base_address, size) is MemoryKind.OTHER
    assert private.kind is MemoryKind.OTHER
