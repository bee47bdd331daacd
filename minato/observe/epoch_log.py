"""A log of a loader's epochs, as the training process sees them: waiting, batches, and the state over time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter, sub
from typing import Any, NamedTuple

from minato._core import Calls, Histogram, now_ns
from minato.observe.lateness import Lateness, ThresholdDecision
from minato.observe.machine import MachineSnapshot
from minato.observe.meters import EMPTY, SlowSample, slowest_of
from minato.observe.observers import (
    Counts,
    EpochState,
    LoaderSnapshot,
    Metrics,
    MetricsSource,
    Observer,
)

_KEPT_EPOCHS = 64  # finished epochs that are kept one by one; the run is the sum of all
_LOOK_NS, _LOOKS = 20_000_000, 128
"""The state of a loader is looked at after this time, and after this part of the time since the start."""
_QUICK = ("busy_ns", "idle_ns", "deaths", "retries", "skipped")
"""Counts of a source that cost little to read."""
_QUICK_OF = itemgetter(*_QUICK)
_TOTALS = ("batches", "samples", "bytes", "wall_ns", "waited_ns", *_QUICK)
_TOTALS_OF = itemgetter(*_TOTALS)
_FAILURES = ("deaths", "retries", "recovered", "skipped", "substituted", "raised", "unrecorded")
"""Counts of a source that also grow between two epochs, where its workers run ahead: the later epoch has these."""
_TOGETHER = 16
"""Epochs that have ended are added to sums this many at a time: short ones must not wait for it."""
_MOST_AT_A_TIME = 8  # epochs of one loader that may end in one moment
_NO_MACHINE = MachineSnapshot()
_Outside = tuple[Mapping[str, int], Mapping[str, int]]


class LoaderUse:
    """The state of a loader over an epoch: at most every 20 ms, and rarely in a long one.

    Attributes:
        last: The latest state; None before the first.
        memory_bytes: The largest memory of the batches in flight.
        workers: The smallest and the largest number of active workers.
        waited: Time since the start of the epoch, and time waited until then, in ns, in turn.
        due_ns: When to look at the loader again, in ns since the start of the epoch.
    """

    def __init__(self) -> None:
        self.last: LoaderSnapshot | None = None
        self.waited = array("q")
        self.memory_bytes = 0
        self.workers = (0, 0)
        self.due_ns = 0
        self._at_ns = self._sum_ns = 0
        self._occupancy_ns = self._in_flight_ns = 0.0

    def add(self, at_ns: int, state: LoaderSnapshot, waited_ns: int = 0) -> None:
        """Add a state, which counts for the time since the one before it."""
        self.waited.extend((at_ns, waited_ns))
        duration_ns = max(at_ns - self._at_ns, 1)
        # A batch that is larger than those before lets the budget hold fewer than there are.
        self._occupancy_ns += duration_ns * min(state.ready / max(state.limit, 1), 1.0)
        self._in_flight_ns += duration_ns * state.in_flight
        self._sum_ns += duration_ns
        self._at_ns, self.due_ns = at_ns, at_ns + max(_LOOK_NS, at_ns // _LOOKS)
        self.memory_bytes = max(self.memory_bytes, state.memory_bytes)
        low, high = self.workers if self.last is not None else (state.workers, state.workers)
        self.workers = min(low, state.workers), max(high, state.workers)
        self.last = state

    @property
    def occupancy(self) -> float:
        """The share of the prefetch window that holds ready batches, on average."""
        return self._occupancy_ns / max(self._sum_ns, 1)

    @property
    def in_flight(self) -> float:
        """The number of batches in flight, on average."""
        return self._in_flight_ns / max(self._sum_ns, 1)


@dataclass(eq=False)
class EpochRecord:
    """One epoch as the training process sees it."""

    epoch: int
    calls: Calls = field(default_factory=lambda: Calls(now_ns()))
    start_ns: int = 0  # time in ``iter()``
    end_ns: int = 0  # time after the epoch in which its workers ended
    first_ns: int = 0  # time in ``next()`` for the first batch
    failed_ns: int = 0  # time inside the calls of ``next()`` that raised
    pinned_ns: int = 0  # time to copy batches to pinned memory
    ranks_ns: int = 0  # time of waiting for other ranks
    sampling_ns: int = 0  # time in the sampler
    # Time in which local rank 0 waited for batches, which all ranks request ahead; None: they do not.
    own_waited_ns: int | None = None
    coverage: tuple[int, int, int] = (0, 0, 0)
    lateness: Lateness | None = None  # distance of the batches from the sampler's order
    # Metrics of the engine at the start of the epoch, and as of the last update.
    before: Metrics = field(default_factory=Metrics)
    after: Metrics = field(default_factory=Metrics)
    # The counts of machine and storage, at these two moments.
    outside: tuple[_Outside, _Outside] = (({}, {}), ({}, {}))
    use: LoaderUse = field(default_factory=LoaderUse)
    machine: MachineSnapshot = _NO_MACHINE
    decision: ThresholdDecision | None = None
    held_by_budget: bool = False  # whether the memory budget kept more batches from being opened
    finished: bool = False  # whether it ended regularly
    ended_ns: int = 0  # when it ended, or was abandoned; 0 before

    @property
    def waits(self) -> Histogram:
        """Time inside each ``next()``, in ns."""
        return self.calls.waits

    @property
    def steps(self) -> Histogram:
        """Time between two of them, in ns."""
        return self.calls.steps

    @property
    def waited_ns(self) -> int:
        """Time inside ``iter()`` and ``next()``, with the end of workers."""
        own_ns = self.own_waited_ns
        in_next_ns = self.waits.total + self.failed_ns if own_ns is None else own_ns
        return self.start_ns + in_next_ns + self.end_ns

    @property
    def counts(self) -> Counts:
        """The numbers of this epoch, all of the above included."""
        counts, calls = self.after.counts.minus(self.before.counts), self.calls
        for before, after in zip(*self.outside, strict=True):
            if after is not before:
                counts.update(Counts(after).minus(Counts(before)))
        asked, delivered, outstanding = self.coverage
        counts.update(
            asked=asked,
            delivered=delivered,
            outstanding=outstanding,
            epochs=1,
            batches=calls.waits.count,
            samples=calls.samples,
            bytes=calls.nbytes,
            wall_ns=calls.wall_ns,
            waited_ns=self.waited_ns,
            start_ns=self.start_ns,
            end_ns=self.end_ns,
            first_ns=self.first_ns,
            failed_ns=self.failed_ns,
            pinned_ns=self.pinned_ns,
            ranks_ns=self.ranks_ns,
            sampling_ns=self.sampling_ns,
        )
        return counts

    @property
    def metrics(self) -> Metrics:
        """The metrics of this epoch, and all of the above; each call makes another."""
        lags = EMPTY if self.lateness is None else self.lateness.latest
        own = {"wait": self.waits.snapshot(), "step": self.steps.snapshot(), "lag": lags}
        return Metrics(self.counts, {**own, **self.after.grown_since(self.before)})

    def totals(self, quick: Counts) -> tuple[int, ...]:
        """The counts of ``Totals`` in this order, with the present call of ``next()``.

        Args:
            quick: Those of its source, now or at the end of the epoch.
        """
        calls, wall_ns, waited_ns = self.calls, self.calls.wall_ns, self.waited_ns
        if (entered_ns := calls.entered_ns) > calls.left_ns:
            now = now_ns()
            wall_ns = max(wall_ns, now - calls.began_ns)
            waited_ns += max(now - entered_ns, 0) if self.own_waited_ns is None else 0
        own = calls.waits.count, calls.samples, calls.nbytes, wall_ns, waited_ns
        return *own, *map(sub, _QUICK_OF(quick), _QUICK_OF(self.before.counts))


_NO_LOADER = LoaderSnapshot(0, 0, 0, 0, 0, 0)


class Totals(NamedTuple):
    """Totals over all epochs, and the latest epoch so far."""

    # Totals, the newest epoch included: ``batches``, ``samples``, ``bytes``, ``waited_ns``, ``wall_ns``, ``busy_ns``,
    # ``idle_ns``, ``deaths``, ``retries``, ``skipped``.
    counts: Mapping[str, int]
    epoch: int = 0
    running: bool = False
    wall_ns: int = 0  # its duration so far
    waited_ns: int = 0  # time in ``next()`` and ``iter()`` in it
    batches: int = 0
    samples: int = 0
    loader: LoaderSnapshot = _NO_LOADER  # the loader after a recent batch of it


class _Ended(NamedTuple):
    """The epochs that have ended.

    Attributes:
        records: Those that are kept, and some before them; the latest last, where new ones are appended.
        added: Metrics of all epochs before these, and of the first ``num_added`` of them.
    """

    records: list[EpochRecord]
    added: Metrics
    num_added: int


class RunningEpoch(Observer):
    """Follows the calls of one engine, the ``source`` of its metrics, until the epoch is over for the log."""

    def __init__(
        self, log: EpochLog, record: EpochRecord, progress: EpochState, source: MetricsSource
    ) -> None:
        self._log = log
        self.record, self.progress, self.source = record, progress, source
        self.calls: Calls = record.calls
        self._comes_again = False

    @property
    def is_over(self) -> bool:
        """Whether nothing is noted any more."""
        return self.calls.is_closed

    @property
    def active_ns(self) -> int:
        """When something last happened in it."""
        calls = self.calls
        return max(calls.began_ns, calls.entered_ns, calls.left_ns)

    def started(self) -> None:
        calls = self.calls
        calls.left_ns = now_ns()
        calls.wall_ns = self.record.start_ns = calls.left_ns - calls.began_ns

    def enter(self) -> None:
        self.calls.enter(now_ns())

    def leave(self, samples: int, nbytes: int, loader: Callable[[], LoaderSnapshot]) -> None:
        record, calls = self.record, self.calls
        if self._comes_again:  # the batch that was counted last
            self.fail()
            self._comes_again = False
            return
        if calls.leave(now_ns(), samples, nbytes):
            return
        is_wanted = calls.is_wanted
        # First: if a signal's handler raises in it, the batch comes again. Until then the loop waits.
        state, now = loader(), now_ns()
        calls.leave(now, samples, nbytes, True)
        if calls.wall_ns >= calls.due_ns:
            if calls.waits.count == 1:
                record.first_ns = now - calls.entered_ns
            record.use.add(calls.wall_ns, state, record.waited_ns)
            calls.due_ns = record.use.due_ns
        if is_wanted:
            calls.is_wanted, record.use.last = False, state

    def fail(self) -> None:
        record, calls = self.record, self.calls
        if calls.entered_ns <= calls.left_ns:  # it had left, and was then interrupted
            self._comes_again = calls.is_wanted = True  # so that ``leave`` is called
        elif not self.is_over:
            calls.left_ns = now = now_ns()
            record.failed_ns += now - calls.entered_ns
            calls.wall_ns = now - calls.began_ns

    def pinned(self, duration_ns: int) -> None:
        if not self.is_over:
            self._comes_later()
            self.record.pinned_ns += duration_ns

    def waited_for_ranks(self, duration_ns: int) -> None:
        if not self.is_over:
            self._comes_later()
            self.record.ranks_ns += duration_ns

    def workers_ended(self, duration_ns: int) -> None:
        self.record.end_ns += duration_ns
        self.calls.wall_ns += duration_ns

    def own_rank_waited(self, duration_ns: int) -> None:
        self.record.own_waited_ns = (self.record.own_waited_ns or 0) + duration_ns

    def _comes_later(self) -> None:
        calls = self.calls
        calls.left_ns = now_ns()
        calls.wall_ns = calls.left_ns - calls.began_ns

    def finish(self) -> None:
        if not self.is_over:
            calls = self.calls
            calls.wall_ns = now_ns() - calls.began_ns
            self.record.finished = True
            self._log.settle(self)


class EpochLog(Observer):
    """Follows a loader through its epochs; one per loader, for all of its iterators.

    Attributes:
        machine: Returns the state of the machine, in any thread.
        storage: Returns the counters of sources, reads and the cache.
    """

    def __init__(self) -> None:
        self._slow: list[SlowSample] = []  # of engines that have ended
        self.machine: Callable[[], MachineSnapshot] = MachineSnapshot
        self.storage: Callable[[], Counts] = Counts
        # Readers in other threads take these first: an epoch that ends meanwhile is also in the other place.
        self._running: tuple[RunningEpoch, ...] = ()
        self._ended = _Ended([], Metrics(), 0)
        self._sources: tuple[MetricsSource, ...] = ()  # of engines that run
        self._latest: tuple[MetricsSource, Metrics] | None = None  # of the last epoch that ended
        # Of the storage, while epochs ran; and as it was when those began that run now.
        self._reads: tuple[Counts, Counts | None] = Counts(), None
        self._shown = dict.fromkeys(("wall_ns", "waited_ns", *_QUICK), 0)

    @property
    def past(self) -> list[EpochRecord]:
        """Epochs that have ended or were abandoned, the latest last."""
        return self._ended.records[-_KEPT_EPOCHS:]

    @property
    def reads(self) -> Counts:
        """What the storage did while epochs ran: of those that run at a time, each has all of it."""
        before, since = self._reads
        if since is None or not (now := self.storage()):
            return before
        reads = now.minus(since)
        reads.add(before)
        return reads

    @property
    def active_ns(self) -> int:
        """When something last happened in it; 0: nothing has."""
        ended_ns = [each.ended_ns for each in self._ended.records[-1:]]
        return max([*ended_ns, *(each.active_ns for each in self._running)], default=0)

    def begin(self, epoch: int, progress: EpochState, source: MetricsSource) -> RunningEpoch:
        latest = None
        if source not in self._sources:
            self._sources += (source,)
        else:
            self._settle_all(source)
            if self._latest is not None and self._latest[0] is source:
                latest = self._latest[1]
        if latest is None or not source.stands_still:
            before = source.metrics()
            if latest is not None:
                before.counts.update({name: latest.counts[name] for name in _FAILURES})
        else:
            before = latest
        machine, storage = self.machine(), self.storage()
        outside = machine.counts, storage
        calls = Calls(progress.began_ns)
        record = EpochRecord(epoch, calls, before=before, after=before, machine=machine)
        record.outside = outside, outside
        running = RunningEpoch(self, record, progress, source)
        if not self._running:
            self._reads = self.reads, storage
        self._running += (running,)
        return running

    def end(self, source: MetricsSource) -> None:
        if source in self._sources:
            self._settle_all(source)
            slow = slowest_of([*self._slow, *source.slowest()])
            sources = tuple(each for each in self._sources if each is not source)
            vars(self).update(_slow=slow, _sources=sources, _latest=None)

    def switched_off(self) -> None:
        """The epochs that run are given up: their figures would not change any more. Those before them stay."""
        for each in self._running:
            each.calls.close()
        self._running, self._sources, self._latest = (), (), None
        self._reads = self.reads, None

    @property
    def slow(self) -> list[SlowSample]:
        """The slowest samples of all epochs."""
        return slowest_of([*self._slow, *(one for each in self._sources for one in each.slowest())])

    def _settle_all(self, source: MetricsSource) -> None:
        for each in self._running:
            if each.source is source:
                self.settle(each)

    def settle(self, running: RunningEpoch) -> None:
        """Note the end of an epoch that has ended, or is abandoned."""
        running.fail()  # the loop has waited for the end, too
        record, records = running.record, self._ended.records
        vars(record).update(self._figures(running))
        record.ended_ns = record.ended_ns or now_ns()
        if record not in records[-_MOST_AT_A_TIME:]:  # an interruption may come after it
            records.append(record)
        self._latest = running.source, record.after
        self._running = tuple(each for each in self._running if each is not running)
        if not self._running:
            self._reads = self.reads, None
        record.calls.close()
        if len(records) - self._ended.num_added > _TOGETHER:
            self._add_up()

    def _add_up(self) -> None:
        """Add all epochs but the latest to the sum, and forget the oldest."""
        records, added, num_added = self._ended
        if new := [each.metrics for each in records[num_added:-1]]:
            added = Metrics.total([added, *new])
            kept = records[-_KEPT_EPOCHS:]
            self._ended = _Ended(kept, added, len(kept) - 1)

    def stages(self) -> tuple[tuple[int, int], ...]:
        """``(samples, ns)`` of each stage since the workers started; empty between two epochs; in any thread."""
        running = self._running
        current = _current(running, self._ended.records)
        return () if current is None else current.source.stages()

    def totals(self) -> Totals:
        """Totals over all epochs, and the latest one; any thread may call it, and gets no smaller times than before.

        It takes some ten microseconds, however many samples and epochs there were.
        """
        while True:
            running, ended = self._running, self._ended
            records = [*ended.records]
            each_of = [each.totals(each.after.counts) for each in records[ended.num_added :]]
            latest = (records[-1], each_of[-1]) if records else None
            current = _current(running, records)
            for each in _still(running, records):
                each_of.append(each.record.totals(Counts(each.source.quick_counts())))
                each.calls.is_wanted = True
                if each is current:
                    latest = each.record, each_of[-1]
            if running is self._running:  # else an epoch has ended or begun meanwhile
                break
        sums = map(sum, zip(_TOTALS_OF(ended.added.counts), *each_of, strict=True))
        counts = dict(zip(_TOTALS, sums, strict=True))
        # Between two lines of leave() or settle(), what the loop waits and what workers do may be in neither place.
        self._shown = {n: max(counts[n], least) for n, least in self._shown.items()}
        counts.update(self._shown)
        if latest is None:
            return Totals(counts)
        record, (batches, samples, _, wall_ns, waited_ns, *_) = latest
        runs, loader = current is not None, record.use.last or _NO_LOADER
        return Totals(counts, record.epoch, runs, wall_ns, waited_ns, batches, samples, loader)

    def look(self) -> tuple[list[tuple[EpochRecord, Metrics]], Metrics]:
        """All epochs that are kept, in the order in which something last happened in them; and the sum of all.

        In any thread: those that run, and end meanwhile, are copies.
        """
        running, (records, added, num_added) = self._running, self._ended
        past = [*records]
        found = [(each.ended_ns, each) for each in past]
        for each in _still(running, past):
            found.append((each.active_ns, replace(each.record, **self._figures(each))))
        known = [(at_ns, each, each.metrics) for at_ns, each in found]
        whole = Metrics.total([added, *(metrics for _, _, metrics in known[num_added:])])
        kept = sorted(known[max(len(past) - _KEPT_EPOCHS, 0) :], key=itemgetter(0))
        return [(each, metrics) for _, each, metrics in kept], whole

    def _figures(self, running: RunningEpoch) -> dict[str, Any]:
        """What is known of an epoch now, besides its calls."""
        source, progress, machine = running.source, running.progress, self.machine()
        return {
            "after": source.metrics(),
            "machine": machine,
            "outside": (running.record.outside[0], (machine.counts, self.storage())),
            "decision": source.decision(),
            "held_by_budget": source.held_by_budget,
            "coverage": progress.num_samples(),
            "sampling_ns": progress.sampling_ns,
            "lateness": progress.lateness,
        }


def _still(running: Sequence[RunningEpoch], ended: Sequence[EpochRecord]) -> Sequence[RunningEpoch]:
    """Those that are not among the ended ones, where they come first."""
    return [each for each in running if each.record not in ended[-_MOST_AT_A_TIME:]]


def _current(running: Sequence[RunningEpoch], ended: Sequence[EpochRecord]) -> RunningEpoch | None:
    """The epoch whose iterator was asked last; None: another one has ended since."""
    current = max(_still(running, ended), key=lambda each: each.active_ns, default=None)
    is_before = current is not None and ended and ended[-1].ended_ns > current.active_ns
    return None if is_before else current
