"""The state of a loader, its workers and the machine at one moment, for readers in any thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from minato._core import Histogram
from minato.observe.stats.histograms import EMPTY

__all__ = [
    "EpochObserver",
    "EpochSnapshot",
    "LoaderSnapshot",
    "MachineSnapshot",
    "Metrics",
    "WorkerActivity",
]


@dataclass
class Metrics:
    """Counters and histograms, which only grow; those of several runs can be added.

    Attributes:
        counts: By name, with the unit in the name.
        histograms: By name; read-only.
    """

    counts: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def since(self, older: Metrics) -> Metrics:
        """The increase since an older snapshot of the same metrics."""
        counts = Counter({name: count - older.counts[name] for name, count in self.counts.items()})
        histograms = {}
        for name, values in self.histograms.items():
            before = older.histograms.get(name, EMPTY)
            if before is values:
                histograms[name] = EMPTY
            else:
                histograms[name] = values.subtract(before) if before.count else values
        return Metrics(counts, histograms)

    def __add__(self, other: Metrics) -> Metrics:
        whole = Metrics()
        whole += self
        whole += other
        return whole

    def __iadd__(self, other: Metrics) -> Metrics:
        """Add other metrics to a sum, which owns its histograms."""
        self.counts.update(other.counts)
        for name, values in other.histograms.items():
            self.histograms.setdefault(name, Histogram()).merge(values)
        return self


class LoaderSnapshot(NamedTuple):
    """Workers and batches of a loader.

    Attributes:
        workers: Active workers.
        in_flight: Batches that are open or ready.
        ready: Batches that are ready.
        limit: The largest number of batches in flight.
        memory_bytes: Approximate memory of the batches in flight.
        budget_bytes: The memory budget.
    """

    workers: int
    in_flight: int
    ready: int
    limit: int
    memory_bytes: int
    budget_bytes: int


class WorkerActivity(NamedTuple):
    """The time of all workers together since they started.

    Attributes:
        busy_ns: Time with a current sample.
        idle_ns: Time without.
        stages: ``(samples, ns)`` of each stage, for the samples that were timed: the dataset, then the transforms.
    """

    busy_ns: int = 0
    idle_ns: int = 0
    stages: tuple[tuple[int, int], ...] = ()


class MachineSnapshot(NamedTuple):
    """Counters and memory of the whole machine.

    Attributes:
        counts: Counters with an arbitrary start: ``cores_used_ns``, ``cores_there_ns``, ``disk_read_bytes``, and of
            each GPU ``gpu0_samples``, ``gpu0_idle`` (samples in which it was idle), ``gpu0_busy_percent`` (sum of its
            utilization), ``gpu0_used_mib`` (sum of the memory in use).
        available_bytes: Memory that is available.
        limit_bytes: Total memory within the limits of the control groups.
        gpus: Name and bytes of each.
    """

    counts: Mapping[str, int] = {}
    available_bytes: int = 0
    limit_bytes: int = 0
    gpus: tuple[tuple[str, int], ...] = ()


class EpochSnapshot(NamedTuple):
    """The current epoch.

    Attributes:
        epoch: Its number.
        at_ns: Time since its start.
        began_ns: When it started, which tells epochs of one number apart; 0 if unknown.
        batches: Batches returned so far.
        length: Batches of the whole epoch; None if unknown.
        samples: Samples returned so far.
        nbytes: Bytes returned so far.
        waited_ns: Time in ``next()`` and ``iter()`` so far, the current call included.
        loader: Recent state of the loader; None before the first batch.
        activity: Of the workers.
        machine: Of the machine.
    """

    epoch: int = 0
    at_ns: int = 0
    batches: int = 0
    length: int | None = None
    samples: int = 0
    nbytes: int = 0
    waited_ns: int = 0
    loader: LoaderSnapshot | None = None
    activity: WorkerActivity = WorkerActivity()
    machine: MachineSnapshot = MachineSnapshot()
    began_ns: int = 0


class EpochObserver(Protocol):
    """Is notified of the start and the end of each epoch."""

    def started(self) -> None:
        """An epoch has started, and its workers run."""

    def ended(self) -> None:
        """The epoch has ended or was abandoned; called in the thread that noticed."""
