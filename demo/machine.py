"""What else the machine was doing: timings taken beside other programs must say so."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
# Fields of a cpu line in /proc/stat that are not idle: user, nice, system, irq, softirq, steal.
_BUSY_FIELDS = (1, 2, 3, 6, 7, 8)


def available_cores() -> set[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _busy_s() -> float | None:
    """Processor time that all programs have used on our cores since boot; None where unknown."""
    if not _STAT.is_file():
        return None
    names = {f"cpu{core}" for core in available_cores()}
    ticks = 0
    for line in _STAT.read_text().splitlines():
        fields = line.split()
        if fields and fields[0] in names:
            ticks += sum(int(fields[i]) for i in _BUSY_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Processor time of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class OthersClock:
    """Measures the share of our cores that went to other programs, from construction on."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def share(self) -> float | None:
        """Share from 0 to 1, None where unknown; to be called when the workers have ended."""
        busy_s = _busy_s()
        if busy_s is None or self._busy_s is None:
            return None
        others_s = (busy_s - self._busy_s) - (_own_s() - self._own_s)
        elapsed_s = time.perf_counter() - self._start_s
        return max(0.0, others_s / (elapsed_s * len(available_cores())))
