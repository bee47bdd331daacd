"""The stages wired together: from a loader's options to running workers and back to batches."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from minato._core.clock import now_ns
from minato._core.codes import FAILED, STATES
from minato._core.ledger import Ledger
from minato._core.segment import Segment
from minato._core.wait import EventCount
from minato._support import pickling
from minato._support.exceptions import Postponed, not_the_end
from minato.batching.arena import Arena
from minato.batching.pinned_slots import MemoryPinner
from minato.batching.reader import BatchReader
from minato.batching.serialization import LocalStore, SharedStore
from minato.delivery.device import device_copier
from minato.delivery.pinning import Pin, PinCopier
from minato.delivery.prefetch import Copier, PrefetchReader
from minato.engine.history import Experience
from minato.engine.metrics import EngineMetrics
from minato.engine.plan import Plan
from minato.engine.pools import make_pool
from minato.engine.profile_store import Memory
from minato.engine.worker_context import WorkerContext
from minato.errors import ErrorBudgetError
from minato.observe.stats.costs import CostStats, Meters
from minato.observe.stats.epoch_log import EpochLog, EpochState
from minato.observe.stats.histograms import merged
from minato.observe.stats.snapshot import LoaderSnapshot
from minato.observe.trace.loop import LoopTrack
from minato.observe.trace.tracer import NULL_TRACER, Tracer
from minato.scheduling.assignment import AnyWorker, Assignment, RoundRobin
from minato.scheduling.batches import BatchStorage, OpenBatch
from minato.scheduling.cost_model import EarlyStart
from minato.scheduling.dataset_state import DatasetStates
from minato.scheduling.dispatcher import Dispatcher, DispatcherSettings, Schedule
from minato.scheduling.prefetch_window import Window
from minato.scheduling.protocols import Progress
from minato.scheduling.slow_threshold import TimeoutPolicy
from minato.scheduling.wait_stats import ConsumerWait
from minato.workers.active_workers import ActiveWorkers
from minato.workers.current_sample import CurrentSample, read_current_sample
from minato.workers.error_policy import FailureCount
from minato.workers.read_limit import SharedReadLimit
from minato.workers.scaler import PolledPool, Scaler
from minato.workers.signals import exiting, keep_raised
from minato.workers.supervision import OomBackoff, RestartPolicy

__all__ = ["Engine"]

_LOOK_EVERY_NS = 10_000_000
_LOOK_SHARE = 500
"""Costs are looked at again after so long, and after so many times as long as the last look took."""
_BATCH_RECORDS = 2048
_BATCH_RECORDS_IN_LINE = 64
_POSITIONS = 1 << 16
"""Batches and samples that can be in flight: 4 MiB of ledger, of which only the batches' part is touched at once."""


def _end(
    shut_down: Callable[[], bool], arena: Arena, afterwards: list[Callable[[], object]]
) -> None:
    try:
        if shut_down():
            arena.reclaim_unleased()
    finally:
        while afterwards and not exiting():
            afterwards.pop()()


class _EpochProgress(Progress, EpochState, Protocol):
    """The progress of an epoch, as the dispatcher and the epoch log need it."""


class Engine:
    """Workers, their shared memory, and the consumer's end of it.

    Args:
        arena: Where the batches lie; that of an earlier engine has warm pages.
        experience: What earlier engines have learned of the samples; this one adds to it.
        make_reader: Makes what batches are, of full slots; by default tensors of this process.
        pin: Copies batches to memory that the device can read by itself: they come as :class:`Pinned`, then.
    """

    def __init__(
        self,
        plan: Plan,
        arena: Arena,
        experience: Experience,
        make_reader: type[BatchReader] | None = None,
        pin: Pin | None = None,
    ) -> None:
        self.plan = plan
        self.arena = arena
        self._memory = None if plan.profile is None else Memory(plan.profile, plan)
        if self._memory is not None and experience.costs is None:
            experience.costs = self._memory.costs()
        positions = max(_POSITIONS, 1 << (4 * plan.largest_batch - 1).bit_length())
        records = _BATCH_RECORDS if plan.num_workers else _BATCH_RECORDS_IN_LINE
        sizes = (max(plan.most_workers, 1), records, positions)
        ledger_nbytes = -(-Ledger.nbytes(*sizes) // 64) * 64
        in_processes = plan.num_workers > 0 and plan.worker_method == "process"
        meters_nbytes = sizes[0] * Meters.nbytes(len(plan.chain))
        roster_offset = ledger_nbytes + meters_nbytes
        traffic_offset = roster_offset + ActiveWorkers.NBYTES
        segment = Segment(traffic_offset + SharedReadLimit.nbytes(sizes[0]), shared=in_processes)
        self.ledger = Ledger(segment.array, sizes, segment.descriptor)
        ready = EventCount(segment.array, self.ledger.ready_events_offset)
        store = SharedStore(self.arena.segment) if in_processes else LocalStore()
        workplace = WorkerContext(
            plan,
            segment,
            ledger_nbytes,
            roster_offset,
            traffic_offset,
            self.arena.segment,
            store,
            habits=experience.habits if plan.num_workers == 0 else None,
            policy=plan.policy,
        )
        roster = workplace.roster(self.ledger)
        roster.want(max(plan.most_workers, 1))
        self.meters = [workplace.meters(number) for number in range(sizes[0])]
        """What each worker has measured."""
        self._profile = CostStats(plan.chain.names)
        window = Window(
            plan.num_workers,
            plan.window_batches,
            plan.budget_bytes,
            # A sample is bound to the batch max_lag after its own when that one is opened. Its own must be
            # delivered by then: else nothing would keep it from being in time.
            None if plan.order.keeps_places else plan.order.max_lag,
            # Batches that hold as many samples as all workers read at once.
            -(-plan.num_workers * plan.fetching.concurrency // plan.largest_batch),
            plan.fetching.slow_start,
            plan.shares_budget,
        )
        settles = plan.policy is not None and plan.policy.on_error != "raise"
        restart_policy = RestartPolicy(
            plan.restarts, settles, OomBackoff(window) if in_processes else None
        )
        flow = ConsumerWait()
        self._pool = make_pool(plan, workplace, self.ledger, ready, roster, restart_policy, flow)
        reader = (make_reader or BatchReader)(self.ledger, self.arena, store)
        self._observers: list[EpochLog | LoopTrack] = []
        if experience.journal is not None:
            self._observers.append(experience.journal)
        tracer: Tracer = NULL_TRACER
        if plan.tracks is not None:
            tracer = track = plan.tracks.loop()
            self._observers.append(LoopTrack(track))
        self._ahead = plan.prefetch_to_device
        copier: Copier | None = None
        if pin is not None:
            copier, self._ahead = PinCopier(pin), 1
        elif plan.device is not None:
            copier = device_copier(plan.device, self.arena, tracer=tracer)
        self._prefetcher = None if copier is None else PrefetchReader(reader, self.ledger, copier)
        self._reader = self._prefetcher or reader
        self._history = experience
        self._early_start: EarlyStart | None = None
        if plan.starts_early:
            self._early_start = EarlyStart(
                ledger=self.ledger, costs=experience.cost_model, num_workers=plan.num_workers
            )
            if experience.costs is not None:
                self._early_start.mean_ns = experience.costs.mean
        self._scaler: Scaler | None = None
        if experience.staffing is not None and plan.num_workers > 0:
            flow.watched, times = True, [meters.total for meters in self.meters]
            self._scaler = Scaler(
                experience.staffing,
                plan.most_workers,
                self._pool,
                roster,
                window,
                flow,
                self.ledger,
                times,
                None if self._early_start is None else self._early_start.resize,
            )
        assignment: Assignment = AnyWorker()
        if plan.round_robin:
            assignment = RoundRobin(
                max(plan.num_workers, 1),
                plan.order.in_order,
                cast(int, plan.window_batches),
                plan.replicas,
                self._reader.state,
            )
        self._dispatcher = Dispatcher(
            self.ledger,
            gate=ready,
            pool=self._pool if self._scaler is None else PolledPool(self._pool, self._scaler),
            storage=BatchStorage(self.arena, store, self._reader.discard),
            schedule=Schedule(window, plan.order, assignment, self._early_start),
            settings=DispatcherSettings(
                timeout_s=plan.timeout_s,
                one_epoch=plan.num_workers > 0 and not plan.persistent,
                skips=plan.policy is not None,
                drop_short=plan.drop_last,
                trace_wait_as="wait" if plan.num_workers else "load",
            ),
            wait_stats=flow,
            tracer=tracer,
        )
        self._current_sample = functools.partial(
            read_current_sample,
            self.ledger,
            functools.partial(workplace.read_keys, self.ledger),
            plan.chain.names,
        )
        self._failures = None
        if plan.policy is not None:
            self._failures = FailureCount(plan.policy.log, plan.error_budget, plan.quarantine)
        self._late: Postponed | None = None
        self._taken: tuple[OpenBatch, int, Any] | None = None
        """A batch that was read, its bytes and itself, until the program gets it."""
        self._started = False
        self._started_ns = now_ns()
        self.timeouts = TimeoutPolicy(plan.slow, experience.costs)
        """Decides which samples are slow."""
        experience.decision = self.timeouts.decision
        self.ledger.slow_ns = experience.decision.threshold_ns
        self._look_due_ns = self._started_ns + _LOOK_EVERY_NS
        self._gauges = EngineMetrics(
            self.ledger,
            self.meters,
            self._profile,
            window,
            flow,
            roster,
            self.timeouts,
            restart_policy,
            self._failures,
        )
        self._parts_slow = self._early_start is not None or plan.order.slow_to_newest or plan.defers
        self._sent = plan if in_processes and plan.context.get_start_method() != "fork" else None
        if self._sent is not None:
            workplace.write_plan(self.arena)
        self.afterwards: list[Callable[[], object]] = []
        """What is to be done once the workers have ended, unless the interpreter exits; the last comes first."""
        if plan.shares_budget:
            self.afterwards.append(window.end)
        if plan.replicas is not None:
            self.afterwards.append(plan.replicas.settle)
        if experience.journal is not None:
            self.afterwards.append(functools.partial(experience.journal.settle, self._gauges))
        keep_raised()
        self.shut_down = weakref.finalize(
            self, _end, self._pool.shut_down, self.arena, self.afterwards
        )
        """Ends the workers; runs by itself when the engine is dropped or the interpreter exits."""

    def begin(
        self,
        batches: Iterable[list[Any]],
        epoch: int,
        seed: int,
        expected: Callable[[], tuple[Iterable[list[Any]], int, int] | None],
        progress: _EpochProgress,
        size: Callable[[], int | None],
    ) -> bool:
        """Start a pass (see ``Dispatcher.begin``) and, with the first one, the workers.

        Args:
            size: Tells how many samples it has, or None if nobody knows.
        """
        self._late = None  # of a pass that was broken off
        if self._taken is not None:
            self._dispatcher.deliver(self._taken[0])
            self._taken = None
        self._history.engine = weakref.ref(self)
        for observer in self._observers:
            observer.begin(epoch, progress, self._gauges)
        if self._failures is not None:
            self._failures.begin(size())
        foretold = self._dispatcher.begin(batches, epoch, seed, expected, progress)
        if self._scaler is not None:
            self._scaler.restart()
        if self.plan.num_workers > 0:
            self._dispatcher.refill()
        if not self._started:
            self._start()
        for observer in self._observers:
            observer.started()
        return foretold

    def next(self) -> Any:
        """The next batch. Raises StopIteration at the end of the pass, and what the batch's samples raised."""
        for observer in self._observers:
            observer.enter()
        if self._taken is None:
            item = self._find()
            flags, *_, used_bytes = self.ledger.contents(item.record)
            try:
                if self.plan.replicas is not None and flags & (STATES | FAILED):
                    self._note_state(self.plan.replicas, item.record)
                try:
                    batch = self._reader.read(item.record, item.slot)
                except StopIteration as stop:
                    raise not_the_end("what the batch is made of", stop) from stop
            except BaseException:
                self._dispatcher.done(item, used_bytes)
                try:
                    self._prepare(item)
                finally:
                    self._hand_over(item, used_bytes)
                raise
            self._dispatcher.done(item, used_bytes)
            self._taken = item, used_bytes, batch
            # Functions of the user's may be interrupted in here: then the next call has the batch.
            self._prepare(item)
        item, used_bytes, batch = self._taken
        self._taken = None
        self._hand_over(item, used_bytes)
        return batch

    def _find(self) -> OpenBatch:
        """Wait for the next batch."""
        try:
            if self._late is not None:
                late, self._late = self._late, None
                late.reraise()
            if self._failures is not None:
                self._failures.check()
            item = self._dispatcher.next()
        except ErrorBudgetError:
            self._dispatcher.abandon()
            raise
        except StopIteration:
            if self.plan.replicas is not None:
                self.plan.replicas.present = (
                    None  # the next pass begins with the dataset as it will be
                )
            if self._failures is not None:
                self._failures.end()
            if self._memory is not None:
                self._memory.keep(self.profile(), self.timeouts.recent)
            for observer in self._observers:
                observer.finish()
            raise
        if self._failures is not None:
            self._failures.finished += len(item.keys)
        return item

    def _prepare(self, item: OpenBatch) -> None:
        """Make ready for the calls to come before this one returns a batch."""
        self._look_ahead(item)
        if self._prefetcher is not None:
            self._prefetcher.prefetch(self._dispatcher.upcoming(self._ahead))
        self.arena.trim(self._dispatcher.num_open)

    def _hand_over(self, item: OpenBatch, used_bytes: int) -> None:
        """Note that the program gets a batch, or its error."""
        self._dispatcher.deliver(item)
        if self._observers:
            samples = item.keys[0] if self.plan.streams else len(item.keys)
            for observer in self._observers:
                observer.leave(samples, used_bytes, self._snapshot)

    def _look_ahead(self, item: OpenBatch) -> None:
        """See to what the workers do next; what goes wrong is raised by the next call: this one has a batch."""
        try:
            if self._parts_slow:
                self._mark_slow()
            if self._scaler is not None:
                self._scaler.look()
            if self.plan.num_workers > 0:
                self._dispatcher.top_up()
            if self.plan.restarts:
                self._pool.check_early()
            if self._early_start is not None:
                self._early_start.learn(item.record)
        except Exception as error:
            self._late = Postponed(error)

    def _snapshot(self) -> LoaderSnapshot:
        self._gauges.look(self._pool.usage)
        return self._gauges.snapshot(self._dispatcher.num_open, self._dispatcher.num_ready)

    def pinned(self, duration_ns: int) -> None:
        """Learn how long it took to pin the batch that ``next`` returned."""
        for observer in self._observers:
            observer.pinned(duration_ns)

    def pin_slots(self, locker: MemoryPinner) -> None:
        """Keep the memory of batches in place, for a device that reads from there."""
        self.arena.pin_slots(locker)

    def _note_state(self, replicas: DatasetStates, record: int) -> None:
        if (state := self._reader.state(record)) is not None:
            replicas.heard(*state)

    @property
    def workers(self) -> list[Any]:
        """The worker processes, if workers are processes of this machine."""
        return list(self._pool.processes)

    def profile(self) -> CostStats:
        """What samples have cost so far, and since this was last asked."""
        self._profile.update(self.meters)
        return self._profile

    def running(self, least_ns: int) -> list[tuple[int, CurrentSample, int]]:
        """Number, sample and its time in ns so far of each worker that has been on a sample for so long."""
        if self.plan.streams:
            return []
        workers, now = range(len(self.meters)), now_ns()
        held = ((worker, sample) for worker in workers if (sample := self._current_sample(worker)))
        times = ((worker, sample, now - sample.started_ns) for worker, sample in held)
        return [each for each in times if each[2] >= least_ns]

    def _mark_slow(self) -> None:
        """Tell the workers from which cost on a sample is slow, when enough have run since the last time."""
        now = now_ns()
        if now < self._look_due_ns:
            return
        elapsed_s = (now - self._started_ns) / 1e9
        if self.timeouts.due(sum(meters.total.count for meters in self.meters), elapsed_s):
            times = merged(meters.total for meters in self.meters)
            running_ns = [now - begun_ns for begun_ns in self.ledger.begun()]
            self._history.decision = self.timeouts.observe(times, elapsed_s, running_ns)
            self.ledger.slow_ns = self._history.decision.threshold_ns
            self._history.costs = self.timeouts.recent
            if self._early_start is not None:
                self._early_start.mean_ns = self.timeouts.recent.mean
        self._look_due_ns = now + max(_LOOK_EVERY_NS, _LOOK_SHARE * (now_ns() - now))

    def _start(self) -> None:
        self._started = True
        try:
            upcoming = functools.partial(self._dispatcher.upcoming, 1)
            self._pool.start(upcoming if self.plan.starts_as_needed else None)
        except Exception as error:
            self.shut_down()
            if self._sent is not None:
                pickling.advise(error)
                pickling.check_picklable("transforms", self._sent.chain.steps)
                for name in ("dataset", "collate_fn", "worker_init_fn"):
                    pickling.check_picklable(name, getattr(self._sent, name))
            raise

    def rest(self) -> None:
        """Let go of a pass that is over and of the worker in line; ``begin`` may follow."""
        self._dispatcher.abandon()
        self._started = False

    def cancel(self) -> None:
        """Abandon what is in flight."""
        self._dispatcher.cancel_all()
