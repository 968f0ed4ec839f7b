from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload_core.host import (
    PAGE_BYTES,
    FileMapping,
    MemoryKind,
    fill,
    maps_lines,
    maps_lookup,
    open_mapping,
    process_memory,
    read_header,
)
from offload_core.values import MIB, CheckpointChangedError, CheckpointError, MappingError

RunPython = Callable[..., subprocess.CompletedProcess[bytes]]

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def lines_of(path: Path) -> int:
    return sum(line.path == str(path) for line in maps_lines())


def all_dtypes(path: Path) -> Path:
    """One tensor of each element size, each starting on a multiple of it."""
    raw = torch.arange(64, dtype=torch.uint8)
    dtypes = [
        torch.complex64,
        torch.float64,
        torch.int64,
        torch.float32,
        torch.int32,
        torch.bfloat16,
        torch.float16,
        torch.int16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.uint8,
    ]
    tensors = {str(dtype): raw.clone().view(dtype) for dtype in dtypes}
    save_file({**tensors, "torch.bool": raw.clone() % 2 == 0}, path)
    return path


def test_every_tensor_has_the_bits_that_safetensors_reads(tmp_path: Path) -> None:
    path = all_dtypes(tmp_path / "dtypes.safetensors")
    mapping = open_mapping(path)
    expected = load_file(path)
    assert set(mapping.header.entries) == set(expected)
    for name, entry in mapping.header.entries.items():
        assert mapping.mappable(entry) is None
        assert same_bits(mapping.tensor(entry), expected[name]), name
        assert same_bits(mapping.read(entry), expected[name]), name


def test_scalars_and_empty_tensors_keep_their_shape(checkpoint: Path) -> None:
    mapping = open_mapping(checkpoint)
    entries = mapping.header.entries
    assert mapping.tensor(entries["scale"]).shape == ()
    assert mapping.tensor(entries["scale"]).item() == 0.5
    for nothing in (mapping.tensor(entries["nothing"]), mapping.read(entries["nothing"])):
        assert (nothing.shape, nothing.dtype) == ((0, 4), torch.float32)


@linux
def test_a_view_lies_on_one_shared_read_only_mapping_of_the_whole_file(checkpoint: Path) -> None:
    mapping = open_mapping(checkpoint)
    entry = mapping.header.entries["weight"]
    view = mapping.tensor(entry)
    line = maps_lookup(view.data_ptr())
    assert view.data_ptr() == mapping.address(entry)
    assert line is not None
    assert (line.perms, line.offset, line.path) == ("r--s", 0, str(checkpoint))
    assert line.end - line.start >= checkpoint.stat().st_size
    assert lines_of(checkpoint) == 1


@linux
def test_views_cost_no_anonymous_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    save_file({"a": torch.ones(32 * MIB, dtype=torch.uint8)}, path)
    mapping = open_mapping(path)
    view = mapping.tensor(mapping.header.entries["a"])
    gc.collect()
    before = process_memory().rss_anon_bytes
    assert int(view.sum(dtype=torch.int64)) == 32 * MIB
    after = process_memory().rss_anon_bytes
    assert before is not None
    assert after is not None
    assert after - before < 8 * MIB


@linux
def test_the_file_stays_mapped_until_the_last_view_goes_and_no_longer(checkpoint: Path) -> None:
    mapping = open_mapping(checkpoint)
    unmapped = mapping.unmapped()
    expected = load_file(checkpoint)["weight"].clone()
    row = mapping.tensor(mapping.header.entries["weight"])[3]
    gc.disable()
    try:
        del mapping
        assert not unmapped()
        assert torch.equal(row, expected[3])
        assert lines_of(checkpoint) == 1
        del row
        assert unmapped()
        assert lines_of(checkpoint) == 0
    finally:
        gc.enable()


@linux
def test_the_owner_alone_keeps_the_file_mapped(checkpoint: Path) -> None:
    owner = open_mapping(checkpoint).owner
    assert lines_of(checkpoint) == 1
    del owner
    assert lines_of(checkpoint) == 0


@linux
def test_a_hundred_mappings_leave_no_descriptor_and_no_map_line(checkpoint: Path) -> None:
    before = process_memory().descriptors
    gc.disable()
    try:
        for _ in range(100):
            mapping = open_mapping(checkpoint)
            view = mapping.tensor(mapping.header.entries["bias"])
            del mapping, view
        assert process_memory().descriptors == before
        assert lines_of(checkpoint) == 0
    finally:
        gc.enable()


def test_an_unaligned_tensor_is_read_but_not_mapped(write_raw: Callable[..., Path]) -> None:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path = write_raw(header.ljust(57), bytes(range(8)))
    mapping = open_mapping(path)
    entry = mapping.header.entries["a"]
    reason = "tensor 'a' starts at byte 65, which is not a multiple of the 4 bytes of its elements"
    assert mapping.mappable(entry) == reason
    with pytest.raises(MappingError, match=re.escape(f"{path}: {reason}; read() it instead")):
        mapping.tensor(entry)
    assert mapping.read(entry).view(torch.uint8).tolist() == list(range(8))


def test_lockable_ranges_are_whole_pages_that_no_neighbour_shares(checkpoint: Path) -> None:
    mapping = open_mapping(checkpoint)
    size = mapping.header.identity.size_bytes
    cuts = [0, 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES - 1, 3 * PAGE_BYTES, size]
    base = mapping.lockable_range(0, size)[0]
    last = base
    for begin, end in itertools.pairwise(cuts):
        address, count = mapping.lockable_range(begin, end - begin)
        assert address % PAGE_BYTES == 0
        assert count % PAGE_BYTES == 0
        if count:
            assert base + begin <= address
            assert address + count <= base + end
            assert address >= last
            last = address + count
    assert mapping.lockable_range(0, 3 * PAGE_BYTES) == (base, 3 * PAGE_BYTES)
    assert mapping.lockable_range(1, 2 * PAGE_BYTES) == (base + PAGE_BYTES, PAGE_BYTES)
    assert mapping.lockable_range(1, PAGE_BYTES)[1] == 0
    assert mapping.lockable_range(PAGE_BYTES, 0)[1] == 0


def test_a_mapping_knows_which_addresses_are_its_own(checkpoint: Path) -> None:
    mapping, size = open_mapping(checkpoint), checkpoint.stat().st_size
    entry = mapping.header.entries["weight"]
    assert mapping.tensor(entry).data_ptr() == mapping.base_address + entry.file_offset
    assert mapping.holds(mapping.base_address)
    assert mapping.holds(mapping.base_address + size - 1)
    assert not mapping.holds(mapping.base_address - 1)
    assert not mapping.holds(mapping.base_address + size)
    assert not mapping.holds(mapping.read(entry).data_ptr())


def test_advice_changes_no_bits(checkpoint: Path) -> None:
    mapping = open_mapping(checkpoint)
    entry = mapping.header.entries["weight"]
    taken = mapping.advise(entry.file_offset, entry.size_bytes)
    assert taken is (sys.platform != "win32")
    assert torch.equal(mapping.tensor(entry), load_file(checkpoint)["weight"])
    assert mapping.advise(entry.file_offset, 0) is False


@linux
def test_a_mapping_is_of_the_one_kind_that_is_locked_in_place(checkpoint: Path) -> None:
    assert open_mapping(checkpoint).kind is MemoryKind.SHARED_READ_ONLY


@pytest.fixture
def cold(tmp_path: Path) -> FileMapping:
    """A mapping of 8 MiB whose pages the kernel was asked to forget."""
    path = tmp_path / "cold.safetensors"
    save_file({"a": torch.arange(2 * MIB, dtype=torch.int32)}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    mapping = open_mapping(path)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(mapping):
        pytest.skip(f"the file system under {tmp_path} does not forget its pages")
    return mapping


def cached_pages(mapping: FileMapping) -> int:
    """As the kernel counts them."""
    pages = -(-mapping.header.identity.size_bytes // PAGE_BYTES)
    states = (ctypes.c_ubyte * pages)()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(mapping.base_address, pages * PAGE_BYTES, states) == 0
    return sum(state & 1 for state in states)


@linux
def test_the_page_cache_is_asked_without_being_filled(cold: FileMapping) -> None:
    size = cold.header.identity.size_bytes
    assert not cold.is_cached(0, size)
    assert not cold.is_cached(4 * MIB, 1)
    assert cached_pages(cold) == 0
    page = cold.base_address + 4 * MIB
    assert ctypes.c_ubyte.from_address(page).value in range(256)
    assert cold.is_cached(4 * MIB, 1)
    assert cold.is_cached(4 * MIB, PAGE_BYTES)


@linux
def test_a_range_is_cached_only_if_every_page_that_is_looked_at_is(cold: FileMapping) -> None:
    size = cold.header.identity.size_bytes
    for entry in cold.header.entries.values():
        assert int(cold.tensor(entry).long().sum()) == MIB * (2 * MIB - 1)
    assert cold.is_cached(0, size)
    assert cold.is_cached(0, 0)
    assert cold.is_cached(size - 1, 1)


@linux
def test_advice_brings_cold_pages_into_the_cache(cold: FileMapping) -> None:
    size = cold.header.identity.size_bytes
    entry = cold.header.entries["a"]
    assert cold.advise(0, size) is True
    # The kernel reads behind the call's back; touching the bytes waits for it.
    assert int(cold.tensor(entry)[-1]) == 2 * MIB - 1
    assert int(cold.tensor(entry).long().sum()) == MIB * (2 * MIB - 1)
    assert cold.is_cached(0, size)


@linux
def test_where_nobody_can_tell_all_is_taken_for_cached(
    cold: FileMapping, run_python: RunPython
) -> None:
    code = (
        "import sys\n"
        "from offload_core.host import open_mapping\n"
        "mapping = open_mapping(sys.argv[1])\n"
        "sys.platform = 'win32'\n"
        "assert mapping.is_cached(4 << 20, 1 << 20)\n"
    )
    done = run_python(code, cold.header.path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert not cold.is_cached(4 * MIB, MIB)


def test_a_read_tensor_can_be_written_without_touching_the_file(checkpoint: Path) -> None:
    mapping = open_mapping(checkpoint)
    entry = mapping.header.entries["weight"]
    before = checkpoint.read_bytes()
    mapping.read(entry).zero_()
    assert checkpoint.read_bytes() == before
    assert mapping.tensor(entry).any()


def test_a_header_is_never_laid_over_another_file(checkpoint: Path) -> None:
    header = read_header(checkpoint)
    other = checkpoint.with_name("other")
    other.write_bytes(checkpoint.read_bytes())
    os.replace(other, checkpoint)
    with pytest.raises(CheckpointChangedError, match="was replaced by another file"):
        open_mapping(header)


class SwappedAtOpen(type(Path())):  # type: ignore[misc]
    """A path that leads to another file from the moment it is opened, and not a moment earlier."""

    def open(self, *arguments: object, **options: object) -> object:
        other = Path(f"{self}.other")
        other.write_bytes(bytes(self.stat().st_size))
        os.replace(other, self)
        return super().open(*arguments, **options)


def test_what_is_mapped_is_what_was_compared(checkpoint: Path) -> None:
    header = replace(read_header(checkpoint), path=SwappedAtOpen(checkpoint))
    with pytest.raises(CheckpointChangedError, match=r"another file of .* since its header was"):
        open_mapping(header)


def test_what_is_read_is_what_was_compared(checkpoint: Path) -> None:
    honest = open_mapping(checkpoint)
    header = replace(honest.header, path=SwappedAtOpen(checkpoint))
    region = mmap.mmap(-1, header.identity.size_bytes)
    with pytest.raises(CheckpointChangedError, match=r"another file of .* since its header was"):
        FileMapping(header, region).read(header.entries["weight"])


def test_reading_a_deleted_file_says_that_it_is_gone(checkpoint: Path) -> None:
    mapping = open_mapping(checkpoint)
    checkpoint.unlink()
    with pytest.raises(CheckpointChangedError, match="was deleted, moved or renamed"):
        mapping.read(mapping.header.entries["weight"])


def test_a_replaced_file_is_neither_read_nor_passed_as_unchanged(checkpoint: Path) -> None:
    mapping = open_mapping(checkpoint)
    other = checkpoint.with_name("other")
    other.write_bytes(bytes(checkpoint.stat().st_size))
    os.replace(other, checkpoint)
    with pytest.raises(CheckpointChangedError, match="was replaced by another file"):
        mapping.read(mapping.header.entries["weight"])
    with pytest.raises(CheckpointChangedError, match="was replaced by another file"):
        mapping.check_unchanged()


def test_mapping_a_deleted_file_says_that_it_is_gone(checkpoint: Path) -> None:
    header = read_header(checkpoint)
    checkpoint.unlink()
    with pytest.raises(CheckpointChangedError, match="was deleted, moved or renamed"):
        open_mapping(header)


def test_a_mapping_shows_its_file(checkpoint: Path) -> None:
    size = checkpoint.stat().st_size
    assert repr(open_mapping(checkpoint)) == f"FileMapping({str(checkpoint)!r}, {size})"


# Case 39.


class FakeDisk:
    """Gives the bytes of a file in the pieces, and with the errors, that it is told."""

    def __init__(self, data: bytes, answers: list[int | OSError]) -> None:
        self.data = data
        self.answers = answers

    def read_at(self, part: memoryview, offset: int) -> int:
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        piece = self.data[offset : offset + min(answer, len(part))]
        part[: len(piece)] = piece
        return len(piece)


def test_short_and_interrupted_reads_are_asked_again_until_all_is_there(tmp_path: Path) -> None:
    disk = FakeDisk(b"..abcdefgh..", [3, InterruptedError(), 1, InterruptedError(), 99])
    out = bytearray(8)
    fill(disk.read_at, memoryview(out), 2, tmp_path / "x")
    assert bytes(out) == b"abcdefgh"
    assert disk.answers == []


def test_a_disk_error_names_file_and_offset(tmp_path: Path) -> None:
    failure = OSError(errno.EIO, os.strerror(errno.EIO))
    disk = FakeDisk(b"abcdefgh", [3, failure])
    expected = re.escape(
        f"{tmp_path / 'x'} could not be read at byte 5 (3 bytes left of 6): {failure.strerror}"
    )
    with pytest.raises(CheckpointError, match=expected) as caught:
        fill(disk.read_at, memoryview(bytearray(6)), 2, tmp_path / "x")
    assert caught.value.__cause__ is failure


def test_a_file_that_ends_early_says_where(tmp_path: Path) -> None:
    disk = FakeDisk(b"abcd", [99, 0])
    with pytest.raises(CheckpointChangedError, match="ended at byte 4, 4 bytes too early"):
        fill(disk.read_at, memoryview(bytearray(6)), 2, tmp_path / "x")


# Case 45.


@linux
def test_a_refused_mapping_names_file_size_and_remedy_and_leaves_nothing(
    write_raw: Callable[..., Path], run_python: RunPython
) -> None:
    size = 4 << 30
    path = write_raw({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    head = path.stat().st_size
    os.truncate(path, head + size)
    code = (
        "import resource, sys\n"
        "from offload_core.host import maps_lines, open_mapping, process_memory\n"
        "from offload_core.values import MappingError\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (256 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "before = process_memory().descriptors\n"
        "try:\n"
        "    open_mapping(sys.argv[1])\n"
        "except MappingError as error:\n"
        "    print(error)\n"
        "assert process_memory().descriptors == before, 'a descriptor is left'\n"
        "assert not [line for line in maps_lines() if line.path == sys.argv[1]], 'still mapped'\n"
    )
    done = run_python(code, path, env={"PYTHONWARNINGS": "ignore::ResourceWarning"})
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode()
    assert text.startswith(f"{path} of {head + size} bytes (4.00 GiB) could not be mapped: ")
    assert os.strerror(errno.ENOMEM) in text
    assert "raise the limit on address space (ulimit -v" in text


def test_dropping_a_mapping_that_failed_to_open_keeps_other_mappings(checkpoint: Path) -> None:
    mapping: FileMapping = open_mapping(checkpoint)
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_mapping(checkpoint.with_name("gone"))
    assert mapping.tensor(mapping.header.entries["weight"]).any()
