"""The engine: the stages of one loader, from indices to batches."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from time import sleep, thread_time_ns
from typing import TYPE_CHECKING, Any, cast

from minato._core import now_ns
from minato._core.codes import FAILED, STATES
from minato._support import pickling
from minato._support.items import item_of
from minato._support.threads import if_alive
from minato._support.values import plain
from minato.batching.arena import Arena, MemoryPinner
from minato.batching.reader import COPIED_NBYTES, BatchReader
from minato.batching.serialization import LocalStore, SharedStore, Store, StoredIndices
from minato.delivery.device import Copier, Pin, PinCopier, PrefetchReader, device_copier
from minato.delivery.iterator import BatchSource
from minato.engine.history import History, cost_history, end_engine, save_costs
from minato.engine.metrics import EngineMetrics
from minato.engine.plan import Plan
from minato.engine.pools import CopiedObjects, make_pool
from minato.errors import ErrorBudgetError, Postponed
from minato.observe.meters import CostStats, merged
from minato.observe.observers import LoaderSnapshot, Observer, Observers
from minato.observe.trace import LoopTrack, Track
from minato.observe.tracer import NULL_TRACER, Tracer
from minato.sampling.epoch import Epoch
from minato.sampling.progress import Outgoing, Progress
from minato.sampling.readers import EpochReaders
from minato.sampling.samplers import IndexBatches
from minato.scheduling.batches import BatchStorage, OpenBatch
from minato.scheduling.dispatcher import ConsumerWait, Dispatcher, Pool, Schedule
from minato.scheduling.orders import Assignment, Hosts, RoundRobin
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.scheduling.slow_samples import EarlyStart
from minato.workers.pools import MainReader
from minato.workers.reads import LEAST_LISTS
from minato.workers.sample_timeout import RunningSamples, SampleWatchdog, StackFile
from minato.workers.shared_state import CurrentSample, CurrentWork, SharedState
from minato.workers.supervision import RestartPolicy, WorkerRecovery
from minato.workers.worker_process import WorkerContext

if TYPE_CHECKING:  # loaders with a fixed number of workers start without it
    from minato.workers.autoscale import Scaler

_READ_COSTS_EVERY_NS = 10_000_000
_READ_COSTS_SHARE = 500
"""Costs are read again after this time, and after this multiple of the time that the last reading took."""
_NOTED_NS, _NOTED_S = 20_000_000, 0.0002
"""A worker notes what a lease took after its batch is complete: how long an epoch waits for that, and between looks."""
_MOST_AHEAD = 16
"""Small batches that are complete are read in runs of this number at most: one by one takes twice as long."""
_BATCH_RECORDS = 2048
_BATCHES_OFFERED = 7
"""Batches of an iterable dataset for each worker, besides the one that it runs: their items may go to any worker."""
_POSITIONS = 1 << 16
"""Samples that can be in flight: 4 MiB of ledger, whose pages are touched as they are used."""


class Engine(BatchSource):
    """Wires the stages of one loader together: it starts the workers and returns their batches.

    Args:
        arena: Memory of the batches; that of an earlier engine has warm pages.
        history: Measurements of earlier engines, to which this one adds its own.
        pin: Copies batches to pinned memory: ``next`` then returns :class:`Pinned`.

    Attributes:
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
        self.plan, self.arena, self._history = plan, arena, history
        self._cost_history = cost_history(plan, history)
        worker = plan.worker
        self._state = state = _shared_state(plan, history)
        self.ledger = state.ledger
        self.meters = [state.meters(number) for number in range(worker.most_workers)]
        self._window, self._wait_stats = _window(plan), ConsumerWait()
        store = (SharedStore if worker.in_processes else LocalStore)(arena.segment)
        whole, context = self._contexts(store)
        indices = StoredIndices(self.ledger, store, None if worker.readers is None else item_of)
        self._current_work = CurrentWork(self.ledger, indices, worker.pipeline.transforms.names)
        recovery = self._recovery(context)
        self._pool = make_pool(plan, context, state, recovery)
        self._pickles_plan = worker.in_processes and plan.context.get_start_method() != "fork"
        # A context of another package has a pickler of its own.
        if self._pickles_plan and type(plan.context).__module__ == "multiprocessing.context":
            context.sent = pickling.for_children(context.plan)
        track = None if plan.tracks is None else plan.tracks.loop()
        tracer: Tracer = NULL_TRACER if track is None else track
        self.observers = self._observe(track)
        reader = (make_reader or BatchReader)(self.ledger, arena, store)
        self._num_prefetched = plan.options.to_device if pin is None else 1
        copier = _copier(plan, arena, pin, tracer)
        self._prefetcher = None if copier is None else PrefetchReader(reader, self.ledger, copier)
        self._reader = self._prefetcher or reader
        self.slow_threshold = plan.slow_threshold(history.costs)
        history.decision = self.slow_threshold.decision
        self.ledger.slow_ns = history.decision.threshold_ns
        self._early_start = self._starts_early()
        self._scaler: Scaler | None = None
        self._main_reader: MainReader | None = None
        pool: Pool = self._scaled_pool() or self._pool
        if worker.reads_in_thread:
            pool = self._main_reader = MainReader(pool, whole, state, worker.most_workers)
        self._running_samples = self._watch(context)
        self._dispatcher = self._dispatch(store, pool, tracer)
        self._failures = plan.failure_count()
        self._pending_error: Postponed | None = None
        self._ready: deque[Outgoing] = deque()
        """What comes next, until it is given."""
        self._outgoing: Outgoing | None = None  # that of the batch that is being prepared
        self._most_ahead = 1
        self._progress: Progress | None = None
        self._started = False
        self._started_ns = now_ns()
        self._costs_due_ns = self._started_ns + _READ_COSTS_EVERY_NS
        self._uses_threshold = (
            self._early_start is not None or worker.order.slow_to_newest or worker.defers
        )
        self._costs = CostStats(worker.pipeline.transforms.names)
        self._metrics = self._count(recovery.restart_policy)
        self._hosted: list[weakref.ref[EpochReaders]] = []  # the readers of the present epoch
        self.afterwards = self._endings()
        self._end = functools.partial(end_engine, self._pool.shut_down, arena, self.afterwards)
        self._finalizer = weakref.finalize(self, self._end)
        # Python drops what a signal's handler raises in a finalizer, on any of its lines: another does the rest.
        weakref.finalize(self, self._pool.end_rest)

    # ---- its parts

    def _contexts(self, store: Store) -> tuple[WorkerContext, WorkerContext]:
        """What a thread here gets that reads the dataset, and what the workers get; else they are one."""
        worker, layout, policy = self.plan.worker, self._state.layout, self.plan.policy
        whole = WorkerContext(worker, layout, store, policy=policy)
        if not worker.reads_in_thread:
            return whole, whole
        worker = worker._replace(pipeline=worker.pipeline._replace(given=None, dataset=None))
        return whole, WorkerContext(worker, layout, store, policy=policy)

    def _watch(self, context: WorkerContext) -> RunningSamples:
        return RunningSamples(
            self._current_work,
            context.stacks,
            self._pool.processes or self._pool.threads,
            None if self._main_reader is None else self._main_reader.thread,
            recommends=context.stacks is not None and self.plan.options.compat != "torch",
        )

    def _recovery(self, context: WorkerContext) -> WorkerRecovery:
        """What happens when a worker dies, or its sample takes too long."""
        plan = self.plan
        policy, limit_s = plan.policy, plan.options.errors.sample_timeout
        restart_policy = RestartPolicy(
            plan.restarts,
            policy is not None and policy.on_error != "raise",
            self._window if plan.worker.in_processes else None,
            plan.spec.workers.persistent,
        )
        watchdog: SampleWatchdog | None = None
        if plan.worker.method == "process" and (limit_s or plan.spec.workers.timeout_s):
            context.stacks = StackFile()
        if limit_s is not None and context.stacks is not None:
            watchdog = SampleWatchdog(self.ledger, limit_s, context.stacks)
        return WorkerRecovery(
            self.ledger,
            context,
            self._current_work,
            restart_policy,
            self._wait_stats,
            self._state.suspects,
            watchdog,
        )

    def _observe(self, track: Track | None) -> Observers:
        plan = self.plan
        own: list[Observer] = [] if track is None else [LoopTrack(track)]
        if plan.worker.in_processes and plan.context.get_start_method() == "fork":
            own.append(CopiedObjects(plan.spec.dataset, self._pool))
        return Observers(self._history.observers, own)

    def _starts_early(self) -> EarlyStart | None:
        if not self.plan.worker.starts_early:
            return None
        history = self._history
        early = EarlyStart(
            ledger=self.ledger, costs=history.cost_model, num_workers=self.plan.first
        )
        if history.costs is not None:
            early.follow(history.costs.mean)
        return early

    def _scaled_pool(self) -> Scaler | None:
        """The pool as the dispatcher sees it where the number of workers changes."""
        if self._history.autoscale is None or self.plan.spec.scale is None:
            return None
        from minato.workers.autoscale import Scaler

        self._wait_stats.watched = True
        self._scaler = Scaler(
            self._history.autoscale,
            state=self._state,
            pool=self._pool,
            window=self._window,
            wait_stats=self._wait_stats,
            most=self.plan.worker.most_workers,
            resized=None if self._early_start is None else self._early_start.resize,
        )
        return self._scaler

    def _dispatch(self, store: Store, pool: Pool, tracer: Tracer) -> Dispatcher:
        plan, worker = self.plan, self.plan.worker
        return Dispatcher(
            self.ledger,
            ready_events=self._state.ready,
            pool=pool,
            storage=BatchStorage(self.arena, store, self._reader.discard),
            schedule=Schedule(
                window=self._window,
                order=worker.order,
                assignment=_assignment(plan),
                early_start=self._early_start,
                handover=self._state.handover,
                timeout_s=plain(plan.spec.workers.timeout_s),
                explain=self._running_samples,
                one_epoch=not plan.spec.workers.persistent,
                skips=plan.leaves_places,
                offers_items=worker.offers_items,
                drop_short=worker.pipeline.drop_last,
            ),
            wait_stats=self._wait_stats,
            tracer=tracer,
        )

    def _count(self, restart_policy: RestartPolicy) -> EngineMetrics:
        return EngineMetrics(
            activity=self.ledger.activity,
            meters=self.meters,
            costs=self._costs,
            window=self._window,
            wait_stats=self._wait_stats,
            slow_threshold=self.slow_threshold,
            restart_policy=restart_policy,
            failures=self._failures,
            device_times=self.arena.device_times,
        )

    def _endings(self) -> list[Callable[[], object]]:
        """What to call after the workers have ended; none of it refers to this engine."""
        worker, endings = self.plan.worker, list[Callable[[], object]]()
        if self.plan.shares_budget:
            endings.append(self._window.release_budget)
        if self._main_reader is not None:
            endings.append(self._main_reader.end)
        if worker.readers is not None:
            endings.append(functools.partial(_detach, self._hosted))
        if worker.hands_over:
            endings.append(if_alive(History.learn, self._history, self._state.handover))
        endings.append(self.observers.ending(self._metrics))
        return endings

    # ---- epochs and batches

    def begin(self, epoch: Epoch, batches: IndexBatches) -> bool:
        """Start an epoch and, with the first one, the workers."""
        self._pending_error = None  # of an epoch that was abandoned
        self._history.begin(self)
        self.observers.begin(epoch.number, epoch.progress, self._metrics)
        if epoch.readers is not None:
            self._host_readers(epoch.readers)
        if self._started and self.plan.spec.cache is not None and self.plan.spec.in_threads:
            self.plan.worker.pipeline.dataset.begin()  # threads share it with the program
        is_right = self._dispatcher.begin(
            batches,
            epoch=epoch.number,
            seed=epoch.seed,
            predict_next=epoch.predict_next,
            progress=epoch.progress,
        )
        if self._failures is not None:
            self._failures.begin(epoch.number, epoch.size(), is_right)
        self._ready.clear()
        self._outgoing, self._progress = None, epoch.progress
        self._most_ahead = _MOST_AHEAD if self._may_read_ahead(epoch.progress) else 1
        if self.plan.worker.order.in_order:
            epoch.progress.come_in_order()
        if self._scaler is not None:
            self._scaler.restart()
        self._dispatcher.refill()
        if not self._started:
            self._start()
        self.observers.started()
        return is_right

    def _may_read_ahead(self, progress: Progress) -> bool:
        """Whether batches of an epoch may be read before ``next()`` asks for them: nobody can tell."""
        plan, worker = self.plan, self.plan.worker
        is_plain = worker.order.in_order and worker.readers is None and plan.policy is None
        is_counted = progress.record is not None or progress.held_by
        return is_plain and not is_counted and type(self._reader) is BatchReader

    def _host_readers(self, readers: EpochReaders) -> None:
        """Have the workers' states go to the readers of an epoch."""
        plan, board = self.plan.worker.readers, self._state.board
        assert plan is not None
        slots = plan.slots
        assert slots is not None
        slots.begin(readers.starts())
        readers.board, readers.keeps_states = board, True
        readers.state_of = lambda reader, ordinal: slots.newest(reader, board.slot, ordinal)
        self._hosted[:] = [weakref.ref(readers)]

    def stop(self) -> None:
        """Ask the workers to exit; ``next()`` then raises RuntimeError where it would wait for them."""
        self._state.stop()
        self._state.ready.notify()

    def shut_down(self) -> None:
        """End the workers, also by itself when the engine is dropped or the interpreter exits; it can be repeated."""
        if self._finalizer.alive:
            self._end()
            self._finalizer.detach()

    def next(self) -> Outgoing:
        ready, progress = self._ready, self._progress
        if ready and ready[0].is_given:
            if progress is not None:
                progress.settle()
            ready.popleft()
        self.observers.enter()
        try:
            if not ready or self._pending_error is not None:
                self._fill()
            outgoing = ready[0]
            if progress is not None:
                progress.last = outgoing
            if not outgoing.is_noted:
                self._window.observe(outgoing.nbytes)
                self._prepare_workers()
                if self._prefetcher is not None:
                    self._prefetcher.prefetch(self._dispatcher.upcoming(self._num_prefetched))
                self.observers.leave(outgoing.num_samples, outgoing.nbytes, self._snapshot)
                outgoing.is_noted = True
        except StopIteration:
            raise
        except BaseException:
            self.observers.fail()
            raise
        return outgoing

    def _fill(self) -> None:
        """Read the next batch, and more small ones that are complete; go on where the last call was interrupted."""
        if self._pending_error is not None:
            error, self._pending_error = self._pending_error, None
            error.reraise()
        dispatcher, ready = self._dispatcher, self._ready
        if self._outgoing is None or self._outgoing.is_given:
            self._outgoing = None
            self._find()
        while True:
            item, outgoing = dispatcher.current, self._outgoing
            if item is not None:
                if outgoing is None:
                    self._outgoing = outgoing = self._read(item)
                self._prepare(item, outgoing)
            if outgoing is not None:
                ready.append(outgoing)
            self._outgoing = None
            is_last = item is None or item.nbytes > COPIED_NBYTES or len(ready) >= self._most_ahead
            if is_last or not dispatcher.take_ready():
                break

    def _read(self, item: OpenBatch) -> Outgoing:
        try:
            if not item.is_plain:
                error = self._reader.failure(item.record, item.slot)
                if error is not None:
                    return Outgoing(error=error)
            return Outgoing(self._reader.read(item.record, item.slot))
        except Exception as raised:
            return Outgoing.of_error(raised)

    def _find(self) -> None:
        try:
            if self._failures is not None:
                self._failures.check()
            self._dispatcher.next()
        except ErrorBudgetError:
            self._dispatcher.abandon()
            raise
        except StopIteration:
            try:
                if self.observers and not self.plan.options.begins_next_epoch:
                    self._await_notes()
                if self._failures is not None:
                    self._failures.end(self._progress)
                if self._cost_history is not None:
                    save_costs(
                        self._cost_history, self._costs, self.meters, self.slow_threshold.recent
                    )
            finally:
                self.observers.finish()
            raise

    def _await_notes(self) -> None:
        workers, due_ns = range(len(self.meters)), now_ns() + _NOTED_NS
        while any(self.ledger.lease(each).position is not None for each in workers):
            if now_ns() > due_ns:
                return
            sleep(_NOTED_S)

    def _prepare(self, item: OpenBatch, outgoing: Outgoing) -> None:
        """Prepare what to record of a batch before it is given, and end it in the ledger; each part once."""
        if item.records is None:
            records = self._dispatcher.records(item, len(self._ready))
            item.records = records if item.is_plain else [*self._state_of(item), *records]
        if not item.is_prepared:
            self._dispatcher.read(item)
            if self._early_start is not None and self._early_start.threshold_ns:
                self._early_start.learn(item.record)
            if self._failures is not None:
                self._failures.finished += len(item.indices)
            item.is_prepared = True
        outgoing.records = item.records
        outgoing.num_samples, outgoing.nbytes = item.num_samples, item.nbytes
        self._dispatcher.returned(item)

    def _state_of(self, item: OpenBatch) -> list[Callable[[], object]]:
        states = self.plan.worker.dataset_states
        if states is None or not self.ledger.describe(item.record).flags & (STATES | FAILED):
            return []
        state = self._reader.state(item.record)
        return [] if state is None else [functools.partial(states.update, *state)]

    def _prepare_workers(self) -> None:
        """Open more batches and supervise the workers; the next call raises an error, because this one has a batch."""
        try:
            if not self._dispatcher.top_up(len(self._ready) - 1):
                return
            if self._uses_threshold:
                self._update_threshold()
            if self._scaler is not None:
                self._scaler.update()
            self.arena.trim(self._dispatcher.num_open)
            if self.plan.restarts:
                self._pool.check_early()
        except Exception as error:
            self._pending_error = Postponed(error)

    def _snapshot(self) -> LoaderSnapshot:
        self._metrics.look(self._pool.usage)
        ahead = max(len(self._ready) - 1, 0)
        window, in_flight = self._window, self._dispatcher.num_open + ahead
        return LoaderSnapshot(
            self._state.active.count,
            in_flight,
            self._dispatcher.num_ready + ahead,
            window.most,
            round(in_flight * window.batch_bytes),
            window.budget_bytes,
        )

    def pinned(self, duration_ns: int) -> None:
        self.observers.pinned(duration_ns)

    def workers_ended(self, duration_ns: int) -> None:
        self.observers.workers_ended(duration_ns)

    def pin_slots(self, locker: MemoryPinner) -> None:
        self.arena.pin_slots(locker)

    @property
    def workers(self) -> list[Any]:
        """The worker processes that have been started, if workers are processes of this machine."""
        return [process for process in self._pool.processes if process.pid is not None]

    def running(self, least_ns: int) -> list[tuple[int, CurrentSample, int]]:
        """Worker, sample and time in ns of each sample that has run for at least ``least_ns``."""
        workers, now = range(len(self.meters)), now_ns()
        held = (
            (worker, sample) for worker in workers if (sample := self._current_work.sample(worker))
        )
        times = ((worker, sample, now - sample.started_ns) for worker, sample in held)
        return [each for each in times if each[2] >= least_ns]

    def _update_threshold(self) -> None:
        now = now_ns()
        if now < self._costs_due_ns:
            return
        # Not the clock, which goes on while other programs have the processor.
        began_ns = thread_time_ns()
        elapsed_s = (now - self._started_ns) / 1e9
        if self.slow_threshold.due(sum(meters.total.count for meters in self.meters), elapsed_s):
            times = merged(meters.total for meters in self.meters)
            leases = [self.ledger.lease(worker) for worker in range(len(self.meters))]
            running_ns = [now - lease.started_ns for lease in leases if lease.position is not None]
            self._history.decision = self.slow_threshold.observe(times, elapsed_s, running_ns)
            self.ledger.slow_ns = self._history.decision.threshold_ns
            self._history.costs = self.slow_threshold.recent
            if self._early_start is not None:
                self._early_start.follow(self.slow_threshold.recent.mean)
        self._costs_due_ns = now + max(
            _READ_COSTS_EVERY_NS, _READ_COSTS_SHARE * (thread_time_ns() - began_ns)
        )

    def _start(self) -> None:
        self._started = True
        try:
            upcoming = functools.partial(self._dispatcher.upcoming, 1)
            self._pool.start(upcoming if self.plan.starts_as_needed else None)
            if self._main_reader is not None:
                self._main_reader.start()
        except Exception as error:
            self.shut_down()
            if self._pickles_plan:
                spec = self.plan.spec
                pickling.advise(error)
                pickling.check_picklable("transforms", spec.transforms.steps)
                pickling.check_picklable("dataset", spec.dataset)
                pickling.check_picklable("cache", spec.cache)
                pickling.check_picklable("collate_fn", spec.collate_fn)
                pickling.check_picklable("worker_init_fn", spec.workers.init_fn)
                pickling.check_picklable("errors", self.plan.options.errors.on_error)
            raise

    def cancel(self) -> None:
        """Cancel all batches in flight."""
        self._dispatcher.cancel_all()


def _detach(hosted: list[weakref.ref[EpochReaders]]) -> None:
    """Keep what is known of the readers of the last epoch without the workers' memory."""
    for reference in hosted:
        if (readers := reference()) is not None:
            readers.detach()


def _copier(plan: Plan, arena: Arena, pin: Pin | None, tracer: Tracer) -> Copier | None:
    if pin is not None:
        return PinCopier(pin)
    device = plan.options.target
    return None if device is None else device_copier(device, arena, tracer=tracer)


def _shared_state(plan: Plan, history: History) -> SharedState:
    worker = plan.worker
    state = SharedState.create(
        num_workers=worker.most_workers + worker.reads_in_thread,
        records=_BATCH_RECORDS,
        positions=_num_positions(plan),
        num_steps=len(worker.pipeline.transforms),
        shared=worker.in_processes,
        num_readers=0 if worker.readers is None else worker.readers.number,
    )
    state.active.set_count(worker.most_workers)
    # Where a place that a skipped sample leaves is for another one, no batch may begin with places that are kept.
    fills = plan.leaves_places and not worker.order.keeps_places
    optimistic = history.may_travel is None and (fills or not worker.hands_over)
    if worker.pipeline.refetches:
        state.handover.settle(False)
    elif optimistic or not worker.in_processes or worker.readers is not None:
        state.handover.settle(True)
    elif history.may_travel is not None:
        state.handover.settle(history.may_travel)
    return state


def _num_positions(plan: Plan) -> int:
    return max(_POSITIONS, 1 << (4 * plan.largest_batch - 1).bit_length())


def _assignment(plan: Plan) -> Assignment:
    worker = plan.worker
    if worker.readers is not None:
        return Hosts(worker.readers.hosts, worker.most_workers, worker.readers.own.step)
    if not worker.round_robin:
        return Assignment()
    return RoundRobin(
        worker.most_workers,
        in_order=worker.order.in_order,
        capacity=cast(int, plan.batches),
        dataset_states=worker.dataset_states,
    )


def _window(plan: Plan) -> PrefetchWindow:
    worker = plan.worker
    reads = plan.first * worker.fetching.concurrency
    concurrent_batches = -(-reads // plan.largest_batch)
    if worker.begins_lists:
        concurrent_batches = plan.first * LEAST_LISTS
    if worker.offers_items:
        concurrent_batches = plan.first * _BATCHES_OFFERED
        # An item that is late by max_lag batches may turn out not to exist.
        if not worker.order.keeps_places:
            concurrent_batches = min(concurrent_batches, worker.order.max_lag // 2)
    # A window of more batches than the ledger holds would never be full: they would be opened one by one.
    most = min(_BATCH_RECORDS, _num_positions(plan) // plan.largest_batch)
    if not worker.order.keeps_places:
        # A sample gets a place in the batch max_lag after its own when that batch is opened. By then, its own batch
        # must have been returned: until then, the sample is not late.
        most = min(most, worker.order.max_lag)
    return PrefetchWindow(
        plan.first,
        fixed=plan.batches,
        budget_bytes=plan.budget_bytes,
        max_batches=most,
        concurrent_batches=concurrent_batches,
        slow_start=worker.fetching.slow_start,
        shares=plan.shares_budget,
    )
