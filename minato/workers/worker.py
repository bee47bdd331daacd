"""What a worker does: claim samples, run them, write the results."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, NamedTuple

from minato._core import BatchRecord, Claim, WorkerLedger, now_ns
from minato._fork_safety import end_copy
from minato._support.threads import if_alive
from minato.batching.writer import BatchWriter
from minato.errors import SKIP
from minato.observe.tracer import Tracer
from minato.sampling.samplers import LISTS
from minato.workers.error_policy import SampleRetry
from minato.workers.fetch import Fetcher, one_each
from minato.workers.plan import WorkerPlan
from minato.workers.reads import BegunLists, InFlight, Read
from minato.workers.runner import DeferredSample, Fetch, Ran, Runner
from minato.workers.shared_state import SharedState

RUN_NS = 1_000_000
"""Expected duration of the samples of one lease: dispatch then costs one per cent, and no worker claims too many."""
_LONG_RUN_NS = 4_000_000
"""The same where a function collates batches, because samples of one worker need no copy."""
_LEAST_RUN_NS = 50_000
"""The same for samples that are claimed although less is left for the others: a lease itself takes microseconds."""
_HANDOVERS = 10
"""A worker runs whole batches if a sample takes less time than storing this number of samples for another worker."""
_PATIENCE_S, _PATIENCE_NS = 1.0, 1_000_000_000
"""The longest time that a worker sleeps, or works, between two checks that its parent is alive."""
WHOLE_BATCH, ALL_SAMPLES = 0, 1 << 31
"""How many samples to claim: a batch that no worker has begun, or all that are left of one."""
_CLAIMED_SHARE = 4
"""While reads have finished, further ones are claimed when a fourth of the limit is free."""
_WORTH_NOTING_NS = 100_000  # the costs of samples that cost more are recorded for the next epoch


class WorkerParts(NamedTuple):
    """What a worker consists of; it sleeps in ``state``. Without ``sample_retry``, samples that raise are errors."""

    plan: WorkerPlan
    ledger: WorkerLedger
    state: SharedState
    fetcher: Fetcher
    runner: Runner
    writer: BatchWriter
    sample_retry: SampleRetry | None = None


class Worker:
    """Runs samples until the ledger says stop.

    ``events`` counts the changes of the ledger that give workers something to do. ``read_indices`` returns the indices
    of samples k … k+count-1 of a batch. ``close`` calls the ``endings``, none of which refers to the worker.
    """

    def __init__(self, parts: WorkerParts) -> None:
        plan, ledger, state, fetcher, runner, writer, self.sample_retry = parts
        self.ledger = ledger
        self._number = ledger.number
        self._shared = state
        self.events = state.work
        self._active = state.active
        self.read_indices = writer.indices.read
        self.fetcher, self.runner, self.writer = fetcher, runner, writer
        self._slow_to_newest = plan.order.slow_to_newest
        self._deferral = runner.deferral
        self._is_alone = plan.in_processes and plan.most_workers == 1 and self._deferral is None
        self.whole_batches = plan.round_robin or fetcher.takes_lists or fetcher.keeps_state
        self._takes_rows = fetcher.has_rows and not writer.collates and runner.failure is None
        if self._takes_rows:
            runner.cost_estimate.draws = False
        self._run_ns = _LONG_RUN_NS if writer.collates else RUN_NS
        self.idle_since = now_ns()
        self._lacks_room = self._was_inactive = False
        self._epoch_slot = -1
        self._whole_size = 0  # of the last batch
        self.endings: list[Callable[[], None]] = []
        self.tracer = tracer = runner.tracer
        tracer.instant(f"process {os.getpid()}, thread {threading.get_native_id()}")
        tracer.flush()
        self.endings.append(tracer.flush)

    def loop(self, parent_lives: Callable[[], bool]) -> None:
        """Work until the loader shuts down or its process ends."""
        while (rest := self.work(parent_lives)) is not None and rest():
            pass

    def work(self, parent_lives: Callable[[], bool]) -> Callable[[], bool] | None:
        """Work until there is nothing to do.

        Returns a function that sleeps until there may be something, and returns whether to go on; it does not refer to
        a worker that has nothing in flight. None: the loader shuts down or its process ends.
        """
        ledger, events = self.ledger, self.events
        checked_ns, owner = now_ns(), os.getpid()
        if self._was_inactive:
            self._was_inactive, self.idle_since = False, checked_ns
        while True:
            if not self.takes_part():
                self.resume_all()
                self._was_inactive = True
                return functools.partial(self._shared.wait_until_active, self._number, parent_lives)
            # Read first: an event after one of the checks below then ends the sleep.
            seen = events.events
            if ledger.stopping:
                return None
            # Read before the step: otherwise no worker would run what was published last.
            draining = ledger.draining
            stepped = self.step()
            if os.getpid() != owner:  # user code has forked this process within the step
                end_copy(owner, None)
            if stepped:
                if now_ns() - checked_ns > _PATIENCE_NS:
                    if not parent_lives():
                        return None
                    checked_ns = now_ns()
                continue
            if draining and self.idle:
                return None
            ledger.notify_idle()
            if not self.takes_part():
                continue
            self._lacks_room = not ledger.waiting
            sleep = self.sleeper()
            return lambda: sleep(seen, _PATIENCE_S) or parent_lives()

    @property
    def idle(self) -> bool:
        """Whether all that was claimed is complete, and it could claim more, once ``step`` returns False."""
        return True

    def rest(self, seen: int, timeout_s: float) -> bool:
        """Sleep until the work events exceed ``seen``; returns whether they do."""
        return self.events.wait(seen, timeout_s)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight that could wake it, once ``step`` returns False."""
        return True

    def sleeper(self) -> Callable[[int, float], bool]:
        """``rest``, recorded in the trace; without a reference to the worker if that is empty."""
        rest = self.events.wait if self.is_empty else self.rest
        if not self.tracer.enabled:
            return rest
        reason = "for reads"
        if self.idle:
            reason = "enough is loaded" if self._lacks_room else "nothing is left to begin"
        return functools.partial(_recorded, self.tracer, f"wait ({reason})", rest)

    def close(self) -> None:
        """End what was started in other threads."""
        for end in self.endings:
            end()

    def step(self) -> bool:
        """Do one lease, or resume the deferred sample; False if there is nothing to do."""
        if self._deferral is not None and self._deferral.is_due() and self._resume():
            return True
        lease = self.ledger.claim(self.longest_run())
        if lease is None:
            return self._resume()
        self.run_lease(lease)
        return True

    def run_lease(self, lease: Claim) -> None:
        """Run claimed samples and deliver them, or collate a batch that another worker has left."""
        batch, count = lease.batch, lease.count
        if count == 0:
            self.writer.collate_and_publish(batch)
            return
        record = self.ledger.describe(batch)
        self._whole_size = record.count
        self.enter_epoch(record)
        started, deferral = now_ns(), self._deferral
        before = 0 if deferral is None else deferral.num_deferred
        self.runner.enter(record.seed)
        self.run_claimed(lease, record)
        deferred = 0 if deferral is None else deferral.num_deferred - before
        busy_ns = self.end_lease(count - deferred, started)
        self.runner.observe(busy_ns / count)

    def enter_epoch(self, record: BatchRecord) -> None:
        """Complete what was claimed of another epoch than that of a batch."""
        if record.epoch_slot != self._epoch_slot:
            self._epoch_slot = record.epoch_slot
            self.resume_all()  # deferred samples of the last epoch go before the next epoch

    def run_claimed(self, lease: Claim, record: BatchRecord) -> None:
        """Run claimed samples and deliver them."""
        batch, k, count = lease.batch, lease.k, lease.count
        first, bound, epoch = record.first, record.bound, record.epoch
        given = self.read_indices(batch, k, count)
        indices = list(given)
        whole = count == record.count
        fetcher = self.fetcher
        done = self._run_rows(first + k, epoch, indices) if self._takes_rows else 0
        if done and done == count:
            pass  # they are in their places
        elif whole and self._runs_together(first, given):
            fetch = fetcher.many if fetcher.takes_lists else list
            self.run_list(fetch, batch, record, given)
        elif bound:
            samples, error = self.run_retrying(first + k, epoch, indices)
            self.writer.deliver(batch, k, indices, samples, error, whole=whole)
        else:
            self.run_free(first + k + done, epoch, indices[done:])

    def _runs_together(self, first: int, given: Sequence[object]) -> bool:
        """Whether one call is for all samples of a batch, where no worker has ended in it."""
        if not (self.fetcher.takes_lists and len(given)):
            return not len(given)
        return type(given) not in LISTS or first not in self._shared.suspects

    def end_lease(self, samples: int, started_ns: int) -> int:
        """Record the end of a lease and the number of samples that it completed; returns its duration in ns."""
        now = now_ns()
        busy_ns, idle_ns = now - started_ns, started_ns - self.idle_since
        self.ledger.end(samples, busy_ns, idle_ns)
        if self._lacks_room:
            self._lacks_room = False
            self.runner.meters.window_full.record(max(idle_ns, 0))
        self.idle_since = now
        self.tracer.flush()
        return busy_ns

    def resume_all(self) -> None:
        """Complete everything that was claimed."""
        while self._resume():
            pass

    def _resume(self) -> bool:
        """Resume the deferred sample until it is complete or deferred again; False if there is none."""
        deferred = None if self._deferral is None else self._deferral.take()
        if deferred is None:
            return False
        started, position, index = now_ns(), deferred.position, deferred.index
        batch, _ = self.ledger.locate(position)
        record = self.ledger.describe(batch)
        epoch = record.epoch
        self.runner.enter(record.seed)
        samples, error = self.runner.resume(deferred, epoch)
        self.ledger.note_costs(position, self.runner.durations, 1)
        cost_ns = self.runner.durations[0]
        is_deferred = error is None and type(samples[0]) is DeferredSample
        if error is not None:
            self._write_failed(position, epoch, index, error, cost_ns)
        elif not is_deferred:
            self.deliver_free(position, [index], samples, [cost_ns])
        self.end_lease(int(not is_deferred), started)
        return True

    def _run(self, position: int, epoch: int, indices: list[object]) -> Ran:
        """Run samples one by one until one raises; a DeferredSample stands for one that was deferred."""
        fetcher, runner = self.fetcher, self.runner
        if fetcher.takes_lists:
            return runner.run(position, epoch, indices, fetcher.single)
        slow_ns = 0 if self._deferral is None else self.ledger.slow_ns
        plain = fetcher.now(len(indices))
        samples, error = runner.run_steps(position, epoch, indices, plain, slow_ns)
        is_expensive = runner.cost_estimate.mean_ns >= _WORTH_NOTING_NS
        if is_expensive or 0 < self.ledger.slow_ns < runner.longest_ns:
            self.ledger.note_costs(position, runner.durations, len(samples))
        return samples, error

    def deliver_free(
        self,
        position: int,
        indices: Sequence[object],
        samples: list[object],
        costs_ns: Sequence[int],
        error: BaseException | None = None,
    ) -> None:
        """Deliver samples, and the error of the one after them, to any batch, slow ones where the order has these.

        Deferred ones are not complete yet.
        """
        writer, count = self.writer, len(samples)
        slow_ns = self.ledger.slow_ns if self._slow_to_newest else 0
        ran = costs_ns[: count + (error is not None)]
        has_slow = 0 < slow_ns < max(ran, default=0)
        if has_slow or (self._deferral is not None and DeferredSample in set(map(type, samples))):
            for i, sample in enumerate(samples):
                if type(sample) is not DeferredSample:
                    slow = 0 < slow_ns < costs_ns[i]
                    writer.deliver_free(position + i, indices[i : i + 1], [sample], to_newest=slow)
            position, indices, samples = position + count, indices[count:], []
            has_slow = error is not None and 0 < slow_ns < costs_ns[count]
        writer.deliver_free(position, indices, samples, error, to_newest=has_slow)

    def longest_run(self) -> int:
        """The most samples to claim together; ``WHOLE_BATCH``: a batch."""
        if self.fetcher.takes_lists:
            return WHOLE_BATCH  # ``__getitems__`` may return one object for the batch
        if self.whole_batches:
            return ALL_SAMPLES
        if self.writer.keeps_batches:
            return WHOLE_BATCH
        cost_estimate = self.runner.cost_estimate
        mean_ns = cost_estimate.mean_ns
        is_apart = self.writer.collates or self.writer.has_texts
        if self._is_alone and (is_apart or not self._whole_size):
            return ALL_SAMPLES
        if mean_ns > self._run_ns and not is_apart:
            return 1
        share, handover_ns = self.fair_share(), self.writer.handover_ns
        is_cheap = mean_ns < _HANDOVERS * handover_ns
        if is_apart and is_cheap and 0 < self._whole_size <= share:
            return ALL_SAMPLES
        # Near the end of an epoch: the others would take longer to hand samples over than this worker to run them.
        if is_apart and mean_ns * max(self.num_workers - 1, 1) < handover_ns:
            return ALL_SAMPLES
        if cost_estimate.draws is None:
            return 1
        return max(min(int(self._run_ns / mean_ns), share), int(_LEAST_RUN_NS / mean_ns), 1)

    def takes_part(self) -> bool:
        """Whether it is one of the active workers now."""
        return self._active.is_active(self._number)

    @property
    def num_workers(self) -> int:
        """Number of active workers."""
        return max(self._active.count, 1)

    def fair_share(self) -> int:
        """The most samples that leave as many for each other worker: at the end of an epoch none has to idle."""
        return self.ledger.unclaimed() // self.num_workers

    def run_retrying(self, position: int, epoch: int, indices: list[object]) -> Ran:
        """Run samples until one raises for good; SKIP stands for those that are skipped."""
        if self.sample_retry is None:
            return self._run(position, epoch, indices)
        return self.sample_retry.run(
            position, epoch, indices, lambda position, rest: self._run(position, epoch, rest)
        )

    def _run_rows(self, position: int, epoch: int, indices: list[object]) -> int:
        """Copy samples that are rows into places; returns how many, and the others must be loaded one by one."""
        begun_ns = now_ns()
        rows = self.fetcher.rows(indices)
        done = 0 if rows is None else self.writer.deliver_rows(position, rows)
        if done:
            self.runner.record_rows(indices[:done], epoch, begun_ns)
        return done

    def run_list(
        self, fetch: Fetch, batch: int, record: BatchRecord, indices: Sequence[object]
    ) -> None:
        """Run a whole or an empty batch by one call of the dataset, which may return any object."""
        if not record.bound:
            self._run_free_list(fetch, record, list(indices))
            return
        first, count, epoch = record.first, record.count, record.epoch
        results, error = self.runner.run(first, epoch, [indices], fetch, batch_size=count)
        # What another container than a list says of its indices would be missing in calls for single ones.
        divisible = type(indices) in LISTS and len(indices) > 0
        if isinstance(error, Exception) and self.sample_retry is not None and divisible:
            # Single calls find the sample that raises.
            single = list(indices)
            samples, error = self.run_retrying(first, epoch, single)
            self.writer.deliver(batch, 0, single, samples, error, whole=True)
            return
        self.writer.deliver_list(batch, indices, results[0] if results else None, error)

    def _run_free_list(self, fetch: Fetch, record: BatchRecord, indices: list[object]) -> None:
        """``run_list`` for samples that may go to any batch: the call returns one for each index."""

        def fetch_each(indices: list[object]) -> list[Any]:
            return one_each(fetch(indices), len(indices))

        first, count, epoch = record.first, record.count, record.epoch
        results, error = self.runner.run(first, epoch, [indices], fetch_each, batch_size=count)
        if error is None:
            costs_ns = [self.runner.durations[0] // count] * count
            self.deliver_free(first, indices, results[0], costs_ns)
            return
        if not isinstance(
            error, Exception
        ):  # an interruption, which single calls would not raise again
            self._write_failed(first, epoch, indices[0], error, self.runner.durations[0])
            first, indices = first + 1, indices[1:]
        if indices:
            self.run_free(first, epoch, indices)

    def run_free(self, position: int, epoch: int, indices: list[object]) -> None:
        """Run samples that may go to any batch; those after one that raised are run, too."""
        samples, error = self._run(position, epoch, indices)
        while True:
            done, costs_ns = len(samples), self.runner.durations
            self.deliver_free(position, indices, samples, costs_ns)
            if error is not None:
                self._write_failed(position + done, epoch, indices[done], error, costs_ns[done])
                done += 1
            indices, position = indices[done:], position + done
            if not indices:
                return
            samples, error = self._run(position, epoch, indices)

    def _write_failed(
        self, position: int, epoch: int, index: object, error: BaseException, cost_ns: int
    ) -> None:
        samples, remaining = self._settled(position, epoch, index, error)
        self.deliver_free(position, [index], samples, [cost_ns], remaining)

    def _settled(self, position: int, epoch: int, index: object, error: BaseException) -> Ran:
        """The outcome of a sample that raised."""
        retry = self.sample_retry
        return ([], error) if retry is None else retry.settle(position, epoch, index, error)


def run_again(
    ledger: WorkerLedger,
    runner: Runner,
    fetcher: Fetcher,
    sample_retry: SampleRetry | None,
    batch: int,
    position: int,
    index: object,
) -> list[Any]:
    """Run a sample here, as it does not arrive as it is from another worker; returns a list, empty if skipped."""
    record = ledger.describe(batch)
    runner.enter(record.seed)
    samples, error = runner.run(position, record.epoch, [index], fetcher.single, repeats=True)
    if error is not None and sample_retry is not None:
        settled, error = sample_retry.settle(position, record.epoch, index, error)
        samples = [sample for sample in settled if sample is not SKIP]
    if error is not None:
        raise error
    return samples


def _recorded(
    tracer: Tracer, name: str, rest: Callable[[int, float], bool], seen: int, timeout_s: float
) -> bool:
    begun_ns = tracer.now()
    try:
        return rest(seen, timeout_s)
    finally:
        tracer.slice(name, begun_ns)


@dataclass(eq=False)
class _ClaimedRun:
    """Samples that were claimed together; what they raised, and the complete ones if all are written together."""

    claimed: Claim
    record: BatchRecord
    indices: list[Any]
    held: dict[int, Any] | None
    errors: dict[int, BaseException] = field(default_factory=dict)


class ConcurrentWorker(Worker):
    """Reads several samples at once; their transforms run one after the other in the worker's own thread.

    It claims as many samples as it can read at once, from any number of batches, and writes each as soon as it is
    complete. With :class:`BegunLists` a read is one of a whole batch, and so is what it claims and writes.
    """

    def __init__(self, flight: InFlight, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._flight = flight
        self._reads = reads = flight.reads
        reads.on_finished = self._wake
        # Weakly: the end of an engine must not keep the dataset, which the reads refer to.
        self.endings.append(if_alive(methodcaller("close"), reads))
        self._reads_lists = isinstance(reads, BegunLists)
        self._seeds = parts.plan.seeds_samples
        self._sleeping = False
        self._suspected: Claim | None = None
        self._lease = self.ledger.lease
        self.runner.may_repeat = False  # a sample costs far more than binding it does

    @property
    def idle(self) -> bool:
        # One that cannot read yet stays: it may stand in for a worker that has died, whose samples nobody else takes.
        return not self._flight.positions and self._reads.limit > 0

    @property
    def is_empty(self) -> bool:
        # Nor one that another has overtaken.
        return not self._flight.positions and not self._reads.outstanding

    def step(self) -> bool:
        if self._suspected is not None:
            self.resume_all()
            return True
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
        if not self._flight.may_read_more:
            return self._reads.wait(timeout_s)
        straggling_s = self._flight.hedge()
        if straggling_s is not None:
            timeout_s = min(timeout_s, straggling_s)
        self._sleeping = True  # a worker that is not asleep checks for reads before it sleeps
        try:
            return self._reads.wait(0) or super().rest(seen, timeout_s)
        finally:
            self._sleeping = False

    def _wake(self) -> None:  # in the thread of a read
        if self._sleeping:
            self.events.notify()

    def enter_epoch(self, record: BatchRecord) -> None:
        """Do nothing: reads of two epochs may be in flight, and the caller may hold one of them."""

    def resume_all(self) -> None:
        # It must not wait until the worker is active again.
        while self._flight.positions:
            self._flight.begin()
            read = self._reads.finished()
            if read is not None:
                self._take(read)
            elif not self._reads.wait(_PATIENCE_S) and self.ledger.stopping:
                return
        claimed, self._suspected = self._suspected, None
        if claimed is not None:
            self.run_lease(claimed)  # alone, so that the one that ends the worker can be blamed

    def _claim(self) -> bool:
        claimed = False
        whole = self.writer.collates or self.writer.keeps_batches
        while True:
            free = self._flight.room()
            run = self._claim_run(free, whole) if free else None
            if run is None:
                return claimed
            claimed = True
            if run.count == 0:
                self.writer.collate_and_publish(run.batch)
                continue
            record = self.ledger.describe(run.batch)
            if record.first in self._shared.suspects:
                self._suspected = run
                return True
            if self._reads_lists:
                self._enter_list(run, record)
            else:
                self._enter_samples(run, record, whole)
            self._show_oldest()  # before the user's code runs, which may end the process

    def _claim_run(self, free: int, whole: bool) -> Claim | None:
        """Claim samples for at most ``free`` reads, or a ``whole`` batch."""
        if self._reads_lists and self._flight.positions and not self.fair_share():
            return None  # the other workers could not begin a batch, too
        if self._reads_lists or self.writer.keeps_batches:
            return self.ledger.claim(WHOLE_BATCH)
        return self.ledger.claim(ALL_SAMPLES if whole else free)

    def _enter_list(self, claimed: Claim, record: BatchRecord) -> None:
        """Queue one read of a whole batch; a batch that cannot be read so runs as in any other worker."""
        given = self.read_indices(claimed.batch, claimed.k, claimed.count)
        whole = claimed.count == record.count and len(given) > 0
        if whole and self._runs_together(record.first, given):
            self._queue(Read(given, record.epoch, None, claimed), record.first)
        else:
            self.run_lease(claimed)

    def _enter_samples(self, claimed: Claim, record: BatchRecord, whole: bool) -> None:
        batch, k, count = claimed.batch, claimed.k, claimed.count
        indices = list(self.read_indices(batch, k, count))
        if not indices:  # an empty batch has a place, too
            self.runner.enter(record.seed)
            self.run_list(list, batch, record, indices)
            return
        is_whole = whole and record.bound and count == record.count
        run = _ClaimedRun(claimed, record, indices, {} if is_whole else None)
        seed = record.seed if self._seeds else None
        start = record.first + k
        occurrences = self.ledger.occurrences(start, count) or [0] * count
        for i, (index, occurrence) in enumerate(zip(indices, occurrences, strict=True)):
            read = Read(index, record.epoch, seed, (run, i), occurrence=occurrence)
            self._queue(read, start + i)

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
        record = self.ledger.describe(claimed.batch)
        self.runner.enter(record.seed)

        def fetch(indices: list[object]) -> Any:
            nonlocal complete
            arrived, complete = complete, None  # a list that runs once more is loaded again
            return fetcher.many(indices) if arrived is None else fetcher.transformed(arrived())

        if complete is not None:
            self.runner.ahead_ns = read.duration_ns
        self.run_list(fetch, claimed.batch, record, read.index)
        return claimed.count

    def _finish_sample(self, read: Read, position: int) -> int:
        if self.tracer.enabled:
            ended_ns = read.started_ns + read.duration_ns
            self.tracer.span("read", read.started_ns, ended_ns, {"index": read.index})
        run, i = read.tag
        claimed, epoch, runner = run.claimed, run.record.epoch, self.runner
        runner.enter(run.record.seed)
        runner.ahead_ns = read.duration_ns
        transform = self.fetcher.transform
        fetch = functools.partial(runner.transformed, read, transform, self.fetcher.single)
        samples, error = runner.run(position, epoch, [read.index], fetch)
        cost_ns = runner.durations[0]
        self.ledger.note_costs(position, runner.durations, len(samples))
        if error is not None:
            samples, error = self._settled(position, epoch, read.index, error)
        held = run.held
        if held is None and run.record.bound:
            self.writer.deliver(claimed.batch, claimed.k + i, [read.index], samples, error)
        elif held is None:
            self.deliver_free(position, [read.index], samples, [cost_ns], error)
        else:
            if error is None:
                held[i] = samples[0]
            else:
                run.errors[i] = error
            if len(held) + len(run.errors) == len(run.indices):
                done = min(run.errors, default=len(held))
                samples, error = [held[i] for i in range(done)], run.errors.get(done)
                self.writer.deliver(claimed.batch, 0, run.indices, samples, error, whole=True)
        return 1
