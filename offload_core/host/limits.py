"""How much host memory this process may still take: the machine's, or its container's if smaller.

A container's limit is invisible to psutil, and passing it ends the process without a traceback. So
every control group above this process counts, of both versions. Swap never counts: a plan that
needs it is a plan that crawls.

Source: the kernel's cgroup-v1/memory.rst, cgroup-v2.rst and proc.rst.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

# Version 1 writes "no limit" as the largest page-rounded 64-bit number; no machine has an exbibyte.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class HostLimits:
    """Host memory of this process. ``source`` says in words what bounds ``available_bytes``.

    ``limit_bytes`` is the smallest control-group limit, None when there is none.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    source: str


@dataclass(frozen=True)
class SystemMemory:
    """The whole machine's memory; ``available_bytes`` counts droppable file pages as free."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class _GroupLimit:
    """One limit of one control group and what is used of it."""

    limit_bytes: int
    used_bytes: int
    source: str

    @property
    def left_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


def system_memory() -> SystemMemory:
    """What psutil says of the whole machine."""
    memory = psutil.virtual_memory()
    return SystemMemory(total_bytes=memory.total, available_bytes=memory.available)


def host_limits(
    proc_root: Path = Path("/proc"),
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    system: Callable[[], SystemMemory] = system_memory,
    driver_locked_bytes: int = 0,
) -> HostLimits:
    """The tightest of the machine and all control groups of this process.

    Args:
        driver_locked_bytes: file pages that a device driver holds locked. Unlike pages under mlock
            they stay on the kernel's lists of droppable pages, so only who locked them knows.

    A missing, unreadable or odd file is passed over: the machine's own figures always remain.
    Threads: any.
    """
    machine = system()
    limits = list(_group_limits(proc_root, cgroup_root))
    total, available, source = machine.total_bytes, machine.available_bytes, "system memory"
    for limit in limits:
        total = min(total, limit.limit_bytes)
        if limit.left_bytes < available:
            available, source = limit.left_bytes, limit.source
    return HostLimits(
        total_bytes=total,
        available_bytes=max(0, available - driver_locked_bytes),
        limit_bytes=min((limit.limit_bytes for limit in limits), default=None),
        source=source,
    )


def _group_limits(proc_root: Path, cgroup_root: Path) -> Iterator[_GroupLimit]:
    for line in _text(proc_root / "self" / "cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        number, controllers, group = fields
        if number == "0" and not controllers:
            # With both versions mounted, the second lies in a folder of its own.
            for base in (cgroup_root, cgroup_root / "unified"):
                for folder in _chain(base, group):
                    yield from _limits_v2(folder, base)
        elif "memory" in controllers.split(","):
            for base in dict.fromkeys((cgroup_root / controllers, cgroup_root / "memory")):
                for folder in _chain(base, group):
                    yield from _limits_v1(folder, base)


def _chain(base: Path, group: str) -> Iterator[Path]:
    """The group's folder and all its parents, up to the mount.

    A container often mounts its own group as the root while ``group`` is still named from the
    host's root, so leading parts that are not below the mount are left out.
    """
    parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
    while parts and not _is_folder(base.joinpath(*parts)):
        parts = parts[1:]
    for length in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:length])


def _limits_v2(folder: Path, base: Path) -> Iterator[_GroupLimit]:
    # memory.high does not kill, but beyond it every allocation is throttled to a crawl.
    limits = {name: _number(folder / name) for name in ("memory.max", "memory.high")}
    if all(limit is None for limit in limits.values()):
        return  # most groups; what is used of them is long to read, and the status does so often
    stat = _stat(folder)
    # Shared memory is on the anonymous lists and mlocked pages are on none of these two, so their
    # sum is what the kernel can drop.
    droppable = _droppable(stat, "active_file", "inactive_file")
    if droppable is None:
        droppable = stat.get("file", 0) - stat.get("shmem", 0) - stat.get("unevictable", 0)
    used = _used(folder / "memory.current", droppable)
    for name, limit in limits.items():
        if limit is not None:
            yield _GroupLimit(limit, used, f"{name} of control group {_name(folder, base)}")


def _limits_v1(folder: Path, base: Path) -> Iterator[_GroupLimit]:
    stat = _stat(folder)
    # The usage counts all children, so the file pages have to be the sums over them too.
    droppable = _droppable(stat, "total_active_file", "total_inactive_file")
    if droppable is None:
        droppable = _droppable(stat, "active_file", "inactive_file")
    if droppable is None:
        unevictable = stat.get("total_unevictable", stat.get("unevictable", 0))
        shmem = stat.get("total_shmem", stat.get("shmem", 0))
        droppable = stat.get("total_cache", stat.get("cache", 0)) - shmem - unevictable
    used = _used(folder / "memory.usage_in_bytes", droppable)
    limit = _number(folder / "memory.limit_in_bytes")
    # This one also knows the parents that are not visible below a container's mount.
    inherited = stat.get("hierarchical_memory_limit")
    for found in dict.fromkeys((limit, inherited)):
        if found is not None and found < _NO_LIMIT_BYTES:
            yield _GroupLimit(found, used, f"memory limit of control group {_name(folder, base)}")


def _name(folder: Path, base: Path) -> str:
    return "/" + "/".join(folder.relative_to(base).parts)


def _used(path: Path, droppable_bytes: int) -> int:
    return max(0, (_number(path) or 0) - max(0, droppable_bytes))


def _droppable(stat: dict[str, int], active: str, inactive: str) -> int | None:
    if active not in stat or inactive not in stat:
        return None
    return stat[active] + stat[inactive]


def _stat(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and _is_count(pair[1])}


def _number(path: Path) -> int | None:
    """The count in a file; None for "max", and for no such file."""
    text = _text(path).strip()
    return int(text) if _is_count(text) else None


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
