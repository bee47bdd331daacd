"""The stages wired together, from indices to batches."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

from minato._core.clock import now_ns
from minato._core.codes import FAILED, STATES
from minato._support import pickling
from minato._support.exceptions import Postponed, not_the_end
from minato.batching.arena import Arena
from minato.batching.pinned_slots import MemoryPinner
from minato.batching.reader import BatchReader
from minato.batching.serialization import LocalStore, SharedStore
from minato.delivery.device import device_copier
from minato.delivery.pinning import Pin, PinCopier
from minato.delivery.prefetch import Copier, PrefetchReader
from minato.engine.cost_history import CostHistoryStore
from minato.engine.history import History
from minato.engine.metrics import EngineMetrics
from minato.engine.plan import Plan
from minato.engine.pools import make_pool
from minato.engine.shared_state import SharedState
from minato.engine.worker_context import WorkerContext
from minato.errors import ErrorBudgetError
from minato.observe.stats.costs import CostStats
from minato.observe.stats.epoch_log import EpochLog
from minato.observe.stats.histograms import merged
from minato.observe.stats.snapshot import LoaderSnapshot
from minato.observe.trace.loop import LoopTrack
from minato.observe.trace.tracer import NULL_TRACER, Tracer
from minato.sampling.dataset_state import DatasetStates
from minato.sampling.epoch import Epoch
from minato.scheduling.assignment import AnyWorker, Assignment, RoundRobin
from minato.scheduling.batches import BatchStorage, OpenBatch
from minato.scheduling.cost_model import EarlyStart
from minato.scheduling.dispatcher import Dispatcher, DispatcherSettings, Schedule
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.scheduling.slow_threshold import SlowThreshold
from minato.scheduling.wait_stats import ConsumerWait
from minato.workers.current_sample import CurrentSample, read_current_sample
from minato.workers.error_policy import FailureCount
from minato.workers.scaler import PolledPool, Scaler
from minato.workers.signals import exiting
from minato.workers.supervision import OomBackoff, RestartPolicy

__all__ = ["Engine"]

_READ_COSTS_EVERY_NS = 10_000_000
_READ_COSTS_SHARE = 500
"""Costs are read again after this time, and after this multiple of the time that the last reading took."""
_BATCH_RECORDS = 2048
_BATCH_RECORDS_IN_MAIN_PROCESS = 64
_POSITIONS = 1 << 16
"""Samples that can be in flight: 4 MiB of ledger, whose pages are touched as they are used."""


def _end(
    shut_down: Callable[[], bool], arena: Arena, afterwards: list[Callable[[], object]]
) -> None:
    try:
        if shut_down():
            arena.reclaim_unleased()
    finally:
        while afterwards and not exiting():
            afterwards.pop()()


class Engine:
    """The stages of one loader, wired together: workers, their shared memory, and the consumer's end of it.

    Args:
        arena: Holds the batches; that of an earlier engine has warm pages.
        history: What earlier engines have measured; this one adds to it.
        make_reader: Makes batches of full slots; by default tensors of this process.
        pin: Copies batches to pinned memory: ``next`` then returns :class:`Pinned`.

    Attributes:
        plan: What it does.
        arena: The same.
        ledger: Who works on which sample.
        meters: The measurements of each worker.
        slow_threshold: Decides which samples are slow.
        afterwards: Functions to call once the workers have ended, the last first, unless the interpreter exits.
        shut_down: Ends the workers; runs by itself when the engine is dropped or the interpreter exits.
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
        worker, pool, prefetch = plan.worker, plan.pool, plan.prefetch
        self.plan = plan
        self.arena = arena
        self._profiles: CostHistoryStore | None = None
        if plan.profile is not None:
            self._profiles = CostHistoryStore(plan.profile, worker.pipeline)
            if history.costs is None:
                history.costs = self._profiles.costs()
        state = SharedState.create(
            num_workers=worker.count,
            records=_BATCH_RECORDS_IN_MAIN_PROCESS if worker.in_main_process else _BATCH_RECORDS,
            positions=max(_POSITIONS, 1 << (4 * prefetch.largest_batch - 1).bit_length()),
            num_steps=len(worker.pipeline.transforms),
            shared=worker.in_processes,
        )
        self.ledger = state.ledger
        store = SharedStore(arena.segment) if worker.in_processes else LocalStore()
        context = WorkerContext(
            worker,
            state.layout,
            arena.segment,
            store,
            cost_estimate=history.cost_estimate if worker.in_main_process else None,
            policy=plan.failures.policy,
        )
        state.active.set_count(worker.count)
        self.meters = [state.meters(number) for number in range(worker.count)]
        self._profile = CostStats(worker.pipeline.transforms.names)
        window = _window(plan)
        settles = plan.failures.policy is not None and plan.failures.policy.on_error != "raise"
        restart_policy = RestartPolicy(
            pool.restarts, settles, OomBackoff(window) if worker.in_processes else None
        )
        wait_stats = ConsumerWait()
        self._pool = make_pool(plan, context, state, restart_policy, wait_stats)
        reader = (make_reader or BatchReader)(self.ledger, arena, store)
        self._observers: list[EpochLog | LoopTrack] = []
        if history.epoch_log is not None:
            self._observers.append(history.epoch_log)
        tracer: Tracer = NULL_TRACER
        if worker.tracks is not None:
            tracer = track = worker.tracks.loop()
            self._observers.append(LoopTrack(track))
        self._ahead = prefetch.to_device
        copier: Copier | None = None
        if pin is not None:
            copier, self._ahead = PinCopier(pin), 1
        elif prefetch.device is not None:
            copier = device_copier(prefetch.device, arena, tracer=tracer)
        self._prefetcher = None if copier is None else PrefetchReader(reader, self.ledger, copier)
        self._reader = self._prefetcher or reader
        self._history = history
        self._early_start: EarlyStart | None = None
        if worker.starts_early:
            self._early_start = EarlyStart(
                ledger=self.ledger, costs=history.cost_model, num_workers=pool.first
            )
            if history.costs is not None:
                self._early_start.mean_ns = history.costs.mean
        self._scaler: Scaler | None = None
        if history.autoscale is not None and not worker.in_main_process:
            wait_stats.watched, times = True, [meters.total for meters in self.meters]
            self._scaler = Scaler(
                history.autoscale,
                worker.count,
                self._pool,
                state.active,
                window,
                wait_stats,
                self.ledger,
                times,
                None if self._early_start is None else self._early_start.resize,
            )
        assignment: Assignment = AnyWorker()
        if worker.round_robin:
            assignment = RoundRobin(
                worker.count,
                worker.order.in_order,
                cast(int, prefetch.batches),
                worker.dataset_states,
                self._reader.state,
            )
        self._dispatcher = Dispatcher(
            self.ledger,
            ready_events=state.ready,
            pool=self._pool if self._scaler is None else PolledPool(self._pool, self._scaler),
            storage=BatchStorage(arena, store, self._reader.discard),
            schedule=Schedule(window, worker.order, assignment, self._early_start),
            settings=DispatcherSettings(
                timeout_s=plan.timeout_s,
                one_epoch=not worker.in_main_process and not pool.persistent,
                skips=plan.failures.policy is not None,
                drop_short=worker.pipeline.drop_last,
                trace_wait_as="load" if worker.in_main_process else "wait",
            ),
            wait_stats=wait_stats,
            tracer=tracer,
        )
        self._current_sample = functools.partial(
            read_current_sample,
            self.ledger,
            functools.partial(context.read_indices, self.ledger),
            worker.pipeline.transforms.names,
        )
        self._failures: FailureCount | None = None
        if plan.failures.policy is not None:
            failures = plan.failures
            self._failures = FailureCount(plan.failures.policy.log, failures.budget, failures.log)
        self._pending_error: Postponed | None = None
        self._taken: tuple[OpenBatch, int, Any] | None = None
        """A batch that was read, its bytes and itself, until ``next`` returns it."""
        self._started = False
        self._started_ns = now_ns()
        self.slow_threshold = SlowThreshold(plan.slow, history.costs)
        history.decision = self.slow_threshold.decision
        self.ledger.slow_ns = history.decision.threshold_ns
        self._costs_due_ns = self._started_ns + _READ_COSTS_EVERY_NS
        self._metrics = EngineMetrics(
            self.ledger,
            self.meters,
            self._profile,
            window,
            wait_stats,
            state.active,
            self.slow_threshold,
            restart_policy,
            self._failures,
        )
        self._uses_threshold = (
            self._early_start is not None or worker.order.slow_to_newest or worker.defers
        )
        self._sends_plan = worker.in_processes and pool.context.get_start_method() != "fork"
        if self._sends_plan:
            context.write_plan(arena)
        self.afterwards: list[Callable[[], object]] = []
        if prefetch.shares_budget:
            self.afterwards.append(window.release_budget)
        if worker.dataset_states is not None:
            self.afterwards.append(worker.dataset_states.keep_present)
        if history.epoch_log is not None:
            self.afterwards.append(functools.partial(history.epoch_log.settle, self._metrics))
        self.shut_down = weakref.finalize(self, _end, self._pool.shut_down, arena, self.afterwards)

    def begin(self, epoch: Epoch, batches: Iterator[Any]) -> bool:
        """Start an epoch and, with the first one, the workers.

        Args:
            batches: The indices of each batch, as ``epoch.batches`` yields them.

        Returns:
            False if batches had been prefetched for this epoch and were not its own; they are dropped.
        """
        self._pending_error = None  # of an epoch that was abandoned
        if self._taken is not None:
            self._dispatcher.returned(self._taken[0])
            self._taken = None
        self._history.engine = weakref.ref(self)
        for observer in self._observers:
            observer.begin(epoch.number, epoch.progress, self._metrics)
        if self._failures is not None:
            self._failures.begin(epoch.size())
        predicted = self._dispatcher.begin(
            batches,
            epoch=epoch.number,
            seed=epoch.seed,
            predict_next=epoch.predict_next,
            progress=epoch.progress,
        )
        if self._scaler is not None:
            self._scaler.restart()
        if not self.plan.worker.in_main_process:
            self._dispatcher.refill()
        if not self._started:
            self._start()
        for observer in self._observers:
            observer.started()
        return predicted

    def next(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: The epoch is over.
            Exception: Of the batch's samples; the next call goes on.
        """
        for observer in self._observers:
            observer.enter()
        if self._taken is None:
            item = self._find()
            flags, *_, used_bytes = self.ledger.contents(item.record)
            try:
                if self.plan.worker.dataset_states is not None and flags & (STATES | FAILED):
                    self._note_state(self.plan.worker.dataset_states, item.record)
                try:
                    batch = self._reader.read(item.record, item.slot)
                except StopIteration as stop:
                    raise not_the_end("what the batch is made of", stop) from stop
            except BaseException:
                self._dispatcher.read(item, used_bytes)
                try:
                    self._prepare(item)
                finally:
                    self._returned(item, used_bytes)
                raise
            self._dispatcher.read(item, used_bytes)
            self._taken = item, used_bytes, batch
            # User functions may be interrupted in here: then the next call returns the batch.
            self._prepare(item)
        item, used_bytes, batch = self._taken
        self._taken = None
        self._returned(item, used_bytes)
        return batch

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
                self.plan.worker.dataset_states.present = (
                    None  # the next epoch begins with the dataset as it is then
                )
            if self._failures is not None:
                self._failures.end()
            if self._profiles is not None:
                self._profiles.keep(self.profile(), self.slow_threshold.recent)
            for observer in self._observers:
                observer.finish()
            raise
        if self._failures is not None:
            self._failures.finished += len(item.indices)
        return item

    def _prepare(self, item: OpenBatch) -> None:
        """Start the work of later calls before this one returns a batch."""
        self._prepare_workers(item)
        if self._prefetcher is not None:
            self._prefetcher.prefetch(self._dispatcher.upcoming(self._ahead))
        self.arena.trim(self._dispatcher.num_open)

    def _returned(self, item: OpenBatch, used_bytes: int) -> None:
        """Record that ``next`` returns a batch, or raises its error."""
        self._dispatcher.returned(item)
        if self._observers:
            samples = item.indices[0] if self.plan.worker.pipeline.streams else len(item.indices)
            for observer in self._observers:
                observer.leave(samples, used_bytes, self._snapshot)

    def _prepare_workers(self, item: OpenBatch) -> None:
        """Give the workers their next work; an error is raised by the next call, because this one has a batch."""
        try:
            if self._uses_threshold:
                self._update_threshold()
            if self._scaler is not None:
                self._scaler.look()
            if not self.plan.worker.in_main_process:
                self._dispatcher.top_up()
            if self.plan.pool.restarts:
                self._pool.check_early()
            if self._early_start is not None:
                self._early_start.learn(item.record)
        except Exception as error:
            self._pending_error = Postponed(error)

    def _snapshot(self) -> LoaderSnapshot:
        self._metrics.look(self._pool.usage)
        return self._metrics.snapshot(self._dispatcher.num_open, self._dispatcher.num_ready)

    def pinned(self, duration_ns: int) -> None:
        """Record how long it took to pin the batch that ``next`` returned."""
        for observer in self._observers:
            observer.pinned(duration_ns)

    def pin_slots(self, locker: MemoryPinner) -> None:
        """Keep the memory of batches in place, for a device that reads from there."""
        self.arena.pin_slots(locker)

    def _note_state(self, dataset_states: DatasetStates, record: int) -> None:
        if (state := self._reader.state(record)) is not None:
            dataset_states.update(*state)

    @property
    def workers(self) -> list[Any]:
        """The worker processes, if workers are processes of this machine."""
        return list(self._pool.processes)

    def profile(self) -> CostStats:
        """Costs of the samples so far, and since the last call."""
        self._profile.update(self.meters)
        return self._profile

    def running(self, least_ns: int) -> list[tuple[int, CurrentSample, int]]:
        """Worker, sample and time in ns of each sample that has run for at least ``least_ns``."""
        if self.plan.worker.pipeline.streams:
            return []
        workers, now = range(len(self.meters)), now_ns()
        held = ((worker, sample) for worker in workers if (sample := self._current_sample(worker)))
        times = ((worker, sample, now - sample.started_ns) for worker, sample in held)
        return [each for each in times if each[2] >= least_ns]

    def _update_threshold(self) -> None:
        """Set from which cost on a sample is slow, when enough samples have run since the last time."""
        now = now_ns()
        if now < self._costs_due_ns:
            return
        elapsed_s = (now - self._started_ns) / 1e9
        if self.slow_threshold.due(sum(meters.total.count for meters in self.meters), elapsed_s):
            times = merged(meters.total for meters in self.meters)
            running_ns = [now - begun_ns for begun_ns in self.ledger.begun()]
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
            if self._sends_plan:
                worker = self.plan.worker
                pickling.advise(error)
                pickling.check_picklable("transforms", worker.pipeline.transforms.steps)
                pickling.check_picklable("dataset", worker.pipeline.dataset)
                pickling.check_picklable("collate_fn", worker.pipeline.collate_fn)
                pickling.check_picklable("worker_init_fn", worker.init_fn)
            raise

    def reset(self) -> None:
        """Drop an epoch that is over and the worker in the main process; ``begin`` may follow."""
        self._dispatcher.abandon()
        self._started = False

    def cancel(self) -> None:
        """Abandon what is in flight."""
        self._dispatcher.cancel_all()


def _window(plan: Plan) -> PrefetchWindow:
    """How many batches may be open."""
    worker, prefetch = plan.worker, plan.prefetch
    reads = plan.pool.first * worker.fetching.concurrency
    return PrefetchWindow(
        plan.pool.first,
        fixed=prefetch.batches,
        budget_bytes=prefetch.budget_bytes,
        # A sample gets a place in the batch max_lag after its own when that batch is opened. By then, its own batch
        # must have been returned: until then, the sample is not late.
        max_batches=None if worker.order.keeps_places else worker.order.max_lag,
        concurrent_batches=-(-reads // prefetch.largest_batch),
        slow_start=worker.fetching.slow_start,
        shares=prefetch.shares_budget,
    )
