"""The processor time that workers use, and the time that they wait for a core."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from minato._system import text_of

__all__ = ["CpuUsage", "process_usage", "thread_usage"]


class CpuUsage(NamedTuple):
    """Nanoseconds since the start of processes or threads.

    Attributes:
        ran_ns: On a core.
        queued_ns: Ready to run, but without a core; 0 where the system does not measure it.
    """

    ran_ns: int
    queued_ns: int


def process_usage(pids: Iterable[int]) -> CpuUsage:
    """The sum over processes, with all their threads; those that have ended count as zero."""
    return _total(task for pid in pids for task in _tasks(pid))


def thread_usage(native_ids: Iterable[int]) -> CpuUsage:
    """The sum over threads of this process."""
    return _total(f"/proc/self/task/{native_id}" for native_id in native_ids)


def _tasks(pid: int) -> list[str]:
    directory = f"/proc/{pid}/task"
    try:
        return [f"{directory}/{name}" for name in os.listdir(directory)]
    except OSError:
        return []


def _total(tasks: Iterable[str]) -> CpuUsage:
    ran_ns = queued_ns = 0
    for task in tasks:
        try:
            ran, queued, _ = text_of(f"{task}/schedstat").split()
        except (OSError, ValueError):
            ran, queued = _ticks(task), "0"
        ran_ns += int(ran)
        queued_ns += int(queued)
    return CpuUsage(ran_ns, queued_ns)


def _ticks(task: str) -> str:
    """Time on a core from a kernel without scheduler statistics, to a hundredth of a second."""
    try:
        fields = text_of(f"{task}/stat").rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return str(ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return "0"
