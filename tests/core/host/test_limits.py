from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from offload_core.host import HostLimits, SystemMemory, host_limits, system_memory
from offload_core.values import GIB, MIB

MACHINE = SystemMemory(total_bytes=64 * GIB, available_bytes=60 * GIB)
NO_LIMIT_V1 = "9223372036854771712\n"


class FakeHost:
    """A /proc and a /sys/fs/cgroup of our own. Case 35 is told through it."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroup = root / "cgroup"

    def groups(self, *lines: str) -> None:
        path = self.proc / "self" / "cgroup"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(lines) + "\n")

    def put(self, folder: str, files: Mapping[str, object]) -> Path:
        path = self.cgroup / folder if folder else self.cgroup
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name).write_text(f"{text}\n")
        return path

    def limits(self, driver_locked_bytes: int = 0) -> HostLimits:
        return host_limits(self.proc, self.cgroup, lambda: MACHINE, driver_locked_bytes)


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


UNBOUNDED = HostLimits(64 * GIB, 60 * GIB, None, "system memory")


def test_without_any_group_the_machine_counts(host: FakeHost) -> None:
    assert host.limits() == UNBOUNDED


def test_groups_without_a_tree_leave_the_machine(host: FakeHost) -> None:
    host.groups("4:memory:/docker/a", "0::/docker/a")
    assert host.limits() == UNBOUNDED


def test_max_is_no_limit(host: FakeHost) -> None:
    host.groups("0::/a")
    host.put("a", {"memory.max": "max", "memory.high": "max", "memory.current": GIB})
    assert host.limits() == UNBOUNDED


def test_a_number_bounds_total_and_what_is_left(host: FakeHost) -> None:
    host.groups("0::/a")
    host.put("a", {"memory.max": 32 * GIB, "memory.current": 10 * GIB})
    source = "memory.max of control group /a"
    assert host.limits() == HostLimits(32 * GIB, 22 * GIB, 32 * GIB, source)


def test_a_parent_smaller_than_its_child_bounds_the_child(host: FakeHost) -> None:
    host.groups("0::/a/b/c")
    host.put("a/b/c", {"memory.max": 32 * GIB, "memory.current": GIB})
    host.put("a/b", {"memory.max": "max", "memory.current": GIB})
    host.put("a", {"memory.max": 8 * GIB, "memory.current": 3 * GIB})
    source = "memory.max of control group /a"
    assert host.limits() == HostLimits(8 * GIB, 5 * GIB, 8 * GIB, source)


def test_a_fuller_parent_bounds_even_with_the_larger_limit(host: FakeHost) -> None:
    host.groups("0::/a/b")
    host.put("a/b", {"memory.max": 8 * GIB, "memory.current": GIB})
    host.put("a", {"memory.max": 16 * GIB, "memory.current": 14 * GIB})
    source = "memory.max of control group /a"
    assert host.limits() == HostLimits(8 * GIB, 2 * GIB, 8 * GIB, source)


def test_memory_high_bounds_too(host: FakeHost) -> None:
    host.groups("0::/a")
    host.put("a", {"memory.max": 32 * GIB, "memory.high": 16 * GIB, "memory.current": GIB})
    source = "memory.high of control group /a"
    assert host.limits() == HostLimits(16 * GIB, 15 * GIB, 16 * GIB, source)


def test_a_limit_above_the_machine_does_not_enlarge_it(host: FakeHost) -> None:
    host.groups("0::/a")
    host.put("a", {"memory.max": 128 * GIB, "memory.current": GIB})
    assert host.limits() == HostLimits(64 * GIB, 60 * GIB, 128 * GIB, "system memory")


def test_a_container_that_is_its_own_root_is_bounded_at_the_mount(host: FakeHost) -> None:
    host.groups("0::/")
    host.put("", {"memory.max": 4 * GIB, "memory.current": GIB})
    source = "memory.max of control group /"
    assert host.limits() == HostLimits(4 * GIB, 3 * GIB, 4 * GIB, source)


@pytest.mark.parametrize("group", ["/docker/0123abcd", "/../../elsewhere", "/kubepods/pod 1/x:y"])
def test_a_group_not_visible_below_the_mount_is_bounded_at_the_mount(
    host: FakeHost, group: str
) -> None:
    host.groups(f"0::{group}")
    host.put("", {"memory.max": 4 * GIB, "memory.current": GIB})
    assert host.limits().available_bytes == 3 * GIB


def test_a_group_visible_by_its_last_parts_is_found(host: FakeHost) -> None:
    host.groups("0::/host/pod/inner")
    host.put("inner", {"memory.max": 2 * GIB, "memory.current": GIB})
    host.put("", {"memory.max": 4 * GIB, "memory.current": GIB})
    assert host.limits().source == "memory.max of control group /inner"


def test_droppable_file_pages_are_not_used_but_shared_and_locked_ones_are(host: FakeHost) -> None:
    host.groups("0::/a")
    # 10 GiB in use: 1 anonymous, 2 shared, 3 of a file under mlock, 4 of files that may be dropped.
    counts = (
        f"anon {GIB}\nfile {9 * GIB}\nshmem {2 * GIB}\nunevictable {3 * GIB}\n"
        f"inactive_file {3 * GIB}\nactive_file {GIB}"
    )
    host.put("a", {"memory.max": 16 * GIB, "memory.current": 10 * GIB, "memory.stat": counts})
    assert host.limits().available_bytes == 10 * GIB


def test_without_the_page_lists_file_less_shared_and_locked_is_droppable(host: FakeHost) -> None:
    host.groups("0::/a")
    counts = f"file {9 * GIB}\nshmem {2 * GIB}\nunevictable {3 * GIB}"
    host.put("a", {"memory.max": 16 * GIB, "memory.current": 10 * GIB, "memory.stat": counts})
    assert host.limits().available_bytes == 10 * GIB


def test_pages_that_a_driver_locked_count_as_used(host: FakeHost) -> None:
    host.groups("0::/a")
    counts = f"inactive_file {4 * GIB}\nactive_file 0"
    host.put("a", {"memory.max": 8 * GIB, "memory.current": 5 * GIB, "memory.stat": counts})
    assert host.limits().available_bytes == 7 * GIB
    assert host.limits(driver_locked_bytes=3 * GIB).available_bytes == 4 * GIB
    assert host.limits(driver_locked_bytes=30 * GIB).available_bytes == 0


def test_an_overfull_group_leaves_nothing_rather_than_less(host: FakeHost) -> None:
    host.groups("0::/a")
    host.put("a", {"memory.max": 4 * GIB, "memory.current": 5 * GIB})
    assert host.limits().available_bytes == 0


def test_swap_never_counts(host: FakeHost) -> None:
    host.groups("0::/a")
    files: dict[str, object] = {"memory.max": 4 * GIB, "memory.current": GIB}
    host.put("a", {**files, "memory.swap.max": "max", "memory.swap.current": 0})
    with_swap = host.limits()
    host.put("a", {**files, "memory.swap.max": 0})
    assert host.limits() == with_swap
    assert with_swap.available_bytes == 3 * GIB


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5", "٣", "max\x00"])
def test_an_odd_figure_is_passed_over(host: FakeHost, text: str) -> None:
    host.groups("0::/a")
    host.put("a", {"memory.max": text, "memory.current": text, "memory.stat": f"file {text}"})
    assert host.limits() == UNBOUNDED


def test_an_unreadable_file_is_passed_over(host: FakeHost) -> None:
    host.groups("0::/a")
    folder = host.put("a", {"memory.current": GIB})
    # A folder where a file should be fails for root too, as a missing permission does not.
    (folder / "memory.max").mkdir()
    assert host.limits() == UNBOUNDED


def test_a_file_without_permission_is_passed_over(host: FakeHost) -> None:
    host.groups("0::/a")
    folder = host.put("a", {"memory.max": GIB, "memory.high": 2 * GIB})
    (folder / "memory.max").chmod(0)
    try:
        readable = (folder / "memory.max").read_bytes() != b""
    except PermissionError:
        readable = False
    assert host.limits().limit_bytes == (GIB if readable else 2 * GIB)
    (folder / "memory.max").chmod(stat.S_IRUSR | stat.S_IWUSR)


def test_version_1_without_a_limit_is_no_limit(host: FakeHost) -> None:
    host.groups("4:memory:/a")
    counts = f"hierarchical_memory_limit {NO_LIMIT_V1}"
    files = {"memory.limit_in_bytes": NO_LIMIT_V1, "memory.usage_in_bytes": 0}
    host.put("memory/a", {**files, "memory.stat": counts})
    assert host.limits() == UNBOUNDED


def test_version_1_counts_usage_and_file_pages_over_all_children(host: FakeHost) -> None:
    host.groups("9:name=systemd:/", "4:cpu,memory:/a/b")
    counts = (
        f"inactive_file 0\nactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"
        f"total_shmem {GIB}\ntotal_unevictable {GIB}"
    )
    host.put("memory/a/b", {"memory.limit_in_bytes": 16 * GIB, "memory.usage_in_bytes": GIB})
    host.put(
        "memory/a",
        {
            "memory.limit_in_bytes": 8 * GIB,
            "memory.usage_in_bytes": 6 * GIB,
            "memory.stat": counts,
        },
    )
    source = "memory limit of control group /a"
    assert host.limits() == HostLimits(8 * GIB, 4 * GIB, 8 * GIB, source)


def test_version_1_knows_the_limit_of_a_parent_that_is_not_visible(host: FakeHost) -> None:
    host.groups("4:memory:/docker/0123")
    host.put(
        "memory",
        {
            "memory.limit_in_bytes": NO_LIMIT_V1,
            "memory.usage_in_bytes": GIB,
            "memory.stat": f"hierarchical_memory_limit {2 * GIB}",
        },
    )
    assert host.limits() == HostLimits(2 * GIB, GIB, 2 * GIB, "memory limit of control group /")


def test_both_versions_at_once_give_the_tighter(host: FakeHost) -> None:
    host.groups("4:memory:/a", "0::/a")
    host.put("memory/a", {"memory.limit_in_bytes": 8 * GIB, "memory.usage_in_bytes": 0})
    host.put("unified/a", {"memory.max": 4 * GIB, "memory.current": 0})
    assert host.limits().limit_bytes == 4 * GIB


def test_this_very_machine_gives_figures_that_fit_together() -> None:
    machine, limits = system_memory(), host_limits()
    assert 0 < limits.total_bytes <= machine.total_bytes
    assert 0 < limits.available_bytes <= limits.total_bytes
    assert limits.available_bytes <= machine.available_bytes + 512 * MIB
    assert limits.source != ""
