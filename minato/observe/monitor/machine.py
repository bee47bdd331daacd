"""What the machine does while a loader runs."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import TYPE_CHECKING

from minato._core.clock import now_ns
from minato._system import (
    disk_read_bytes,
    machine_usage,
    memory_limit_bytes,
    memory_of_late_bytes,
)
from minato.observe.stats.snapshot import MachineSnapshot

if TYPE_CHECKING:
    from minato.observe.monitor.gpus import GpuMonitor

__all__ = ["MachineMonitor", "look"]

_RECENT_NS = 100_000_000
"""The kernel counts in steps of a tenth of it."""


class MachineMonitor:
    """Looks, unless it did so a moment ago: the end of an epoch is often the beginning of the next.

    Attributes:
        gpus: What watches the GPUs; None: nobody does.
    """

    def __init__(self) -> None:
        self.gpus: GpuMonitor | None = None
        self._last_ns, self._last = 0, MachineSnapshot()

    def __call__(self) -> MachineSnapshot:
        """What the machine does now."""
        if now_ns() - self._last_ns > _RECENT_NS:
            with contextlib.suppress(OSError):  # a program that has no descriptor left still trains
                self._last_ns, self._last = now_ns(), look(self.gpus)
        return self._last


def look(gpus: GpuMonitor | None) -> MachineSnapshot:
    """Counters and memory now."""
    used_s, there_s = machine_usage()
    counts = Counter(
        cores_used_ns=round(1e9 * used_s),
        cores_there_ns=round(1e9 * there_s),
        disk_read_bytes=disk_read_bytes(),
    )
    if gpus is not None:
        counts.update(gpus.counts())
    names = () if gpus is None else gpus.gpus()
    return MachineSnapshot(counts, memory_of_late_bytes(), _limit_bytes(), names)


@functools.cache
def _limit_bytes() -> int:
    return memory_limit_bytes()
