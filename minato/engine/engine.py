"""The engine: the stages of one loader, from indices to batches."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from minato._core import now_ns
from minato._core.codes import FAILED, STATES
from minato._support import pickling
from minato.batching.arena import Arena
from minato.batching.indices import StoredIndices
from minato.batching.pinned_slots import MemoryPinner
from minato.batching.reader import BatchReader
from minato.batching.serialization import LocalStore, SharedStore
from minato.delivery.device import device_copier
from minato.delivery.pinning import Pin, PinCopier
from minato.delivery.prefetch import Copier, PrefetchReader
from minato.engine.copied_objects import CopiedObjects
from minato.engine.ending import cost_history, end_engine, if_alive, save_costs
from minato.engine.history import History
from minato.engine.metrics import EngineMetrics
from minato.engine.plan import Plan
from minato.engine.pools import make_pool
from minato.engine.shared_state import SharedState
from minato.engine.worker_context import WorkerContext
from minato.errors import ErrorBudgetError, Postponed, not_the_end
from minato.observe.lateness import InOrderLateness
from minato.observe.meters import CostStats, merged
from minato.observe.observers import LoaderSnapshot, Observer, Observers
from minato.observe.trace import LoopTrack
from minato.observe.tracer import NULL_TRACER, Tracer
from minato.sampling.epoch import Epoch
from minato.sampling.progress import Outgoing, Progress
from minato.sampling.resume import DatasetStates
from minato.sampling.samplers import IndexBatches
from minato.scheduling.assignment import AnyWorker, Assignment, RoundRobin
from minato.scheduling.batches import BatchStorage, OpenBatch
from minato.scheduling.cost_model import EarlyStart
from minato.scheduling.dispatcher import Dispatcher, DispatcherSettings, Schedule
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.scheduling.slow_threshold import SlowThreshold
from minato.scheduling.waiting import ConsumerWait, Pool
from minato.workers.current_sample import CurrentSample, CurrentWork
from minato.workers.error_policy import FailureCount
from minato.workers.reads import LEAST_LISTS
from minato.workers.supervision import OomBackoff, RestartPolicy

if TYPE_CHECKING:  # loaders with a fixed number of workers start without it
    from minato.workers.autoscale import Scaler

__all__ = ["Engine"]

_READ_COSTS_EVERY_NS = 10_000_000
_READ_COSTS_SHARE = 500
"""Costs are read again after this time, and after this multiple of the time that the last reading took."""
_BATCH_RECORDS = 2048
_POSITIONS = 1 << 16
"""Samples that can be in flight: 4 MiB of ledger, whose pages are touched as they are used."""


class Engine:
    """Wires the stages of one loader together: it starts the workers and returns their batches.

    Args:
        arena: Memory of the batches; that of an earlier engine has warm pages.
        history: Measurements of earlier engines, to which this one adds its own.
        make_reader: Class that reads batches from full slots; by default as tensors of this process.
        pin: Copies batches to pinned memory: ``next`` then returns :class:`Pinned`.

    Attributes:
        plan: The same.
        arena: The same.
        ledger: Assigns samples to workers, and results to batches.
        meters: The measurements of each worker.
        slow_threshold: Decides which samples are slow.
        afterwards: Functions to call after the workers have ended, the last one first, unless the interpreter exits.
    """

    def __init__(
        self,
        plan: Plan,
        arena: Arena,
        history: History,
        *,
        make_reader: type[BatchReader] | None = None,
        pin: Pin | None = None,
    ) -> None:
        worker, policy = plan.worker, plan.failures.policy
        self.plan = plan
        self.arena = arena
        self._history = history
        self._cost_history = cost_history(plan, history)
        state = _shared_state(plan)
        state.active.set_count(worker.most_workers)
        # Where a place that a skipped sample leaves is for another one, no batch may begin with places that are kept.
        fills = policy is not None and not worker.order.keeps_places
        optimistic = history.may_travel is None and (fills or not worker.hands_over)
        if worker.pipeline.refetches:
            state.handover.settle(False)
        elif optimistic or not worker.in_processes:
            state.handover.settle(True)
        elif history.may_travel is not None:
            state.handover.settle(history.may_travel)
        self.ledger = state.ledger
        self.meters = [state.meters(number) for number in range(worker.most_workers)]
        store = (SharedStore if worker.in_processes else LocalStore)(arena.segment)
        context = WorkerContext(
            worker,
            state.layout,
            store,
            policy=policy,
        )
        window, wait_stats = _window(plan), ConsumerWait()
        restart_policy = RestartPolicy(
            plan.pool.restarts,
            policy is not None and policy.on_error != "raise",
            OomBackoff(window) if worker.in_processes else None,
        )
        self._current_work = CurrentWork(
            self.ledger, StoredIndices(self.ledger, store), worker.pipeline.transforms.names
        )
        self._pool = make_pool(plan, context, state, self._current_work, restart_policy, wait_stats)
        track = None if worker.tracks is None else worker.tracks.loop()
        tracer: Tracer = NULL_TRACER if track is None else track
        observers: list[Observer] = [] if track is None else [LoopTrack(track)]
        if worker.in_processes and plan.pool.context.get_start_method() == "fork":
            observers.append(CopiedObjects(worker.pipeline.dataset, self._pool))
        self._observers = Observers(history.observers, observers)
        reader = (make_reader or BatchReader)(self.ledger, arena, store)
        self._num_prefetched = plan.prefetch.to_device if pin is None else 1
        copier = _copier(plan, arena, pin, tracer)
        self._prefetcher = None if copier is None else PrefetchReader(reader, self.ledger, copier)
        self._reader = self._prefetcher or reader
        self._early_start: EarlyStart | None = None
        if worker.starts_early:
            self._early_start = EarlyStart(
                ledger=self.ledger, costs=history.cost_model, num_workers=plan.pool.first
            )
            if history.costs is not None:
                self._early_start.mean_ns = history.costs.mean
        self._scaler: Scaler | None = None
        pool: Pool = self._pool
        if history.autoscale is not None:
            from minato.workers.autoscale import PolledPool, Scaler

            wait_stats.watched = True
            self._scaler = Scaler(
                history.autoscale,
                workers=self._pool,
                active_workers=state.active,
                window=window,
                wait_stats=wait_stats,
                ledger=self.ledger,
                times=[meters.total for meters in self.meters],
                resized=None if self._early_start is None else self._early_start.resize,
            )
            pool = PolledPool(pool, self._scaler)
        self._dispatcher = Dispatcher(
            self.ledger,
            ready_events=state.ready,
            pool=pool,
            storage=BatchStorage(arena, store, self._reader.discard),
            schedule=Schedule(
                window=window,
                order=worker.order,
                assignment=_assignment(plan, self._reader.state),
                early_start=self._early_start,
                handover=state.handover,
            ),
            settings=_dispatcher_settings(plan),
            wait_stats=wait_stats,
            tracer=tracer,
        )
        self._window, self._active_workers = window, state.active
        self._failures: FailureCount | None = None
        if policy is not None:
            self._failures = FailureCount(policy.log, plan.failures.budget, plan.failures.log)
        self._pending_error: Postponed | None = None
        self._outgoing: Outgoing | None = None
        self._progress: Progress | None = None
        self._started = False
        self._started_ns = now_ns()
        self.slow_threshold = SlowThreshold(plan.slow, history.costs)
        history.decision = self.slow_threshold.decision
        self.ledger.slow_ns = history.decision.threshold_ns
        self._costs_due_ns = self._started_ns + _READ_COSTS_EVERY_NS
        self._uses_threshold = (
            self._early_start is not None or worker.order.slow_to_newest or worker.defers
        )
        self._costs = CostStats(worker.pipeline.transforms.names)
        self._metrics = EngineMetrics(
            activities=self.ledger,
            meters=self.meters,
            costs=self._costs,
            window=window,
            wait_stats=wait_stats,
            slow_threshold=self.slow_threshold,
            restart_policy=restart_policy,
            failures=self._failures,
        )
        self._pickles_plan = worker.in_processes and plan.pool.context.get_start_method() != "fork"
        # A context of another package has a pickler of its own.
        if self._pickles_plan and type(plan.pool.context).__module__ == "multiprocessing.context":
            context.sent = pickling.for_children(worker)
        self.afterwards: list[Callable[[], object]] = []
        if plan.prefetch.shares_budget:
            self.afterwards.append(window.release_budget)
        if worker.dataset_states is not None:
            self.afterwards.append(if_alive(DatasetStates.keep_present, worker.dataset_states))
        if worker.hands_over:
            self.afterwards.append(if_alive(History.learn, history, state.handover))
        self.afterwards.append(self._observers.ending(self._metrics))
        self._end = functools.partial(end_engine, self._pool.shut_down, arena, self.afterwards)
        self._finalizer = weakref.finalize(self, self._end)

    def begin(self, epoch: Epoch, batches: IndexBatches) -> bool:
        """Start an epoch and, with the first one, the workers.

        Args:
            batches: The indices of each batch, as ``epoch.batches`` yields them.

        Returns:
            False if batches had been prefetched for this epoch and were not its own; they are dropped.
        """
        self._pending_error = None  # of an epoch that was abandoned
        self._history.engine = weakref.ref(self)
        self._observers.begin(epoch.number, epoch.progress, self._metrics)
        if self._failures is not None:
            self._failures.begin(epoch.size())
        is_right = self._dispatcher.begin(
            batches,
            epoch=epoch.number,
            seed=epoch.seed,
            predict_next=epoch.predict_next,
            progress=epoch.progress,
        )
        self._outgoing, self._progress = None, epoch.progress
        if self.plan.worker.order.in_order:
            epoch.progress.lateness = InOrderLateness()
        if self._scaler is not None:
            self._scaler.restart()
        self._dispatcher.refill()
        if not self._started:
            self._start()
        self._observers.started()
        return is_right

    def shut_down(self) -> None:
        """End the workers; runs by itself when the engine is dropped or the interpreter exits.

        A call that was interrupted can be repeated.
        """
        if self._finalizer.alive:
            self._end()
            self._finalizer.detach()

    def next(self) -> Outgoing:
        """Wait for the next batch, or the error of a sample, and return it: the same one until it is given.

        The handler of a signal may raise at any line: the next call goes on there.

        Raises:
            StopIteration: The epoch is over.
            Exception: Not that of a batch: the next call waits for the same one.
        """
        outgoing = self._outgoing
        if outgoing is not None and outgoing.is_given:
            self._settle()
            outgoing = None
        self._observers.enter()
        if outgoing is None:
            self._outgoing = outgoing = self._read(self._find())
        if (item := self._dispatcher.current) is not None:
            self._prepare(item, outgoing)
        return outgoing

    def _settle(self) -> None:
        """Record the batch that the training loop has, and go on to the next one."""
        if self._progress is not None:
            self._progress.settle()
        self._outgoing = None

    def _read(self, item: OpenBatch) -> Outgoing:
        """Make a batch; its slot stays as it is, so that this can be done again."""
        try:
            error = self._reader.failure(item.record, item.slot)
            if error is not None:
                return Outgoing(error=error)
            return Outgoing(self._reader.read(item.record, item.slot))
        except StopIteration as stop:
            return Outgoing(error=not_the_end("what the batch is made of", stop))
        except Exception as error:
            return Outgoing(error=error)

    def _find(self) -> OpenBatch:
        """Wait for the next batch."""
        try:
            if self._pending_error is not None:
                error, self._pending_error = self._pending_error, None
                error.reraise()
            if self._failures is not None:
                self._failures.check()
            item = self._dispatcher.next()
        except ErrorBudgetError:
            self._dispatcher.abandon()
            raise
        except StopIteration:
            if self.plan.worker.dataset_states is not None:
                # The next epoch begins with the dataset as it is then.
                self.plan.worker.dataset_states.present = None
            try:
                if self._failures is not None:
                    self._failures.end()
                if self._cost_history is not None:
                    save_costs(
                        self._cost_history, self._costs, self.meters, self.slow_threshold.recent
                    )
            finally:
                self._observers.finish()
            raise
        return item

    def _prepare(self, item: OpenBatch, outgoing: Outgoing) -> None:
        """Prepare what to record of a batch, and the batches of later calls, before it is given; each part once."""
        if item.records is None:
            item.records = [*self._state_of(item), *self._dispatcher.records(item)]
        if not item.is_prepared:
            used_bytes = self.ledger.describe(item.record).used_nbytes
            self._dispatcher.read(item, used_bytes)
            self._dispatcher.discard(item)
            self._prepare_workers(item)
            if self._prefetcher is not None:
                self._prefetcher.prefetch(self._dispatcher.upcoming(self._num_prefetched))
            self._leave(item, used_bytes)
            item.is_prepared = True
        outgoing.records = item.records
        if self._progress is not None:
            self._progress.last = outgoing
        self._dispatcher.returned(item)

    def _state_of(self, item: OpenBatch) -> list[Callable[[], object]]:
        """The function that records the state of the dataset after a batch, if it came with one."""
        states = self.plan.worker.dataset_states
        if states is None or not self.ledger.describe(item.record).flags & (STATES | FAILED):
            return []
        state = self._reader.state(item.record)
        return [] if state is None else [functools.partial(states.update, *state)]

    def _leave(self, item: OpenBatch, used_bytes: int) -> None:
        """Tell the observers that ``next`` returns a batch, or its error."""
        if self._failures is not None:
            self._failures.finished += len(item.indices)
        if self._observers:
            samples = item.num_samples
            if self.plan.worker.pipeline.streams:
                samples = item.indices[0]
            self._observers.leave(samples, used_bytes, self._snapshot)

    def _prepare_workers(self, item: OpenBatch) -> None:
        """Open more batches and supervise the workers; the next call raises an error, because this one has a batch."""
        try:
            if self._early_start is not None:
                self._early_start.learn(item.record)
            if not self._dispatcher.top_up():
                return
            if self._uses_threshold:
                self._update_threshold()
            if self._scaler is not None:
                self._scaler.update()
            self.arena.trim(self._dispatcher.num_open)
            if self.plan.pool.restarts:
                self._pool.check_early()
        except Exception as error:
            self._pending_error = Postponed(error)

    def _snapshot(self) -> LoaderSnapshot:
        self._metrics.look(self._pool.usage)
        window, in_flight = self._window, self._dispatcher.num_open
        return LoaderSnapshot(
            self._active_workers.count,
            in_flight,
            self._dispatcher.num_ready,
            window.limit,
            round(in_flight * window.batch_bytes),
            window.budget_bytes,
        )

    def pinned(self, duration_ns: int) -> None:
        """Record the time in ns that pinning the last batch took."""
        self._observers.pinned(duration_ns)

    def pin_slots(self, pinner: MemoryPinner) -> None:
        """Pin the memory of batches, for a device that reads from there."""
        self.arena.pin_slots(pinner)

    @property
    def workers(self) -> list[Any]:
        """The worker processes that have been started, if workers are processes of this machine."""
        return [process for process in self._pool.processes if process.pid is not None]

    def running(self, least_ns: int) -> list[tuple[int, CurrentSample, int]]:
        """Worker, sample and time in ns of each sample that has run for at least ``least_ns``."""
        if self.plan.worker.pipeline.streams:
            return []
        workers, now = range(len(self.meters)), now_ns()
        held = (
            (worker, sample) for worker in workers if (sample := self._current_work.sample(worker))
        )
        times = ((worker, sample, now - sample.started_ns) for worker, sample in held)
        return [each for each in times if each[2] >= least_ns]

    def _update_threshold(self) -> None:
        """Update the slow threshold, when enough samples have run since the last update."""
        now = now_ns()
        if now < self._costs_due_ns:
            return
        elapsed_s = (now - self._started_ns) / 1e9
        if self.slow_threshold.due(sum(meters.total.count for meters in self.meters), elapsed_s):
            times = merged(meters.total for meters in self.meters)
            leases = [self.ledger.lease(worker) for worker in range(len(self.meters))]
            running_ns = [now - lease.started_ns for lease in leases if lease.position is not None]
            self._history.decision = self.slow_threshold.observe(times, elapsed_s, running_ns)
            self.ledger.slow_ns = self._history.decision.threshold_ns
            self._history.costs = self.slow_threshold.recent
            if self._early_start is not None:
                self._early_start.mean_ns = self.slow_threshold.recent.mean
        self._costs_due_ns = now + max(_READ_COSTS_EVERY_NS, _READ_COSTS_SHARE * (now_ns() - now))

    def _start(self) -> None:
        self._started = True
        try:
            upcoming = functools.partial(self._dispatcher.upcoming, 1)
            self._pool.start(upcoming if self.plan.starts_as_needed else None)
        except Exception as error:
            self.shut_down()
            if self._pickles_plan:
                worker = self.plan.worker
                pickling.advise(error)
                pickling.check_picklable("transforms", worker.pipeline.transforms.steps)
                pickling.check_picklable("dataset", worker.pipeline.dataset)
                pickling.check_picklable("collate_fn", worker.pipeline.collate_fn)
                pickling.check_picklable("worker_init_fn", worker.init_fn)
            raise

    def cancel(self) -> None:
        """Cancel all batches in flight."""
        self._dispatcher.cancel_all()


def _copier(plan: Plan, arena: Arena, pin: Pin | None, tracer: Tracer) -> Copier | None:
    """The copier of batches that are prefetched, to pinned memory or to a device."""
    if pin is not None:
        return PinCopier(pin)
    device = plan.prefetch.device
    return None if device is None else device_copier(device, arena, tracer=tracer)


def _dispatcher_settings(plan: Plan) -> DispatcherSettings:
    worker = plan.worker
    return DispatcherSettings(
        timeout_s=plan.timeout_s,
        one_epoch=not plan.pool.persistent,
        skips=plan.failures.policy is not None,
        drop_short=worker.pipeline.drop_last,
    )


def _shared_state(plan: Plan) -> SharedState:
    worker = plan.worker
    return SharedState.create(
        num_workers=worker.most_workers,
        records=_BATCH_RECORDS,
        positions=max(_POSITIONS, 1 << (4 * plan.prefetch.largest_batch - 1).bit_length()),
        num_steps=len(worker.pipeline.transforms),
        shared=worker.in_processes,
    )


def _assignment(plan: Plan, state_of: Callable[[int], tuple[int, Any] | None]) -> Assignment:
    worker = plan.worker
    if not worker.round_robin:
        return AnyWorker()
    return RoundRobin(
        worker.most_workers,
        in_order=worker.order.in_order,
        capacity=cast(int, plan.prefetch.batches),
        dataset_states=worker.dataset_states,
        state_of=state_of,
    )


def _window(plan: Plan) -> PrefetchWindow:
    """The prefetch window of a plan."""
    worker, prefetch = plan.worker, plan.prefetch
    reads = plan.pool.first * worker.fetching.concurrency
    concurrent_batches = -(-reads // prefetch.largest_batch)
    if worker.begins_lists:
        concurrent_batches = plan.pool.first * LEAST_LISTS
    return PrefetchWindow(
        plan.pool.first,
        fixed=prefetch.batches,
        budget_bytes=prefetch.budget_bytes,
        # A sample gets a place in the batch max_lag after its own when that batch is opened. By then, its own batch
        # must have been returned: until then, the sample is not late.
        max_batches=None if worker.order.keeps_places else worker.order.max_lag,
        concurrent_batches=concurrent_batches,
        slow_start=worker.fetching.slow_start,
        shares=prefetch.shares_budget,
    )
