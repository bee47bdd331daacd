"""Several reads in flight in each worker (``fetch_concurrency``): their limit, second requests, and the worker."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from minato._core import Claim, Histogram, WorkerLedger, now_ns
from minato.batching.writer import BatchWriter
from minato.options import FetchOptions
from minato.workers.error_policy import SampleRetry
from minato.workers.fetch import Fetcher
from minato.workers.plan import WorkerPlan
from minato.workers.reads import BegunLists, Read, Reads
from minato.workers.runner import Runner
from minato.workers.shared_state import SharedReadLimit, SharedState
from minato.workers.worker import ALL_SAMPLES, WHOLE_BATCH, Worker

__all__ = [
    "ConcurrentWorker",
    "Hedging",
    "InFlight",
    "close_reads",
]

_CLAIMED_SHARE = 4
"""While reads have finished, further ones are claimed when a fourth of the limit is free."""
_PATIENCE_S = 1.0
"""The longest wait for a read between two checks whether the loader shuts down."""
_LEAST_READS = 20
"""Reads that must have finished before a read counts as a straggler."""
_LEAST_NS = 1_000_000
"""A second request for a faster read saves nothing."""
_MOST_SAVED = 2.0
"""Second requests that may accumulate in a time without stragglers, so that congestion causes no burst of them."""


class Hedging:
    """Finds stragglers among the reads of one worker, each at most once.

    Under congestion every read is a straggler. Beyond the expected share, only one read at a time is hedged.

    Args:
        percentile: Between 0 and 100; a read that takes longer than this one of all reads is a straggler.
    """

    def __init__(self, percentile: float) -> None:
        self._quantile = percentile / 100
        self._durations = Histogram()
        self._allowed = 0.0
        self._limit_ns = 0
        self._pending = 0

    def note(self, duration_ns: int) -> None:
        """Record the duration of a read."""
        self._durations.record(duration_ns)
        self._allowed = min(self._allowed + 1 - self._quantile, _MOST_SAVED)
        if self._durations.count >= _LEAST_READS:
            self._limit_ns = max(self._durations.percentile(self._quantile), _LEAST_NS)

    def straggler(self, in_flight: Iterable[Read], now_ns: int) -> tuple[Read | None, float | None]:
        """The read to hedge now, if there is one; otherwise after how many seconds there may be one.

        The caller that hedges it calls ``on_hedge``.
        """
        if not self._limit_ns or (self._allowed < 1 and self._pending):
            return None, None
        late = (read for read in in_flight if read.started_ns and not read.duration_ns)
        waiting = (read for read in late if read.attempts == 1)
        oldest = min(waiting, key=lambda read: read.started_ns, default=None)
        if oldest is None:
            return None, None
        remaining_ns = oldest.started_ns + self._limit_ns - now_ns
        return (oldest, None) if remaining_ns <= 0 else (None, remaining_ns / 1e9)

    def on_hedge(self) -> None:
        """Count a second request."""
        self._allowed = max(self._allowed - 1, 0.0)
        self._pending += 1

    def on_answer(self) -> None:
        """Count the answer to a second request."""
        self._pending -= 1


@dataclass(eq=False)
class _ClaimedRun:
    """Samples that were claimed together.

    Attributes:
        first: Position of the batch's sample 0.
        k: Which sample of the batch is the first of the run.
        held: The complete samples, or what they raised, if all are written together; else None.
        missing: Number of these that are not complete.
    """

    batch: int
    first: int
    k: int
    bound: bool
    epoch: int
    seed: int
    indices: list[Any]
    held: list[Any] | None
    missing: int


class _Raised(NamedTuple):
    """Stands for a held sample that raised."""

    error: BaseException


class InFlight:
    """The reads of one worker: those that wait for the limits, those that have begun, and second requests.

    Args:
        number: The worker's.
        reads: Reads the samples, or the batches; an attribute, too.
        read_limit: The reads in flight of all workers.
        options: Whether slow reads are hedged, and the counters of reads.

    Attributes:
        positions: The first requests that are not complete, with their positions; the oldest first.
    """

    def __init__(
        self, number: int, reads: Reads, read_limit: SharedReadLimit, options: FetchOptions
    ) -> None:
        self.reads = reads
        self.positions: dict[Read, int] = {}
        self._number = number
        self._read_limit = read_limit
        self._read_limit.begin(number)
        self._counters = options.counters
        percentile = options.hedge_percentile
        self._hedging = None if percentile is None else Hedging(percentile)
        self._waiting: deque[Read] = deque()

    @property
    def may_read_more(self) -> bool:
        """Whether the reads themselves have room for another one."""
        return self.reads.outstanding < self.reads.limit

    def room(self) -> int:
        """Number of reads that may begin now; none as long as earlier ones wait."""
        self.begin()
        if self._waiting or not self.may_read_more:
            return 0
        # Ask how many reads the other workers leave to this one.
        free = self._read_limit.take(self._number, self.reads.limit - self.reads.outstanding)
        self._read_limit.give_back(self._number, free)
        return free

    def add(self, read: Read, position: int) -> None:
        """Add a read, which begins as soon as the limits allow."""
        self.positions[read] = position
        self._waiting.append(read)

    def begin(self) -> None:
        """Begin the reads that wait, as far as the limits allow."""
        if not self._waiting:
            return
        count = len(self._waiting)
        if not self._read_limit.unlimited:  # otherwise they queue for the threads
            count = min(count, self.reads.limit - self.reads.outstanding)
        granted = self._read_limit.take(self._number, count) if count > 0 else 0
        for _ in range(granted):
            self.reads.submit(self._waiting.popleft())

    def hedge(self) -> float | None:
        """Hedge a straggler if there is one; else return in how many seconds there may be one, None if unknown."""
        if self._hedging is None or not self.may_read_more:
            return None
        straggler, later_s = self._hedging.straggler(self.positions, now_ns())
        if straggler is not None and self._read_limit.take(self._number, 1):
            self._hedging.on_hedge()
            self._count(hedged=1)
            self.reads.submit(straggler.hedge())
        return later_s

    def take(self, read: Read) -> int | None:
        """Take a read that has finished; returns the position of its sample, None if it is not needed."""
        self._read_limit.give_back(self._number)
        first = read.again_for or read
        first.attempts -= 1
        if self._hedging is not None and read is not first:
            self._hedging.on_answer()
        if read.error is not None and first.attempts and first in self.positions:
            return None  # the other request may succeed
        position = self.positions.pop(first, None)
        if position is None:
            return None  # the other request has succeeded, or nobody needs it any more
        first.answered = True
        if self._hedging is not None:
            self._hedging.note(read.duration_ns)
        self._count(reads=1, hedges_won=int(read is not first))
        return position

    def forget(self) -> None:
        """Drop all reads: what they return is not needed."""
        self.positions.clear()
        self._waiting.clear()

    def _count(self, **by: int) -> None:
        if self._counters is not None:
            self._counters.add(**by)


class ConcurrentWorker(Worker):
    """Reads several samples at once; their transforms run one after the other in the worker's own thread.

    It claims as many samples as it can read at once, from any number of batches, and writes each as soon as it is
    complete. With :class:`BegunLists` a read is one of a whole batch, and so is what it claims and writes.

    Args:
        flight: The reads, and how many of them may be in flight.
        plan, ledger, state, fetcher, runner, writer, sample_retry: As of :class:`Worker`.
    """

    def __init__(
        self,
        flight: InFlight,
        plan: WorkerPlan,
        ledger: WorkerLedger,
        state: SharedState,
        fetcher: Fetcher,
        runner: Runner,
        writer: BatchWriter,
        sample_retry: SampleRetry | None = None,
    ) -> None:
        super().__init__(plan, ledger, state, fetcher, runner, writer, sample_retry)
        self._flight = flight
        self._reads = reads = flight.reads
        reads.on_finished = self._wake
        # Weakly: the end of an engine must not keep the dataset, which the reads refer to.
        self.endings.append(functools.partial(close_reads, weakref.ref(reads)))
        self._transform = fetcher.transform
        self._reads_lists = isinstance(reads, BegunLists)
        self._seeds = plan.seeds_samples
        self._sleeping = False
        self._lease = self.ledger.lease
        self.runner.cost_estimate.draws = True  # a sample costs far more than binding it does

    @property
    def idle(self) -> bool:
        """Whether no read is in flight."""
        return not self._flight.positions

    @property
    def is_empty(self) -> bool:
        """Whether no read is in flight, not even one that another has overtaken."""
        return not self._flight.positions and not self._reads.outstanding

    def step(self) -> bool:
        """Claim what can be read now, and write one sample; False if neither was possible."""
        self._flight.hedge()
        read = self._reads.finished()
        if read is None:
            return self._claim()
        # Samples cost less when they are claimed together.
        if self._reads.limit - self._reads.outstanding >= self._reads.limit // _CLAIMED_SHARE:
            self._claim()
        self._take(read)
        return True

    def rest(self, seen: int, timeout_s: float) -> bool:
        """Sleep until a read has finished or, if more reads may start, a sample can be claimed."""
        if not self._flight.may_read_more:
            return self._reads.wait(timeout_s)
        straggling_s = self._flight.hedge()
        if straggling_s is not None:
            timeout_s = min(timeout_s, straggling_s)
        self._sleeping = True
        try:
            return self._reads.wait(0) or super().rest(seen, timeout_s)
        finally:
            self._sleeping = False

    def _wake(self) -> None:
        # Runs in the thread of a read. A worker that is not asleep checks for reads before it sleeps.
        if self._sleeping:
            self.events.notify()

    def resume_all(self) -> None:
        """Complete everything that was claimed: it must not wait until the worker is active again."""
        while self._flight.positions:
            self._flight.begin()
            read = self._reads.finished()
            if read is not None:
                self._take(read)
            elif not self._reads.wait(_PATIENCE_S) and self.ledger.stopping:
                return

    def _claim(self) -> bool:
        """Claim samples and submit their reads until enough are in flight."""
        claimed = False
        whole = self.writer.collates or self.writer.keeps_batches
        while True:
            free = self._flight.room()
            run = self._claim_run(free, whole) if free else None
            if run is None:
                return claimed
            claimed = True
            if run.count == 0:
                self.writer.publish(run.batch)
            else:
                self._enter(run, whole)

    def _claim_run(self, free: int, whole: bool) -> Claim | None:
        """Claim samples for at most ``free`` reads, or a ``whole`` batch."""
        if self._reads_lists and self._flight.positions and not self.fair_share():
            return None  # the other workers could not begin a batch, too
        if self._reads_lists or self.writer.keeps_batches:
            return self.ledger.claim(WHOLE_BATCH)
        return self.ledger.claim(ALL_SAMPLES if whole else free)

    def _enter(self, claimed: Claim, whole: bool) -> None:
        """Queue the reads of a run."""
        if self._reads_lists:
            self._enter_list(claimed)
        else:
            self._enter_samples(claimed, whole)
        self._show_oldest()  # before the user's code runs, which may end the process

    def _enter_list(self, claimed: Claim) -> None:
        """Queue one read of a whole batch; a batch that cannot be read so runs as in any other worker."""
        record = self.ledger.describe(claimed.batch)
        given = self.read_indices(claimed.batch, claimed.k, claimed.count)
        if claimed.count == record.count and len(given):
            self._queue(Read(given, record.epoch, None, claimed), record.first)
        else:
            self.run_lease(claimed)

    def _enter_samples(self, claimed: Claim, whole: bool) -> None:
        """Queue a read of each sample."""
        batch, k, count = claimed.batch, claimed.k, claimed.count
        record = self.ledger.describe(batch)
        first, bound, epoch, seed = record.first, record.bound, record.epoch, record.seed
        indices = list(self.read_indices(batch, k, count))
        if not indices:  # an empty batch has a place, too
            assert isinstance(self.fetcher, Fetcher)
            self.runner.enter(seed)
            self.run_list(self.fetcher, list, batch, record, indices)
            return
        held = [None] * count if whole and bound and count == record.count else None
        run = _ClaimedRun(batch, first, k, bound, epoch, seed, indices, held, count)
        bound_to = seed if self._seeds else None
        occurrences = self.ledger.occurrences(first + k, count) or [0] * count
        for i, (index, occurrence) in enumerate(zip(indices, occurrences, strict=True)):
            read = Read(index, epoch, bound_to, (run, i), occurrence=occurrence)
            self._queue(read, first + k + i)

    def _queue(self, read: Read, position: int) -> None:
        if not self._flight.positions:
            self.end_lease(0, now_ns())  # the worker was idle until now
        self._flight.add(read, position)

    def _show_oldest(self) -> None:
        """Write the oldest sample in flight into the lease, for recovery and for the sample timeout."""
        oldest = next(iter(self._flight.positions), None)
        if oldest is not None:
            position = self._flight.positions[oldest]
            self._lease.begin(position, oldest.started_ns or now_ns())

    def _take(self, read: Read) -> None:
        """Run the transforms of a sample that was read, and write it."""
        position = self._flight.take(read)
        if position is None:
            return
        finish = self._finish_list if self._reads_lists else self._finish_sample
        samples = finish(read, position)
        # The time since the last run counts as busy: reads were in flight.
        self.end_lease(samples, self.idle_since)
        self._show_oldest()

    def _finish_list(self, read: Read, position: int) -> int:
        """Make the samples of a batch from what has arrived, and write them; returns their number."""
        claimed: Claim = read.tag
        fetcher, complete = self.fetcher, read.complete
        assert isinstance(fetcher, Fetcher)
        record = self.ledger.describe(claimed.batch)
        self.runner.enter(record.seed)

        def fetch(indices: list[object]) -> Any:
            return fetcher.many(indices) if complete is None else fetcher.transformed(complete())

        if complete is not None:
            self.runner.ahead_ns = read.duration_ns
        self.run_list(fetcher, fetch, claimed.batch, record, read.index)
        return claimed.count

    def _finish_sample(self, read: Read, position: int) -> int:
        """Make the sample from what was read, and write it; returns the number of samples."""
        if self.tracer.enabled:
            ended_ns = read.started_ns + read.duration_ns
            self.tracer.span("read", read.started_ns, ended_ns, {"index": read.index})
        run, i = read.tag
        runner = self.runner
        runner.enter(run.seed)
        runner.ahead_ns = read.duration_ns
        samples, error = runner.run(
            position, run.epoch, [read.index], lambda _: runner.transformed(read, self._transform)
        )
        cost_ns = runner.durations[0]
        self.ledger.note_costs(position, runner.durations, len(samples))
        if error is not None and self.sample_retry is not None:
            sample, error = self.sample_retry.settle(position, run.epoch, read.index, error)
            samples = [sample] if error is None else []
        if run.held is not None:
            run.held[i] = samples[0] if error is None else _Raised(error)
            run.missing -= 1
            if not run.missing:
                self._write_held(run, run.held)
        elif run.bound:
            k = run.k + i
            self.writer.deliver(
                run.batch, k, [read.index], samples, error, state=self.dataset_state()
            )
        else:
            self.deliver_free(position, [read.index], samples, [cost_ns], error)
        return 1

    def _write_held(self, run: _ClaimedRun, held: list[Any]) -> None:
        raised = next((i for i, sample in enumerate(held) if type(sample) is _Raised), len(held))
        error = held[raised].error if raised < len(held) else None
        state = self.dataset_state()
        self.writer.deliver(
            run.batch, 0, run.indices, held[:raised], error, whole=True, state=state
        )


def close_reads(reference: weakref.ref[Reads]) -> None:
    """End reads that are still there."""
    reads = reference()
    if reads is not None:
        reads.close()
