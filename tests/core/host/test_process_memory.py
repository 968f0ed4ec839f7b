from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offload_core.host import maps_lines, maps_lookup, open_mapping, process_memory
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
    block = torch.ones(32 * MIB, dtype=torch.uint8)
    grown = process_memory().rss_anon_bytes
    assert before is not None
    assert grown is not None
    assert 31 * MIB <= grown - before <= 40 * MIB
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
