"""What the GPUs do, from a process beside the training process."""

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
"""Where a driver shows itself, on Linux and under Windows."""
_GRACE_S = 5.0
"""How long the end of the process is waited for."""


class GpuMonitor:
    """Counts how the GPUs are used, as long as anybody refers to it.

    Args:
        descriptor: Of the memory that the counts lie in.
    """

    def __init__(self, descriptor: int) -> None:
        self._table = Table(mmap.mmap(descriptor, NBYTES))

    def gpus(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of each; none while the process starts, and where there are none."""
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
    """The one of this process, which ends with the last reference to it; None without a driver for GPUs."""
    global _present
    watch = None if _present is None else _present()
    if watch is None and any(path.exists() for path in _DRIVER) and hasattr(os, "memfd_create"):
        watch = _started()
        _present = None if watch is None else weakref.ref(watch)
    return watch


def _started() -> GpuMonitor | None:
    descriptor = os.memfd_create("minato-gpus")
    try:
        os.ftruncate(descriptor, NBYTES)
        away = subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, nvml_process.__file__, str(descriptor), str(os.getpid())],
            pass_fds=[descriptor],
            stdin=away,
            stdout=away,
            stderr=away,
        )
        watch = GpuMonitor(descriptor)
    except OSError:  # no further process can be had: then nobody watches
        return None
    finally:
        os.close(descriptor)
    weakref.finalize(watch, _end, process, os.getpid())
    return watch


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # and no forked child's copy
        process.kill()  # it has nothing to put in order
        with suppress(
            subprocess.TimeoutExpired
        ):  # a driver that hangs does not even let it be killed
            process.wait(_GRACE_S)
