"""What this process may use of the machine, on machines that are files in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from minato import _system


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write files of control groups, and what says to which of them this process belongs."""
    monkeypatch.setattr(_system, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(_system, "_OWN_GROUPS", tmp_path / "own")

    def write(files: dict[str, str], own: str = "") -> None:
        (tmp_path / "own").write_text(own)
        for name, content in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return write


@pytest.fixture
def machine(groups, monkeypatch: pytest.MonkeyPatch):
    """Write files of a machine with eight cores; returns what then counts as its cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def cores(files: dict[str, str], own: str = "", ranks: str | None = None) -> float:
        groups(files, own)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        return _system.available_cores()

    return cores


def test_without_limits_it_is_what_the_process_may_run_on(machine):
    assert machine({}) == 8
    assert machine({"cpu.max": "max 100000\n"}) == 8
    assert machine({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}) == 8


def test_a_quota_bounds_it(machine):
    assert machine({"cpu.max": "250000 100000\n"}) == 2.5
    assert machine({"cpu.max": "10000 100000\n"}) == 1


def test_the_tightest_group_on_the_way_to_the_root_counts_also_of_the_first_version(machine):
    files = {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000", "c/cpu.max": "1 1"}
    assert machine(files, own="0::/a/b\n") == 3
    x = "cpu,cpuacct/x/cpu.cfs"
    files = {f"{x}_quota_us": "400000", f"{x}_period_us": "100000"}
    assert machine(files, own="5:memory:/y\n4:cpu,cpuacct:/x\n") == 4


@pytest.mark.parametrize(
    ("files", "cores", "processes"),
    [
        ({"cpuset.cpus.effective": "0-2,7\n", "pids.max": "100", "pids.current": "40"}, 4, 60),
        ({"cpuset.cpus.effective": "5\n", "pids.max": "max"}, 1, None),
        ({"cpuset.cpus.effective": "\n"}, None, None),
        ({}, None, None),
    ],
)
def test_cores_and_processes_of_a_group(groups, files, cores, processes):
    groups(files)
    assert (_system.cpuset_cores(), _system.group_processes_left()) == (cores, processes)


@pytest.mark.parametrize(
    ("ranks", "cores"), [("1", 8), ("4", 2), ("3", 8 / 3), ("16", 1), ("?", 8)]
)
def test_ranks_on_one_machine_share_it(machine, ranks, cores):
    assert machine({}, ranks=ranks) == pytest.approx(cores)


def test_memory_is_bounded_by_every_group_on_the_way_to_the_root(groups):
    groups({"a/memory.max": "max", "a/memory.current": "7"}, own="0::/a/b\n")
    assert _system.memory_limit_bytes() == psutil.virtual_memory().total
    groups({"a/memory.max": "5000", "a/memory.current": "4000"}, own="0::/a/b\n")
    groups({"a/b/memory.max": "3000", "a/b/memory.current": "100"}, own="0::/a/b\n")
    assert _system.memory_limit_bytes() == 3000
    assert _system.available_memory_bytes() == 1000
    groups({"a/memory.current": "6000"}, own="0::/a/b\n")
    assert _system.available_memory_bytes() == 0


def test_memory_in_the_first_version_of_control_groups(groups):
    limits = {"memory/x/memory.limit_in_bytes": "9000", "memory/x/memory.usage_in_bytes": "2000"}
    groups(limits, own="4:memory:/x\n")
    assert (_system.memory_limit_bytes(), _system.available_memory_bytes()) == (9000, 7000)


def test_what_the_kernel_caches_of_files_leaves_memory_available(groups):
    second = "anon 500\nfile 3600\nshmem 100\ninactive_file 2000\nactive_file 400\n"
    second += "slab_reclaimable 1000\nslab_unreclaimable 100\n"  # of the names and inodes of files
    files = {"a/memory.max": "5000", "a/memory.current": "4000", "a/memory.stat": second}
    groups(files, own="4:memory:/x\n0::/a\n")
    assert (_system.memory_limit_bytes(), _system.available_memory_bytes()) == (5000, 4400)
    files = {"memory.limit_in_bytes": "4000", "memory.usage_in_bytes": "4000"}
    files |= {"memory.stat": "inactive_file 7\ntotal_inactive_file 2500\ntotal_active_file 1000\n"}
    groups({f"memory/x/{name}": text for name, text in files.items()}, own="4:memory:/x\n")
    assert (_system.memory_limit_bytes(), _system.available_memory_bytes()) == (4000, 3500)


def test_processes_that_were_ended_for_memory_are_counted(groups):
    groups({}, own="4:memory:/x\n0::/a\n")
    assert _system.memory_kills() == 0
    first = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    second = "low 0\noom 5\noom_kill 3\noom_group_kill 0\n"
    files = {"memory/x/memory.oom_control": first, "a/memory.events": second}
    groups(files, own="4:memory:/x\n0::/a\n")
    assert _system.memory_kills() == 5


def test_the_disks_have_read_what_psutil_says() -> None:
    disks = [psutil.disk_io_counters(nowrap=False)]
    read = _system.disk_read_bytes()
    disks.append(psutil.disk_io_counters(nowrap=False))
    before, after = (0 if each is None else each.read_bytes for each in disks)
    assert before <= read <= after


def test_only_whole_disks_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = tmp_path / "diskstats"
    rows = ["8 0 sda 9 0 40 1", "8 1 sda1 9 0 30 1", "72 0 cciss/c0d0 9 0 2 1"]
    counters.write_text("\n".join(f"   {row} 0 0 0 0 0 0 0" for row in rows))
    disks = tmp_path / "block"
    monkeypatch.setattr(_system, "_DISKS", disks)
    monkeypatch.setattr(_system, "_DISK_COUNTERS", counters)
    assert _system.disk_read_bytes() == 0  # a container hides them
    for name in ("sda", "cciss!c0d0"):
        (disks / name).mkdir(parents=True)
    assert _system.disk_read_bytes() == 42 * 512
    counters.write_text("?")
    assert _system.disk_read_bytes() == 0
