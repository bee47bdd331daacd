"""The use of the GPUs, sampled by a separate process."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path

from minato.observe.monitor import nvml_process
from minato.observe.monitor.nvml_process import FIELDS, NBYTES, Table

__all__ = ["GpuMonitor", "gpu_monitor"]

_DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Device files of a driver, on Linux and in WSL."""
_GRACE_S = 5.0
"""Time limit for the end of the process."""


class GpuMonitor:
    """The counters of the GPUs; monitoring ends with the last reference to this object.

    Args:
        descriptor: Of the memory that holds the counters.
    """

    def __init__(self, descriptor: int) -> None:
        self._table = Table(mmap.mmap(descriptor, NBYTES))

    def gpus(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of each; empty until the process has started."""
        table = self._table
        return tuple(
            (table.name(i), round(table.row(i)[FIELDS.index("total_mib")] * 2**20))
            for i in range(table.count)
        )

    def counts(self) -> Counter[str]:
        """By ``gpu0_samples``, ``gpu0_idle``, ``gpu0_busy_percent``, ``gpu0_used_mib``, ``gpu1_samples`` and so on."""
        return Counter(
            {
                f"gpu{i}_{name}": round(value)
                for i in range(self._table.count)
                for name, value in zip(FIELDS[:-1], self._table.row(i), strict=False)
            }
        )


_present: weakref.ref[GpuMonitor] | None = None


def gpu_monitor() -> GpuMonitor | None:
    """The monitor of this process, which ends with its last reference; None without a GPU driver."""
    global _present
    monitor = None if _present is None else _present()
    if monitor is None and any(path.exists() for path in _DRIVER) and hasattr(os, "memfd_create"):
        monitor = _started()
        _present = None if monitor is None else weakref.ref(monitor)
    return monitor


def _started() -> GpuMonitor | None:
    descriptor = os.memfd_create("minato-gpus")
    try:
        os.ftruncate(descriptor, NBYTES)
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, nvml_process.__file__, str(descriptor), str(os.getpid())],
            pass_fds=[descriptor],
            stdin=null,
            stdout=null,
            stderr=null,
        )
        monitor = GpuMonitor(descriptor)
    except OSError:  # no process can be started: no monitoring
        return None
    finally:
        os.close(descriptor)
    weakref.finalize(monitor, _end, process, os.getpid())
    return monitor


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which has a copy
        process.kill()  # it has nothing to clean up
        with suppress(subprocess.TimeoutExpired):  # a driver that hangs also blocks the kill
            process.wait(_GRACE_S)
