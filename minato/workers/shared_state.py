"""The shared segment of the training process and its workers: ledger, meters, active workers, read limit, handover.

The leases in the ledger say what each worker runs: a sample, or the collation of a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from minato._core import (
    READY_EVENTS_OFFSET,
    WORK_EVENTS_OFFSET,
    ConsumerLedger,
    EventCount,
    SharedWords,
    WorkerLedger,
)
from minato._core.codes import FIRST_COLLATED, READING
from minato._core.segment import Memory, Segment
from minato._fork_safety import renew_in_children, starts_worker
from minato.batching.sample_spec import Handover
from minato.batching.serialization import StoredIndices
from minato.observe.meters import Meters
from minato.sampling.readers import ReaderBoard

_WORDS_NBYTES = SharedWords.nbytes(1)
_PATIENCE_S = 1.0
"""The longest sleep of an inactive worker between two checks that its parent is alive."""
_LINE = 64  # bytes of a cache line, to which the parts are aligned


class ActiveWorkers:
    """Workers with a number below ``count`` are active, the others sleep; active ones on the event count ``work``.

    Inactive processes start before the program has threads or uses a GPU, when a fork is safe. They sleep on an event
    count of their own: on the one of the active workers they would consume its wake-ups.
    """

    NBYTES = 64

    def __init__(self, buffer: Memory, offset: int, work: EventCount) -> None:
        self._words = SharedWords(buffer, offset, 1)
        self._events = EventCount(buffer, offset + _WORDS_NBYTES)
        self._work = work

    @property
    def count(self) -> int:
        """Number of active workers."""
        return self._words.load(0)

    def set_count(self, count: int) -> None:
        """Set the number of active workers; a worker that becomes inactive first completes what it has claimed."""
        self._words.store(0, count)
        self._events.notify()
        self._work.notify()  # an inactive worker that sleeps there would consume wake-ups of active ones

    def wake_inactive(self) -> None:
        """Wake the inactive workers, because the loader shuts down."""
        self._events.notify()

    def is_active(self, number: int) -> bool:
        """Whether worker ``number`` is active now."""
        return number < self._words.load(0)

    def wait_until_active(
        self, number: int, over: Callable[[], bool], parent_lives: Callable[[], bool]
    ) -> bool:
        """Sleep until worker ``number`` is active; False if it must exit: ``over()`` holds or its parent ended."""
        while True:
            seen = self._events.events
            if self.is_active(number):
                return True
            if over():
                return False
            if not self._events.wait(seen, _PATIENCE_S) and not parent_lives():
                return False


class SharedReadLimit:
    """A limit of reads in flight, ``most`` or None, that all workers share; each may always have one."""

    def __init__(self, buffer: Memory, offset: int, workers: int, most: int | None) -> None:
        self._in_flight = SharedWords(buffer, offset, workers)
        self._workers = range(workers)
        self.unlimited = most is None
        self._shared = 0 if most is None else max(most - workers, 0)

    @staticmethod
    def nbytes(workers: int) -> int:
        """Bytes for this number of workers: whole cache lines."""
        return -(-SharedWords.nbytes(workers) // _LINE) * _LINE

    def begin(self, number: int) -> None:
        """Reset the count of worker ``number``, which starts: the reads of a predecessor are lost."""
        self._in_flight.store(number, 0)

    def take(self, number: int, wanted: int) -> int:
        """Return how many of ``wanted`` reads worker ``number`` may start; they count as in flight."""
        in_flight = self._in_flight
        own = in_flight.load(number)
        # Store first, then read: of two workers that take at the same time, at least one sees what both have taken.
        in_flight.store(number, own + wanted)
        if self.unlimited:
            return wanted
        excess = sum(max(in_flight.load(one) - 1, 0) for one in self._workers) - self._shared
        back = min(max(excess, 0), wanted - (own == 0))
        if back:
            in_flight.store(number, own + wanted - back)
        return wanted - back

    def give_back(self, number: int, count: int = 1) -> None:
        """Count ``count`` reads of worker ``number`` as finished."""
        self._in_flight.store(number, self._in_flight.load(number) - count)


class Suspects:
    """Batches of which a worker has run several samples at once when it ended: now one by one, to find the cause.

    For each worker one batch is known, by the position of its first sample.
    """

    def __init__(self, buffer: Memory, offset: int, workers: int) -> None:
        self._words, self._workers = SharedWords(buffer, offset, workers), range(workers)

    def add(self, number: int, first: int) -> None:
        """Note that worker ``number`` has ended in a call for a batch."""
        self._words.store(number, first + 1)

    def __contains__(self, first: int) -> bool:
        return any(self._words.load(number) == first + 1 for number in self._workers)


class SharedLayout(NamedTuple):
    """A segment and the sizes of its parts (ledger, and those of ``offsets``); travels to worker processes.

    Each part begins at a multiple of 8. Zeros are its beginning: no worker is active, and nothing known or in flight.
    """

    segment: Segment
    num_workers: int
    num_steps: int
    ledger_nbytes: int
    num_readers: int = 0

    @property
    def offsets(self) -> list[int]:
        """Where meters, active workers, read limit, suspects, handover and board begin, and the last one ends."""
        sizes = (
            self.ledger_nbytes,
            self.num_workers * Meters.nbytes(self.num_steps),
            ActiveWorkers.NBYTES,
            SharedReadLimit.nbytes(self.num_workers),
            SharedReadLimit.nbytes(self.num_workers),
            Handover.NBYTES,
            ReaderBoard.nbytes(self.num_readers),
        )
        return list(itertools.accumulate(sizes))


class SharedState:
    """The parts of the segment in one process.

    ``ready`` and ``work`` count batches that are ready, and available samples; the ``board`` is that of readers.
    """

    def __init__(self, layout: SharedLayout, ledger: ConsumerLedger | None = None) -> None:
        memory = layout.segment.array
        self.layout, self._ledger = layout, ledger
        self.ready = EventCount(memory, READY_EVENTS_OFFSET)
        self.work = EventCount(memory, WORK_EVENTS_OFFSET)
        _, active, self._reads_offset, suspects, handover, board, _ = layout.offsets
        self.active = ActiveWorkers(memory, active, self.work)
        self.suspects = Suspects(memory, suspects, layout.num_workers)
        self.handover = Handover(memory, handover)
        self.board = ReaderBoard(memory, board, layout.num_readers)
        self._meters: dict[int, Meters] = {}
        renew_in_children(layout.segment, _separate)

    @classmethod
    def create(
        cls,
        *,
        num_workers: int,
        records: int,
        positions: int,
        num_steps: int,
        shared: bool,
        num_readers: int = 0,
    ) -> SharedState:
        """A new segment for a largest number of workers, of batches (``records``) and of samples in flight.

        The number of samples (``positions``) is a power of two. ``shared``: other processes use it too.
        """
        sizes = (num_workers, records, positions)
        ledger_nbytes = -(-ConsumerLedger.nbytes(*sizes) // _LINE) * _LINE
        layout = SharedLayout(cast(Any, None), num_workers, num_steps, ledger_nbytes, num_readers)
        segment = Segment(layout.offsets[-1], shared=shared)
        layout = layout._replace(segment=segment)
        return cls(layout, ConsumerLedger(segment.array, sizes, segment.descriptor))

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

    # ---- what pools ask

    def stop(self) -> None:
        """Ask the workers to exit."""
        self.ledger.shut_down()
        self.active.wake_inactive()

    def may_leave(self, number: int) -> bool:
        """Whether worker ``number`` may exit by itself: nothing is left for it, and it holds nothing."""
        return self.ledger.draining and not self.ledger.owns(number)

    def has_work(self) -> bool:
        """Whether there is work for one more worker."""
        return self.ledger.unclaimed() > 0

    def has_begun(self, number: int) -> bool:
        """Whether worker ``number`` runs, or has ever run, a sample."""
        ledger = self.ledger
        return bool(ledger.activity(number).samples) or ledger.lease(number).position is not None

    def wait_until_active(self, number: int, parent_lives: Callable[[], bool]) -> bool:
        """Sleep until worker ``number`` is active; False if it must exit, as for :class:`ActiveWorkers`."""
        ledger = self._ledger or self.worker_ledger(number)
        return self.active.wait_until_active(
            number, lambda: ledger.stopping or ledger.draining, parent_lives
        )

    # ---- parts of single workers

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
        return SharedReadLimit(layout.segment.array, self._reads_offset, layout.num_workers, most)


class CurrentSample(NamedTuple):
    """A sample that a worker runs, since ``started_ns`` on ``now_ns``, at a transform; None: the dataset itself.

    ``occurrence``: how often its index came before in the epoch. ``is_read``: it is an item that a reader is asked for.
    """

    position: int
    index: Any
    epoch: int
    seed: int
    transform: str | None
    started_ns: int
    occurrence: int = 0
    is_read: bool = False


class Collation(NamedTuple):
    """A batch that a worker collates: the position of its first sample, and its indices, for a message."""

    first: int
    indices: str


@dataclass(frozen=True, eq=False)
class CurrentWork:
    """Reads from the leases what the workers run, or ran when they died."""

    ledger: ConsumerLedger
    indices: StoredIndices
    names: Sequence[str]

    def sample(self, number: int) -> CurrentSample | None:
        """The sample that worker ``number`` runs; None: none."""
        ledger, names = self.ledger, self.names
        position, started_ns, step = ledger.lease(number)
        if position is None:
            return None
        batch, k = ledger.locate(position)
        record = ledger.describe(batch)
        if not 0 <= k < record.count:
            return None  # it has completed its last sample, and the batch was yielded
        index = self.indices.name(next(iter(self.indices.read(batch, k, 1))))
        name = names[step] if 0 <= step < len(names) else None
        (occurrence,) = ledger.occurrences(position, 1) or (0,)
        of_sample = position, index, record.epoch, record.seed, name, started_ns, occurrence
        return CurrentSample(*of_sample, is_read=step == READING)

    def collation(self, number: int) -> Collation | None:
        """The batch that worker ``number`` collates; None: none."""
        position, _, step = self.ledger.lease(number)
        if position is not None or step > FIRST_COLLATED:
            return None
        batch = FIRST_COLLATED - step
        return Collation(self.ledger.describe(batch).first, self.indices.describe(batch))


def _separate(segment: Segment) -> None:
    """Have a forked child of the program, or of a worker, change only its own copy."""
    if not starts_worker():
        segment.separate()
