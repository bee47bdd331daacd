"""The shared segment of the training process and its workers: ledger, meters, active workers, read limit, handover."""

from __future__ import annotations

from typing import NamedTuple

from minato._core import (
    READY_EVENTS_OFFSET,
    WORK_EVENTS_OFFSET,
    ConsumerLedger,
    EventCount,
    WorkerLedger,
)
from minato._core.segment import Segment
from minato._fork_safety import renew_in_children, starts_worker
from minato.batching.handover import Handover
from minato.observe.meters import Meters
from minato.workers.active_workers import ActiveWorkers
from minato.workers.concurrent import SharedReadLimit

__all__ = ["SharedLayout", "SharedState"]

_LINE = 64
"""Bytes of a cache line, to which the parts are aligned."""


class SharedLayout(NamedTuple):
    """A segment and the offsets of its parts; travels to worker processes.

    Attributes:
        segment: Holds ledger, meters, active workers, read limit and handover, one after the other.
        num_workers: Largest number of workers.
        num_steps: Number of transforms, each with a meter.
        ledger_nbytes: Size of the ledger.
    """

    segment: Segment
    num_workers: int
    num_steps: int
    ledger_nbytes: int

    @property
    def active_offset(self) -> int:
        """Offset of the active workers, after the meters."""
        return self.ledger_nbytes + self.num_workers * Meters.nbytes(self.num_steps)

    @property
    def reads_offset(self) -> int:
        """Offset of the read limit."""
        return self.active_offset + ActiveWorkers.NBYTES

    @property
    def handover_offset(self) -> int:
        """Offset of what is known of handing over samples."""
        return self.reads_offset + SharedReadLimit.nbytes(self.num_workers)


class SharedState:
    """The parts of the segment in one process.

    Attributes:
        layout: The offsets of the parts.
        ready: Counts batches that have become ready.
        work: Counts samples that have become available.
        active: Which workers are active.
        handover: Whether workers may hand samples over to each other.
    """

    def __init__(self, layout: SharedLayout, ledger: ConsumerLedger | None = None) -> None:
        memory = layout.segment.array
        self.layout = layout
        self._ledger = ledger
        self.ready = EventCount(memory, READY_EVENTS_OFFSET)
        self.work = EventCount(memory, WORK_EVENTS_OFFSET)
        self.active = ActiveWorkers(memory, layout.active_offset, self.work)
        self.handover = Handover(memory, layout.handover_offset)
        self._meters: dict[int, Meters] = {}
        renew_in_children(layout.segment, _separate)

    @classmethod
    def create(
        cls, *, num_workers: int, records: int, positions: int, num_steps: int, shared: bool
    ) -> SharedState:
        """A new segment.

        Args:
            num_workers: Largest number of workers, at least 1.
            records: Largest number of batches in flight.
            positions: Largest number of samples in flight, a power of two.
            num_steps: Number of transforms.
            shared: Whether other processes use the segment too.
        """
        sizes = (num_workers, records, positions)
        ledger_nbytes = -(-ConsumerLedger.nbytes(*sizes) // _LINE) * _LINE
        nbytes = ledger_nbytes + num_workers * Meters.nbytes(num_steps) + ActiveWorkers.NBYTES
        nbytes += SharedReadLimit.nbytes(num_workers) + Handover.NBYTES
        segment = Segment(nbytes, shared=shared)
        layout = SharedLayout(segment, num_workers, num_steps, ledger_nbytes)
        return cls(layout, ConsumerLedger(segment.array, sizes, segment.descriptor))

    @classmethod
    def attach(cls, layout: SharedLayout) -> SharedState:
        """The parts of a segment that another process created."""
        return cls(layout)

    @property
    def ledger(self) -> ConsumerLedger:
        """The consumer's end of the ledger: only the process that created the segment has it."""
        assert self._ledger is not None, "the ledger's other end is in the training process"
        return self._ledger

    def worker_ledger(self, number: int) -> WorkerLedger:
        """The end of worker ``number``: it claims samples, and fills their places in batches."""
        if self._ledger is not None:
            return self._ledger.worker(number)
        segment = self.layout.segment
        return WorkerLedger(segment.array, number, segment.descriptor)

    def meters(self, number: int) -> Meters:
        """The measurements of worker ``number``."""
        found = self._meters.get(number)
        if found is None:
            layout = self.layout
            nbytes = Meters.nbytes(layout.num_steps)
            start = layout.ledger_nbytes + number * nbytes
            memory = layout.segment.array[start : start + nbytes]
            found = self._meters[number] = Meters(layout.num_steps, memory)
        return found

    def read_limit(self, most: int | None) -> SharedReadLimit:
        """The limit of in-flight reads of all workers together; ``most`` None: unlimited."""
        layout = self.layout
        return SharedReadLimit(layout.segment.array, layout.reads_offset, layout.num_workers, most)


def _separate(segment: Segment) -> None:
    """Have a forked child of the program, or of a worker, change only its own copy."""
    if not starts_worker():
        segment.separate()
