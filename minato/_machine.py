"""What the machine, or the container on it, allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["available_cores", "available_memory_bytes"]

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def available_memory_bytes() -> int:
    """Memory that can still be taken, within the limit of the control group if there is one."""
    available = int(psutil.virtual_memory().available)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            left = int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text())
        except (OSError, ValueError):  # no such version of control groups, or "max"
            continue
        available = min(available, max(left, 0))
    return available


def available_cores() -> float:
    """Cores for this process: those it may run on, within the quota of its control groups.

    Where a launcher started several processes here (``LOCAL_WORLD_SIZE``, as torchrun sets it), each counts on its
    share of them. A quota may be a fraction; at least one core is assumed.
    """
    runs_on = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = min([float(runs_on or 1), *_quotas()])
    try:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError:
        ranks = 1
    return max(cores / max(ranks, 1), 1.0)


def _quotas() -> Iterator[float]:
    """The cores that each control group of this process allows: its own and all around it."""
    for folder, quota, period in (
        ("", "cpu.max", None),
        ("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
        ("cpu,cpuacct", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
    ):
        top = _CGROUP / folder
        for group in _groups(folder):
            for at in (top / group, *(top / group).parents):
                if not at.is_relative_to(top):
                    break
                try:
                    words = (at / quota).read_text().split()
                    if period is not None:
                        words += (at / period).read_text().split()
                    allowed = int(words[0]) / int(words[1])
                except (OSError, ValueError, IndexError, ZeroDivisionError):
                    continue  # no such group or version, or "max"
                if allowed > 0:  # -1: no quota
                    yield allowed


def _groups(controllers: str) -> Iterator[str]:
    """Paths of this process's groups in a hierarchy, and its root, which a container may see as its own."""
    yield ""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names == controllers:
            yield path.lstrip("/")
