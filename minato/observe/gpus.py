"""The use of the GPUs, sampled ten times a second by a separate process, which runs this file.

So slow calls of the driver stay out of the training. It imports nothing of minato, to start quickly, adds the values in
shared memory, and ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

INTERVAL_S = 0.1
_MOST_GPUS = 32
_COUNTS = ("samples", "idle", "busy_percent", "used_mib")


class _Row(ctypes.Structure):
    """Of a GPU: samples, samples in which it was idle, sums of its utilization and of the MiB in use; its total MiB."""

    _fields_ = (
        *((name, ctypes.c_double) for name in _COUNTS),
        ("total_mib", ctypes.c_double),
        ("name", ctypes.c_char * 64),
    )


class _Table(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("rows", _Row * _MOST_GPUS))


NBYTES = ctypes.sizeof(_Table)
_DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Device files of a driver, on Linux and in WSL."""
_GRACE_S = 5.0


class GpuTable:
    """The counters of the GPUs, in memory of :data:`NBYTES` bytes; zeros are an empty table."""

    def __init__(self, memory: bytearray | mmap.mmap) -> None:
        self._table = _Table.from_buffer(memory)

    @property
    def rows(self) -> list[Any]:
        """The counters of each GPU; empty until the process has started."""
        found: list[Any] = self._table.rows[: self._table.count]
        return found

    def enter(self, gpus: Sequence[Gpu]) -> None:
        """Initialize the table for these GPUs."""
        for row, gpu in zip(self._table.rows, gpus, strict=False):
            row.name = gpu.name.encode()[: type(row).name.size]
        self._table.count = len(gpus)

    def add(self, number: int, gpu: Gpu) -> None:
        """Add a sample of a GPU."""
        percent, used, total = gpu.look()
        row = self._table.rows[number]
        row.idle += percent == 0
        row.busy_percent += percent
        row.used_mib += used / 2**20
        row.total_mib = total / 2**20
        row.samples += 1

    def gpus(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of each."""
        return tuple(
            (row.name.decode(errors="replace"), round(row.total_mib * 2**20)) for row in self.rows
        )

    def counts(self) -> Counter[str]:
        """By ``gpu0_samples``, ``gpu0_idle``, ``gpu0_busy_percent``, ``gpu0_used_mib``, ``gpu1_samples`` and so on."""
        counts: Counter[str] = Counter()
        for number, row in enumerate(self.rows):
            counts.update({f"gpu{number}_{name}": round(getattr(row, name)) for name in _COUNTS})
        return counts


# ---- the training process -------------------------------------------------------------------

_present: weakref.ref[GpuTable] | None = None


def has_driver() -> bool:
    """Whether this machine has a driver of NVIDIA's."""
    return any(path.exists() for path in _DRIVER)


def gpu_table() -> GpuTable | None:
    """The table of this process, whose GPUs are sampled until its last reference ends; None without a driver."""
    global _present
    table = None if _present is None else _present()
    if table is None and has_driver() and hasattr(os, "memfd_create"):
        table = _started()
        _present = None if table is None else weakref.ref(table)
    return table


def _started() -> GpuTable | None:
    null = subprocess.DEVNULL
    try:
        descriptor = os.memfd_create("minato-gpus")
        try:
            os.ftruncate(descriptor, NBYTES)
            command = [sys.executable, "-P", __file__, str(descriptor), str(os.getpid())]
            process = subprocess.Popen(
                command, pass_fds=[descriptor], stdin=null, stdout=null, stderr=null
            )
            table = GpuTable(mmap.mmap(descriptor, NBYTES))
        finally:
            os.close(descriptor)
    except OSError:  # neither memory to share nor a process can be had: no monitoring
        return None
    weakref.finalize(table, _end, process, os.getpid())
    return table


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which has a copy
        process.kill()  # it has nothing to clean up
        with suppress(subprocess.TimeoutExpired):  # a driver that hangs also blocks the kill
            process.wait(_GRACE_S)


# ---- the separate process -------------------------------------------------------------------


class Gpu:
    """A GPU, through NVML."""

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        self._nvml, self._handle = nvml, handle
        name = nvml.nvmlDeviceGetName(handle)
        self.name = name.decode() if isinstance(name, bytes) else str(name)

    def look(self) -> tuple[float, int, int]:
        """Utilization in percent, bytes in use, total bytes."""
        use = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return float(use.gpu), int(memory.used), int(memory.total)


def visible(nvml: ModuleType, named: str | None) -> list[Gpu]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` names, all without it; only those that report their use."""
    if named is None:
        named = ",".join(map(str, range(nvml.nvmlDeviceGetCount())))
    found: list[Gpu] = []
    try:
        for name in filter(None, map(str.strip, named.split(","))):
            if name.lstrip("-").isdigit():
                handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(name)
            gpu = Gpu(nvml, handle)
            gpu.look()
            found.append(gpu)
    except nvml.NVMLError:  # like CUDA: the devices before an invalid one
        pass
    return found[:_MOST_GPUS]


def run(gpus: Sequence[Gpu], table: GpuTable, wanted: Callable[[], bool]) -> None:
    """Sample GPUs while ``wanted()`` is true."""
    table.enter(gpus)
    while wanted():
        for number, gpu in enumerate(gpus):
            table.add(number, gpu)
        time.sleep(INTERVAL_S)


def main(descriptor: int, parent: int) -> None:
    """Fill the table in a memory file while the parent process lives."""
    import pynvml

    try:
        pynvml.nvmlInit()
        gpus = visible(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if gpus:
            table = GpuTable(mmap.mmap(descriptor, NBYTES))
            run(gpus, table, lambda: os.getppid() == parent)
    except (pynvml.NVMLError, KeyboardInterrupt):
        pass  # without a driver there are no GPUs


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
