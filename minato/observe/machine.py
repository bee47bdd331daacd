"""The state of the machine, and the counters of sources and caches, while a loader runs."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch.utils.data import Dataset

from minato._core import now_ns
from minato._support.counters import Counters
from minato._support.objects import Search
from minato._system import (
    disk_read_bytes,
    machine_usage,
    memory_limit_bytes,
    recent_available_memory_bytes,
)
from minato.observe.observers import Counts

if TYPE_CHECKING:
    from minato.observe.gpus import GpuTable

_RECENT_NS = 100_000_000  # the kernel's counters have a tenth of this resolution


class MachineSnapshot(NamedTuple):
    """Counters and memory of the whole machine.

    The ``counts`` have an arbitrary start: ``cores_used_ns``, ``cores_there_ns``, ``disk_read_bytes``, and of each GPU
    ``gpu0_samples``, ``gpu0_idle`` (samples in which it was idle), ``gpu0_busy_percent`` (sum of its utilization),
    ``gpu0_used_mib`` (sum of the memory in use).
    """

    counts: Mapping[str, int] = {}
    available_bytes: int = 0
    limit_bytes: int = 0
    gpus: tuple[tuple[str, int], ...] = ()


class MachineMonitor:
    """Takes snapshots of the machine, at most ten per second: one epoch often starts when another ends.

    Those without GPUs are the same for all loaders of the process.
    """

    _of_all: ClassVar[tuple[int, MachineSnapshot]] = 0, MachineSnapshot()

    def __init__(self) -> None:
        self.gpus: GpuTable | None = None
        self._own = 0, MachineSnapshot()

    def __call__(self) -> MachineSnapshot:
        taken_ns, last = MachineMonitor._of_all if self.gpus is None else self._own
        if now_ns() - taken_ns > _RECENT_NS:
            with contextlib.suppress(OSError):  # without free descriptors, training goes on
                last = self._look()
                if self.gpus is None:
                    MachineMonitor._of_all = now_ns(), last
                else:
                    self._own = now_ns(), last
        return last

    def _look(self) -> MachineSnapshot:
        used_s, there_s = machine_usage()
        counts = Counter(
            cores_used_ns=round(1e9 * used_s),
            cores_there_ns=round(1e9 * there_s),
            disk_read_bytes=disk_read_bytes(),
        )
        if self.gpus is not None:
            counts.update(self.gpus.counts())
        names = () if self.gpus is None else self.gpus.gpus()
        return MachineSnapshot(counts, recent_available_memory_bytes(), _limit_bytes(), names)


_limit_bytes = functools.cache(memory_limit_bytes)


def storage_counts(
    dataset: object, cache: Counters | None, reads: Counters | None
) -> Callable[[], Counts]:
    """A function that returns the counters, by name, of a loader's cache and reads, and of sources in the dataset."""
    search = Search(
        lambda kind: issubclass(kind.kind, Counters),
        opens=lambda kind: issubclass(kind.kind, Dataset),
    )
    # Without a source there is nothing to find, and searching takes time.
    has_sources = not sys.modules.keys().isdisjoint(
        ("minato.sources.base", "minato.streams.shards")
    )
    nodes = search.run({"dataset": dataset}) if has_sources else []
    found = [("source", node.thing) for node in nodes]
    found += [(kind, each) for kind, each in (("cache", cache), ("fetch", reads)) if each]
    if not found:
        nothing = Counts()
        return lambda: nothing

    def total() -> Counts:
        counts = Counts()
        for kind, each in found:
            counts.add({f"{kind}_{name}": count for name, count in each.by_name().items()})
        return counts

    return total
