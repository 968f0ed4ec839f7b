"""What this process holds, as the kernel counts it: the yardstick for what we say we hold."""

from __future__ import annotations

import enum
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..values import KIB

_DELETED = b" (deleted)"


@dataclass(frozen=True)
class ProcessMemory:
    """Counts of this process at one moment; None where the system does not tell.

    ``rss_anon_bytes`` is what would have to be swapped, ``rss_file_bytes`` what the kernel may drop
    and read again, ``locked_bytes`` what mlock holds (page-locks of a device driver are not in it).
    """

    rss_anon_bytes: int | None
    rss_file_bytes: int | None
    locked_bytes: int | None
    threads: int
    descriptors: int


@dataclass(frozen=True)
class MapLine:
    """One mapping of this process. ``path`` is "" for anonymous memory."""

    start: int
    end: int
    perms: str
    offset: int
    inode: int
    path: str
    deleted: bool


class MemoryKind(enum.Enum):
    """What a range of our address space is, as far as locking its pages goes."""

    SHARED_READ_ONLY = "a shared, read-only mapping of a file"
    ANONYMOUS = "ordinary memory"
    OTHER = "a private or writable mapping of a file"
    UNKNOWN = "not known"


def memory_kind(address: int, size_bytes: int, proc_root: Path = Path("/proc")) -> MemoryKind:
    """What the kernel says that the range is; UNKNOWN where it says nothing, or not of all of it.

    Locking the wrong kind may copy every page, or hang the process (docs/engine.md, "Page locks"),
    so this asks rather than trusts.
    """
    try:
        lines = (proc_root / "self" / "maps").read_bytes().split(b"\n")
    except OSError:
        return MemoryKind.UNKNOWN
    kinds: set[MemoryKind] = set()
    reached, end = address, address + size_bytes
    for line in lines:
        span, _, rest = line.partition(b" ")
        start_text, _, end_text = span.partition(b"-")
        if not end_text or int(end_text, 16) <= reached:
            continue
        if int(start_text, 16) > reached:
            break
        perms, _, _, inode = rest.split(None, 4)[:4]
        kinds.add(_kind_of(perms, int(inode)))
        reached = int(end_text, 16)
        if reached >= end:
            return kinds.pop() if len(kinds) == 1 else MemoryKind.OTHER
    return MemoryKind.UNKNOWN


def _kind_of(perms: bytes, inode: int) -> MemoryKind:
    if perms.startswith(b"r-") and perms.endswith(b"s"):
        return MemoryKind.SHARED_READ_ONLY
    if perms.startswith(b"rw") and perms.endswith(b"p") and inode == 0:
        return MemoryKind.ANONYMOUS
    return MemoryKind.OTHER


def process_memory(proc_root: Path = Path("/proc")) -> ProcessMemory:
    """This process now. Threads: any."""
    status = _status_fields(proc_root / "self" / "status")
    process = psutil.Process()
    if sys.platform == "win32":
        descriptors = process.num_handles()
    else:
        descriptors = process.num_fds()
    return ProcessMemory(
        rss_anon_bytes=_kib_field(status, b"RssAnon"),
        rss_file_bytes=_kib_field(status, b"RssFile"),
        locked_bytes=_kib_field(status, b"VmLck"),
        threads=process.num_threads(),
        descriptors=descriptors,
    )


def maps_lines(proc_root: Path = Path("/proc")) -> list[MapLine]:
    """Every mapping of this process; empty where there is no /proc."""
    try:
        lines = (proc_root / "self" / "maps").read_bytes().split(b"\n")
    except OSError:
        return []
    return [_map_line(line) for line in lines if line]


def maps_lookup(address: int, proc_root: Path = Path("/proc")) -> MapLine | None:
    """The mapping that ``address`` lies in; None when there is none, or no /proc."""
    for line in maps_lines(proc_root):
        if line.start <= address < line.end:
            return line
    return None


def _map_line(line: bytes) -> MapLine:
    # Five fields and a path, which may itself hold spaces: never split without the 5.
    span, perms, offset, _, inode, *rest = line.split(None, 5)
    start, end = (int(part, 16) for part in span.split(b"-"))
    # A newline is the one thing that the kernel escapes here.
    raw = rest[0].replace(b"\\012", b"\n") if rest else b""
    deleted = raw.endswith(_DELETED) and not _is_inode(raw, int(inode))
    path = os.fsdecode(raw.removesuffix(_DELETED) if deleted else raw)
    return MapLine(start, end, perms.decode(), int(offset, 16), int(inode), path, deleted)


def _is_inode(path: bytes, inode: int) -> bool:
    """Whether a file really bears the name that otherwise means "deleted"."""
    try:
        return os.stat(path).st_ino == inode
    except OSError:
        return False


def _status_fields(path: Path) -> dict[bytes, bytes]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return {}
    pairs = (line.split(b":", 1) for line in lines if b":" in line)
    return {name: value.strip() for name, value in pairs}


def _kib_field(fields: dict[bytes, bytes], name: bytes) -> int | None:
    number = fields.get(name, b"").split(b" ")[0]
    return int(number) * KIB if number.isdigit() else None
