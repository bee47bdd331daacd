"""The state of the machine while a loader runs."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import TYPE_CHECKING

from minato._core import now_ns
from minato._system import (
    disk_read_bytes,
    machine_usage,
    memory_limit_bytes,
    recent_available_memory_bytes,
)
from minato.observe.stats.snapshot import MachineSnapshot

if TYPE_CHECKING:
    from minato.observe.monitor.gpus import GpuMonitor

__all__ = ["MachineMonitor", "measure"]

_RECENT_NS = 100_000_000
"""The kernel's counters have a tenth of this resolution."""


class MachineMonitor:
    """Takes snapshots of the machine, at most ten per second: one epoch often starts when another ends.

    Attributes:
        gpus: The monitor of the GPUs; None for none.
    """

    def __init__(self) -> None:
        self.gpus: GpuMonitor | None = None
        self._last_ns, self._last = 0, MachineSnapshot()

    def __call__(self) -> MachineSnapshot:
        """A recent snapshot."""
        if now_ns() - self._last_ns > _RECENT_NS:
            with contextlib.suppress(OSError):  # without free descriptors, training goes on
                self._last_ns, self._last = now_ns(), measure(self.gpus)
        return self._last


def measure(gpus: GpuMonitor | None) -> MachineSnapshot:
    """A new snapshot."""
    used_s, there_s = machine_usage()
    counts = Counter(
        cores_used_ns=round(1e9 * used_s),
        cores_there_ns=round(1e9 * there_s),
        disk_read_bytes=disk_read_bytes(),
    )
    if gpus is not None:
        counts.update(gpus.counts())
    names = () if gpus is None else gpus.gpus()
    return MachineSnapshot(counts, recent_available_memory_bytes(), _limit_bytes(), names)


@functools.cache
def _limit_bytes() -> int:
    return memory_limit_bytes()
