"""A worker with several reads in flight (``fetch_concurrency``)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from minato._core.clock import now_ns
from minato.observe.trace.tracer import NULL_TRACER, Tracer
from minato.options import FetchOptions
from minato.transforms.compose import Transforms
from minato.workers.fetch import Fetcher, StreamFetcher
from minato.workers.hedging import Hedging
from minato.workers.read_limit import SharedReadLimit
from minato.workers.reads import Read, Reads
from minato.workers.retry import SampleRetry
from minato.workers.runner import Runner
from minato.workers.sink import Sink
from minato.workers.worker import Worker, WorkerSettings, WorkQueue

__all__ = ["ConcurrentFetch", "ConcurrentWorker"]

_ALL_SAMPLES = 1 << 31
_PATIENCE_S = 1.0
"""How long it waits for a read at most before it looks whether the loader shuts down."""


@dataclass(eq=False)
class _Lease:
    """Samples that were claimed together.

    Attributes:
        first: Position of the batch's sample 0.
        k: Which sample of the batch is the lease's first.
        held: The samples that are finished, or what they raised, if all are to be delivered at once; else None.
        missing: How many of these are not finished.
    """

    batch: int
    first: int
    k: int
    bound: bool
    epoch: int
    seed: int
    keys: list[Any]
    held: list[Any] | None
    missing: int


@dataclass(frozen=True)
class _Raised:
    """Stands for a held sample that raised."""

    error: BaseException


@dataclass(frozen=True)
class ConcurrentFetch:
    """How a worker reads several samples at once.

    Attributes:
        reads: Reads the samples.
        transforms: Run on the value of each read.
        binds_randomness: Whether randomness is bound to the samples.
        read_limit: The reads in flight of all workers.
        options: Whether slow reads are hedged, and the counters of reads.
    """

    reads: Reads
    transforms: Transforms
    binds_randomness: bool
    read_limit: SharedReadLimit
    options: FetchOptions


class ConcurrentWorker(Worker):
    """Reads several samples at once; their transforms run one after the other in the worker's own thread.

    It claims as many samples as it can read at once, from as many batches as that takes, and delivers each as soon as
    it is finished.

    Args:
        concurrency: How it reads.
        queue, fetcher, runner, sink, sample_retry, tracer: As of :class:`Worker`.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        concurrency: ConcurrentFetch,
        queue: WorkQueue,
        fetcher: Fetcher | StreamFetcher,
        runner: Runner,
        sink: Sink,
        sample_retry: SampleRetry | None = None,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        super().__init__(
            settings,
            queue=queue,
            fetcher=fetcher,
            runner=runner,
            sink=sink,
            sample_retry=sample_retry,
            tracer=tracer,
        )
        fetching, reads, read_limit = concurrency.options, concurrency.reads, concurrency.read_limit
        self._read_limit = read_limit
        read_limit.begin(self._number)
        self._counters = fetching.counters
        percentile = fetching.hedge_percentile
        self._hedging = None if percentile is None else Hedging(percentile)
        self._claimed: deque[Read] = deque()  # and not begun
        self._reads = reads
        reads.on_finished = self._wake
        self.endings.append(reads.close)
        self._transforms = concurrency.transforms
        self._seeds = concurrency.binds_randomness
        self._resting = False
        self._underway: dict[Read, int] = {}  # with each one's position; the oldest first
        self._lease = self._ledger.lease_words(self._number)
        self._runner.cost_estimate.draws = True  # a sample costs far more than binding it does

    @property
    def idle(self) -> bool:
        """Whether it waits for no read."""
        return not self._underway

    def step(self) -> bool:
        """Claim what can be read now, and deliver one sample; False if none has been read."""
        self._hedge()
        claimed = self._claim()
        read = self._reads.finished()
        if read is None:
            return claimed
        self._take(read)
        return True

    def rest(self, seen: int, timeout_s: float) -> bool:
        """Sleep until a read has finished or, if there is room for more of them, something can be claimed."""
        if not self._has_room:
            return self._reads.wait(timeout_s)
        straggling_s = self._hedge()
        if straggling_s is not None:
            timeout_s = min(timeout_s, straggling_s)
        self._resting = True
        try:
            return self._reads.wait(0) or super().rest(seen, timeout_s)
        finally:
            self._resting = False

    def _wake(self) -> None:
        # In the thread of a read. Who sees the worker not at rest knows that it will look for reads before it is.
        if self._resting:
            self._events.notify()

    def forget(self) -> None:
        """Give up what is under way: others will do it."""
        self._underway.clear()
        self._claimed.clear()

    def _resume_all(self) -> None:
        # The worker is going to rest, and what it has claimed must not wait until it is wanted again.
        while self._underway:
            self._begin_claimed()
            read = self._reads.finished()
            if read is not None:
                self._take(read)
            elif not self._reads.wait(_PATIENCE_S) and self._ledger.stopping:
                return

    @property
    def _has_room(self) -> bool:
        return self._reads.outstanding < self._reads.limit

    def _claim(self) -> bool:
        """Claim samples and ask for them until enough are under way."""
        claimed = False
        whole = self._sink.collates or self._sink.has_unsendable
        while True:
            self._begin_claimed()
            if self._claimed or not self._has_room:
                return claimed
            # What other workers leave to this one is known before it claims, so that it keeps nothing from them.
            room = self._read_limit.take(self._number, self._reads.limit - self._reads.outstanding)
            self._read_limit.give_back(self._number, room)
            lease = (
                self._ledger.claim(self._number, _ALL_SAMPLES if whole else room) if room else None
            )
            if lease is None:
                return claimed
            claimed = True
            self._enter(lease, whole)

    def _enter(self, claimed: tuple[int, int, int], whole: bool) -> None:
        """Have what was claimed read next."""
        batch, k, count = claimed
        if count == 0:
            self._sink.publish_collated(batch)
            return
        _, first, size, bound, epoch, seed, *_ = self._ledger.describe(batch)
        keys = list(self._read_indices(batch, k, count))
        if not keys:  # a batch of nothing has a place all the same
            assert isinstance(self._fetcher, Fetcher)
            self._runner.enter(seed)
            self._run_list(self._fetcher, list, batch, first, count, epoch, keys)
            return
        if not self._underway:
            self._end(0, now_ns())
        held = [None] * count if whole and bound and count == size else None
        lease = _Lease(batch, first, k, bound, epoch, seed, keys, held, count)
        bound_to = seed if self._seeds else None
        occurrences = self._ledger.occurrences(first + k, count) or [0] * count
        for i, (key, occurrence) in enumerate(zip(keys, occurrences, strict=True)):
            read = Read(key, epoch, bound_to, (lease, i), occurrence=occurrence)
            self._underway[read] = first + k + i
            self._claimed.append(read)
        self._show_oldest()  # before the user's code runs, which may end the process

    def _begin_claimed(self) -> None:
        """Ask for what was claimed, as far as there may be more reads under way."""
        if not self._claimed:
            return
        wanted = len(self._claimed)
        if not self._read_limit.unlimited:  # otherwise they queue up for the threads
            wanted = min(wanted, self._reads.limit - self._reads.outstanding)
        granted = self._read_limit.take(self._number, wanted) if wanted > 0 else 0
        for _ in range(granted):
            self._reads.submit(self._claimed.popleft())

    def _hedge(self) -> float | None:
        """Ask for a straggler again if there is one; otherwise in how many seconds there may be one."""
        if self._hedging is None or not self._has_room:
            return None
        straggler, later_s = self._hedging.straggler(self._underway, now_ns())
        if straggler is not None and self._read_limit.take(self._number, 1):
            self._hedging.spent()
            self._count(hedged=1)
            self._reads.submit(straggler.again())
        return later_s

    def _count(self, **by: int) -> None:
        if self._counters is not None:
            self._counters.add(**by)

    def _show_oldest(self) -> None:
        """Say which sample the worker is on, for whoever finds it dead or stuck: the one that was claimed first."""
        oldest = next(iter(self._underway), None)
        if oldest is not None:
            position = self._underway[oldest]
            self._lease[0], self._lease[1] = position + 1, oldest.started_ns or now_ns()
            self._lease[2] = -1

    def _take(self, read: Read) -> None:
        """Run the transforms of a sample that was read, and deliver it."""
        self._read_limit.give_back(self._number)
        first = read.again_for or read
        first.attempts -= 1
        if self._hedging is not None and read is not first:
            self._hedging.ended()
        if read.error is not None and first.attempts and first in self._underway:
            return  # the other request may succeed
        position = self._underway.pop(first, None)
        if position is None:
            return  # the other request has, or others do it
        if self._hedging is not None:
            self._hedging.note(read.duration_ns)
        self._count(reads=1, hedges_won=int(read is not first))
        self._finish(read, position)
        # Nobody could give the worker other work while its reads were under way.
        self._end(1, self._idle_since)
        self._show_oldest()

    def _finish(self, read: Read, position: int) -> None:
        if self._tracer.enabled:
            ended_ns = read.started_ns + read.duration_ns
            self._tracer.span("read", read.started_ns, ended_ns, {"index": read.key})
        lease, i = read.tag
        runner = self._runner
        runner.enter(lease.seed)
        runner.ahead_ns = read.duration_ns
        samples, error = runner.run(
            position, lease.epoch, [read.key], lambda _: self._transformed(read)
        )
        cost_ns = runner.durations[0]
        self._ledger.note_costs(position, runner.durations, len(samples))
        if error is not None and self._sample_retry is not None:
            sample, error = self._sample_retry.settle(position, lease.epoch, read.key, error)
            samples = [sample] if error is None else []
        if lease.held is not None:
            lease.held[i] = samples[0] if error is None else _Raised(error)
            lease.missing -= 1
            if not lease.missing:
                self._deliver_held(lease, lease.held)
        elif lease.bound:
            k = lease.k + i
            self._results.bound(lease.batch, position, k, [read.key], samples, error, False)
        else:
            sample = samples[0] if error is None else None
            self._results.free(position, read.key, sample, error, cost_ns)

    def _deliver_held(self, lease: _Lease, held: list[Any]) -> None:
        raised = next((i for i, sample in enumerate(held) if type(sample) is _Raised), len(held))
        error = held[raised].error if raised < len(held) else None
        self._results.bound(
            lease.batch, lease.first, 0, lease.keys, held[:raised], error, whole=True
        )

    def _transformed(self, read: Read) -> Any:
        if read.error is not None:
            self._lease[2] = read.step
            raise read.error
        self._runner.set_generators_used(read.asked)
        return self._runner.transformed(read.key, read.value, read.duration_ns, self._transforms)
