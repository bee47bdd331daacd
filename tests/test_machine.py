"""What this process may use of the machine, on machines that are files in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minato import _machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write files of a machine with eight cores; returns what then counts as its cores."""
    monkeypatch.setattr(_machine, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(_machine, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def cores(files: dict[str, str], own: str = "", ranks: str | None = None) -> float:
        (tmp_path / "own").write_text(own)
        for name, content in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        return _machine.available_cores()

    return cores


def test_without_limits_it_is_what_the_process_may_run_on(machine):
    assert machine({}) == 8
    assert machine({"cpu.max": "max 100000\n"}) == 8
    assert machine({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}) == 8


def test_a_quota_bounds_it(machine):
    assert machine({"cpu.max": "250000 100000\n"}) == 2.5
    assert machine({"cpu.max": "10000 100000\n"}) == 1


def test_the_tightest_group_on_the_way_to_the_root_counts(machine):
    files = {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000", "c/cpu.max": "1 1"}
    assert machine(files, own="0::/a/b\n") == 3


def test_the_first_version_of_control_groups(machine):
    files = {
        "cpu,cpuacct/x/cpu.cfs_quota_us": "400000",
        "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
    }
    assert machine(files, own="5:memory:/y\n4:cpu,cpuacct:/x\n") == 4


@pytest.mark.parametrize(
    ("ranks", "cores"), [("1", 8), ("4", 2), ("3", 8 / 3), ("16", 1), ("?", 8)]
)
def test_ranks_on_one_machine_share_it(machine, ranks, cores):
    assert machine({}, ranks=ranks) == pytest.approx(cores)
