"""A separate program that samples the GPUs ten times a second and adds the values in shared memory.

A process of its own keeps slow driver calls out of the training process. It imports nothing of minato, so that it
starts quickly. It ends with the process that started it.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["FIELDS", "NBYTES", "Gpu", "Table", "run"]

INTERVAL_S = 0.1
FIELDS = ("samples", "idle", "busy_percent", "used_mib", "total_mib")
"""Of each GPU: samples, samples in which it was idle, sums of its utilization in percent and of the MiB in use, and
its total MiB."""
_MOST_GPUS = 32
_TEXT = 64
_ROW = 8 * len(FIELDS) + _TEXT
NBYTES = 8 + _MOST_GPUS * _ROW


class Gpu(Protocol):
    """A GPU that can be sampled."""

    name: str

    def look(self) -> tuple[float, int, int]:
        """Utilization in percent, bytes in use, total bytes."""


class Table:
    """The counters, in memory of :data:`NBYTES` bytes; zeros are an empty table."""

    def __init__(self, memory: Any) -> None:
        self._memory: Any = memoryview(memory).cast("B")
        self._count: Any = self._memory[:8].cast("q")

    @property
    def count(self) -> int:
        """The number of GPUs."""
        return int(self._count[0])

    def row(self, number: int) -> Any:
        """The counters of a GPU, in the order of :data:`FIELDS`."""
        start = 8 + number * _ROW
        return self._memory[start : start + 8 * len(FIELDS)].cast("d")

    def name(self, number: int) -> str:
        """The name of a GPU."""
        end = 8 + (number + 1) * _ROW
        return bytes(self._memory[end - _TEXT : end]).rstrip(b"\0").decode(errors="replace")

    def add(self, number: int, gpu: Gpu) -> None:
        """Add a sample of a GPU."""
        percent, used, total = gpu.look()
        row = self.row(number)
        row[1] += percent == 0
        row[2] += percent
        row[3] += used / 2**20
        row[4] = total / 2**20
        row[0] += 1

    def enter(self, gpus: Sequence[Gpu]) -> None:
        """Initialize the table for these GPUs."""
        for number, gpu in enumerate(gpus):
            name = gpu.name.encode()[:_TEXT].ljust(_TEXT, b"\0")
            end = 8 + (number + 1) * _ROW
            self._memory[end - _TEXT : end] = name
        self._count[0] = len(gpus)


class _Nvml:
    """A GPU through NVML."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        name = nvml.nvmlDeviceGetName(handle)
        self.name = name.decode() if isinstance(name, bytes) else str(name)

    def look(self) -> tuple[float, int, int]:
        use = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return float(use.gpu), int(memory.used), int(memory.total)


def visible(nvml: Any, named: str | None) -> list[Gpu]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` names, all without it; only those that report their use."""
    if named is None:
        named = ",".join(map(str, range(nvml.nvmlDeviceGetCount())))
    found: list[Gpu] = []
    try:
        for name in filter(None, map(str.strip, named.split(","))):
            gpu = _Nvml(nvml, _handle(nvml, name))
            gpu.look()
            found.append(gpu)
    except nvml.NVMLError:  # like CUDA: the devices before an invalid one
        pass
    return found[:_MOST_GPUS]


def _handle(nvml: Any, name: str) -> Any:
    if name.lstrip("-").isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


def run(gpus: Sequence[Gpu], table: Table, wanted: Callable[[], bool]) -> None:
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
            table = Table(mmap.mmap(descriptor, NBYTES))
            run(gpus, table, lambda: os.getppid() == parent)
    except (pynvml.NVMLError, KeyboardInterrupt):
        pass  # without a driver there are no GPUs


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
