"""``num_workers=0``: ``next()`` runs the samples of a batch and builds it, without workers, ledger and queue."""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import methodcaller
from typing import Any

import numpy as np

from minato._compat import is_profiling
from minato._core import Lease, now_ns
from minato._core.codes import Activity
from minato._support.items import ERRORS, item_of, name_of
from minato._support.threads import if_alive
from minato.batching.arena import Arena, MemoryPinner
from minato.batching.blobs import Kinds, SampleError, noted
from minato.batching.collate import BatchBuilder
from minato.batching.serialization import listed
from minato.delivery.device import device_copier
from minato.delivery.iterator import BatchSource
from minato.engine.history import History, cost_history, end_engine, save_costs
from minato.engine.metrics import EngineMetrics
from minato.engine.plan import Plan, base_seed_of
from minato.errors import SKIP, ErrorBudgetError, is_skip, not_the_end
from minato.observe.meters import CostStats, Meters
from minato.observe.observers import LoaderSnapshot, Observer, Observers
from minato.observe.trace import LoopTrack
from minato.observe.tracer import NULL_TRACER, Tracer, in_profile
from minato.sampling.epoch import Epoch
from minato.sampling.progress import Outgoing, Progress
from minato.sampling.readers import EpochReaders
from minato.sampling.resume import DatasetStates
from minato.sampling.samplers import LISTS, Drawn, IndexBatches, Recurring
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import SampleRandomness
from minato.workers.error_policy import FailureCount, SampleRetry
from minato.workers.fetch import LEAST_BOUND, LEAST_ROWS, Fetcher, fetcher_of
from minato.workers.plan import WorkerPlan
from minato.workers.reading import Host
from minato.workers.reads import InFlight, Read, reads_of
from minato.workers.runner import WORTH_BINDING_NS, Runner, StageRunner, of_copies
from minato.workers.shared_state import CurrentSample, SharedReadLimit

_ANYTHING: Kinds = (BaseException,)
"""The second KeyboardInterrupt in the same batch is the error of the sample."""
_PATIENCE_S = 1.0  # the longest wait for a read between two checks that its process owns it


class _Batch(Outgoing):
    """The batch that ``next()`` makes, from its first try until the training loop has it.

    Attributes:
        given: Its indices, in the sampler's container.
        occurrences: How often each of them came before in the epoch; None: none did.
        size: Number of its samples, at least 1.
        missing: Number of items that do not exist, because their reader has ended.
        samples: Those of the items before the last error, whatever interrupts the rest.
        is_empty: Whether it is known to have no samples to return.
    """

    is_made = is_empty = is_prepared = False
    began_ns = num_slow = missing = 0
    skipped: Sequence[int] = ()
    occurrences: Sequence[int] | None = None
    samples: Sequence[Any] = ()

    def __init__(self, drawn: Drawn, first: int) -> None:
        given = drawn.indices
        if type(given) is Recurring:
            given, self.occurrences = given.indices, given.occurrences
        self.drawn, self.given, self.first = drawn, given, first
        self.size = len(given) or 1


class _Current:
    """What the runner asks for; it must not refer to the engine.

    Attributes:
        kinds: What is taken for the error of a sample; the rest leaves ``next()``, and the next call runs it again.
    """

    def __init__(self) -> None:
        self.kinds: Kinds = ERRORS
        self.batch: _Batch | None = None

    def occurrences(self, position: int, count: int) -> list[int] | None:
        """How often the index of each of ``count`` samples of the batch came before in the epoch; None: none did."""
        batch = self.batch
        if batch is None or batch.occurrences is None:
            return None
        k = position - batch.first
        return list(batch.occurrences[k : k + count])


class _Activity:
    """The time that the training loop has spent on samples, of which the last ones were made at ``until_ns``."""

    def __init__(self) -> None:
        self.samples = self.busy_ns = self.until_ns = self._since_ns = 0

    def resume(self) -> None:
        """Begin an epoch: the time since the last one does not count."""
        now = now_ns()
        self._since_ns, self.until_ns = self._since_ns + now - self.until_ns, now

    def activity(self, worker: int) -> Activity:
        """As that of a worker; another thread may ask between two of these numbers."""
        idle_ns = self.until_ns - self._since_ns - self.busy_ns
        return Activity(self.samples, self.busy_ns, max(idle_ns, 0))


class InlineEngine(BatchSource):
    """Runs the samples of one loader in the thread that calls ``next()``, batch by batch, in the sampler's order.

    Args:
        history: Measurements of earlier engines, to which this one adds its own.
        keep: Keeps the engine for the next iterator, when the epoch of this one is over; False: it ends.

    Attributes:
        afterwards: Functions to call when the engine ends, the last one first, unless the interpreter exits.
    """

    _epoch: Epoch  # since ``begin``, as the following
    _fetcher: Fetcher
    _runner: Runner
    _host: Host | None  # of the readers of an iterable dataset
    _single: Fetcher | None  # loads samples one by one
    _load_quickly: Callable[[InlineEngine], _Batch | None] | None  # not bound: that is a cycle
    _takes_rows: bool
    _is_entered: bool
    _thread: int  # the one that it was last in

    def __init__(
        self,
        plan: Plan,
        arena: Arena,
        history: History,
        keep: Callable[[InlineEngine], bool] = lambda engine: False,
    ) -> None:
        worker = plan.worker
        pipeline = worker.pipeline
        self.plan = plan
        self.arena = arena
        self._history = history
        self._cost_history = cost_history(plan, history)
        track = None if plan.tracks is None else plan.tracks.loop()
        self._tracer: Tracer = NULL_TRACER if track is None else track
        own: list[Observer] = [] if track is None else [LoopTrack(track)]
        self.observers = Observers(history.observers, own)
        self._builder = BatchBuilder(arena, pipeline.collate())
        device = plan.options.target
        self._copier = None if device is None else device_copier(device, arena, tracer=self._tracer)
        self._failures = plan.failure_count()
        self._meters = Meters(len(pipeline.transforms))
        self._costs = CostStats(pipeline.transforms.names)
        self._activity = _Activity()
        self._lease = Lease()
        self.slow_threshold = plan.slow_threshold(history.costs)
        history.decision = self.slow_threshold.decision
        self._slow_ns = history.decision.threshold_ns
        self._has_threshold = self._slow_ns > 0
        self._metrics = EngineMetrics(
            activity=self._activity.activity,
            meters=[self._meters],
            costs=self._costs,
            slow_threshold=self.slow_threshold,
            failures=self._failures,
            device_times=arena.device_times,
        )
        self._progress: Progress | None = None
        self._batches = IndexBatches.of(())
        self._batch: _Batch | None = None
        self._position = 0  # of the first sample of the next batch
        self._tried: Drawn | None = None  # the batch that an interruption has left
        self._is_started = False
        self._kind: tuple[bool, bool] | None = None
        self._retry: SampleRetry | None = None
        self._flight: InFlight | None = None
        self._keep = keep
        self._current = _Current()
        self._is_over = False
        self._drops_short = pipeline.drop_last and pipeline.batched
        self._is_plain = False  # the dataset's iterator is all there is
        self._is_single = False  # one reader reads
        self._has_ended = False  # the only reader has
        self._runs_items = pipeline.streams and len(pipeline.transforms) > 0
        self._states: DatasetStates | None = None
        # The first is that of the readers, whose epoch is not known yet.
        self.afterwards: list[Callable[[], object]] = [_nothing_to_end]
        self.afterwards.append(self.observers.ending(self._metrics))
        self._end = functools.partial(end_engine, _nothing_to_end, arena, self.afterwards)
        self._finalizer = weakref.finalize(self, self._end)

    def begin(self, epoch: Epoch, batches: IndexBatches) -> bool:
        epoch.progress.come_in_order()
        self.observers.begin(epoch.number, epoch.progress, self._metrics)
        if self._failures is not None:
            self._failures.begin(epoch.number, epoch.size())
        self._batch = self._tried = None
        self._position = 0
        self._is_entered = False  # the runner's randomness has this epoch's seed
        self._load_quickly = None
        self._number = epoch.number
        self._epoch, self._progress, self._batches = epoch, epoch.progress, batches
        self._history.begin(self)
        self._is_over = False
        self._states = states = epoch.dataset_states
        if not self._is_started:
            if states is not self.plan.worker.dataset_states:
                worker = self.plan.worker._replace(dataset_states=states)
                self.plan = dataclasses.replace(self.plan, worker=worker)
            self._start(epoch)
            self._is_started = True
        self.observers.started()
        return True

    def _start(self, epoch: Epoch) -> None:
        """Make what loads the samples of an iterator; that over an iterable dataset begins here, as with torch."""
        plan = self.plan.worker
        plan.restore_dataset(0)
        if epoch.readers is None or self._kind is None:  # the runner has the items of readers
            self._fetcher = fetcher_of(plan)
        fetcher = self._fetcher
        self._single = self._host = None
        if epoch.readers is not None:
            self._host = self._host_readers(epoch, epoch.readers)
        if self._states is not None:
            # It is asked when a program wants the state; not by a finalizer, which may run while the dataset is in use.
            self._states.present = fetcher.state
        self._takes_rows = fetcher.has_rows and not self._builder.collates
        self._enter_thread()
        if self._retry is None and self._flight is None and self._host is None:
            self._single = None if fetcher.takes_lists else fetcher
        self._activity.resume()

    def _enter_thread(self) -> None:
        """Go on in this thread: the main one binds generators, and others, whose draws it would undo, do not."""
        fetcher = self._fetcher
        # The program may have given the dataset other methods.
        kind = threading.current_thread() is threading.main_thread(), fetcher.takes_lists
        if kind != self._kind:
            self._make_runner(fetcher)
            self._kind, self._is_entered, self._load_quickly = kind, False, None
        if self._failures is not None:
            policy, transforms = self.plan.policy, self.plan.worker.pipeline.transforms
            assert policy is not None
            name = None if self._host is None else item_of
            self._retry = SampleRetry(0, policy, transforms, self._runner, fetcher, name)
        self._thread = threading.get_ident()

    def _host_readers(self, epoch: Epoch, readers: EpochReaders) -> Host:
        worker = self.plan.worker
        assert worker.readers is not None
        plan = worker.readers._replace(starts=readers.starts())
        seed = base_seed_of(self.plan.options, epoch)
        worker = worker._replace(readers=plan, base_seed=seed)
        readers.begin(0)
        self._is_single = plan.number == 1
        self._has_ended = self._is_single and readers.board.end(0) is not None
        self._is_plain = not (plan.announces or self._runs_items or self._failures is not None)
        host = Host(worker, 0, readers.board)
        host.catches = self._current.kinds
        try:
            host.make_readers()
            host.initialise()
            if not plan.announces:
                host.begin(0, 0, epoch.number)
        except BaseException:
            host.be_program()
            raise
        # Not weakly: a collection that finds the engine and the host would take the states with it.
        readers.state_of = host.present
        # A collection clears references before it calls finalizers; in Python 3.14 only those that have a callback.
        part = weakref.ref(self._current, lambda _: None)
        self.afterwards[0] = if_alive(_detach, readers, weakref.ref(host), part)
        return host

    def _make_runner(self, fetcher: Fetcher) -> None:
        plan = self.plan.worker
        pipeline = plan.pipeline
        self._sample_tracer = tracer = plan.tracer(0)
        stage_runner: StageRunner | None = None
        has_stages = len(pipeline.transforms) > 0 or not pipeline.streams
        if has_stages and not (pipeline.refetches or fetcher.takes_lists):
            stage_runner = StageRunner(
                fetcher.dataset,
                pipeline.transforms,
                lease=self._lease,
                meters=self._meters,
                tracer=tracer,
            )
        randomness = functools.partial(_randomness, plan, self._history)
        self._runner = Runner(
            plan,
            lease=self._lease,
            meters=self._meters,
            make_randomness=randomness if plan.seeds_samples else None,
            stage_runner=stage_runner,
            cost_estimate=self._history.cost_estimate,
            occurrences=self._current.occurrences,
            tracer=tracer,
        )
        self._runner.catches = self._current.kinds
        if plan.fetching.at_once:
            self._runner.may_repeat = False  # a sample costs far more than binding it does
            if self._flight is None:  # else the epoch before ran in another thread
                self._flight = flight = _reads_in_flight(plan)
                self.afterwards.append(if_alive(methodcaller("close"), flight.reads))

    def next(self) -> Outgoing:
        batch = self._batch
        if batch is not None and batch.is_given:
            if self._progress is not None:
                self._progress.settle()
            self._position = batch.first + batch.size
            self._batch = batch = None
        if threading.get_ident() != self._thread:
            self._enter_thread()
        self.observers.enter()
        try:
            if batch is None and self._load_quickly is not None:
                batch = self._load_quickly(self)
            if batch is None or not batch.is_made:
                batch = self._load()
            if not batch.is_prepared:
                self._prepare(batch)
        except StopIteration:
            raise
        except BaseException:
            self._runner.be_program()
            if self._host is not None:
                self._host.be_program()
            if (known := self._batch) is None or not known.is_prepared:  # else it has left
                self.observers.fail()
            raise
        return batch

    def _load(self) -> _Batch:
        if self._failures is not None:
            self._check_failures(self._failures)
        while True:
            drawn = None if self._has_ended else self._batches.first()
            if drawn is None:
                self._finish()
                raise StopIteration
            if not self._is_entered:
                self._enter()
                quick = None if self._load_quickly is None else self._load_quickly(self)
                if quick is not None:
                    return quick
            batch = self._batch
            if batch is None or batch.drawn is not drawn:
                self._batch = batch = _Batch(drawn, self._position)
            if not batch.is_empty:
                self._make(batch)
                if batch.missing and self._is_single:
                    self._has_ended = True
                if batch.is_made:
                    return batch
            self._drop(batch)

    def _enter(self) -> None:
        """Begin to load, with the first batch of the epoch."""
        runner = self._runner
        runner.enter(self._epoch.seed, looks=True)
        if not self._tracer.enabled:
            if self._single is not None:
                self._load_quickly = InlineEngine._load_samples
            elif self._is_plain and runner.is_plain and not self._draws_collating():
                self._load_quickly = InlineEngine._load_items
        self._is_entered = True

    # The next ones are long: calls of shorter ones would take as long as all that they do.

    def _load_samples(self) -> _Batch | None:
        """Load a batch of cheap samples, of which it is known whether they draw; None: ``_load`` must do so."""
        drawn, runner, builder = self._batches.first(), self._runner, self._builder
        if drawn is None or (fetcher := self._single) is None:
            return None
        self._batch = batch = _Batch(drawn, self._position)
        indices, count = batch.given, batch.size
        randomness, draws = runner.randomness, runner.cost_estimate.draws
        if (
            not runner.may_run_quickly(count, builder.draws)
            or not len(indices)
            or (draws and batch.occurrences is not None)
            or (self._takes_rows and count >= LEAST_ROWS)
            or self._current.kinds is not ERRORS
            or is_profiling()
        ):
            return None
        if type(indices) is not list:
            indices = list(indices)
        self._tried, began_ns = drawn, now_ns()
        fetch = of_copies(fetcher.one if count < LEAST_BOUND else fetcher.now(count), indices[0])
        bind = restore = None
        if randomness is not None:
            if draws:
                bind, restore = randomness.bind, randomness.kept()
            else:
                randomness.mark()
        try:
            samples, error = runner.run_quickly(batch.first, self._number, indices, fetch, bind)
        finally:
            if restore is not None:
                restore()
        made = None
        if error is None:
            made, error = self._built(batch, samples)
        else:
            error = _error_of(error, indices[len(samples)])
        if randomness is not None and not draws and randomness.drawn():
            runner.undo_draws(randomness)
            self._tried = None
            return None
        if 0 < self._slow_ns < runner.longest_ns:
            self._count_slow(batch, len(samples))
        self._finish_quickly(batch, made, error, began_ns)
        return batch

    def _load_items(self) -> _Batch | None:
        """Load a whole batch of items of the only reader; None: ``_load`` must do so, and finds what was read."""
        host, drawn = self._host, None if self._has_ended else self._batches.first()
        if drawn is None or host is None:
            return None
        self._batch = batch = _Batch(drawn, self._position)
        if self._current.kinds is not ERRORS or is_profiling():
            return None
        keys = drawn.indices
        self._tried, began_ns = drawn, now_ns()
        self._lease.begin(batch.first, began_ns)
        try:
            items = host.take_next(keys)
        except ERRORS:
            items = []
        if len(items) < len(keys):
            self._tried = None
            return None
        self._runner.record_call(items, keys, self._number, now_ns() - began_ns)
        made, error = self._built(batch, items)
        self._finish_quickly(batch, made, error, began_ns)
        return batch

    def _built(self, batch: _Batch, samples: list[object]) -> tuple[Any, BaseException | None]:
        """What samples make that are neither skipped nor traced, or the error of ``collate_fn``."""
        builder, made = self._builder, None
        try:
            if not builder.collates:
                made = builder.pack(samples)
            return builder.collate(samples) if made is None else made, None
        except ERRORS as raised:
            return None, self._collate_error(batch, samples, raised)

    def _finish_quickly(
        self, batch: _Batch, made: object, error: BaseException | None, began_ns: int
    ) -> None:
        """What follows in ``_make`` and ``_prepare``, without what such batches never have."""
        activity, runner, count, now = self._activity, self._runner, batch.size, now_ns()
        activity.until_ns = now
        activity.samples += count
        activity.busy_ns += now - began_ns
        self._lease.enter(-1, now)
        if runner.longest_ns > WORTH_BINDING_NS:
            runner.observe((now - began_ns) / count)
        if self._has_threshold:
            self._update_threshold()
        if self._copier is None:
            batch.batch, batch.error, batch.is_made = made, error, True
        else:
            self._give(batch, made, error)
        self._tried = None
        if self._progress is not None:
            positions = range(batch.first, batch.first + count)
            batch.records = (self._progress.returns(positions, 0, batch.num_slow),)
            self._progress.last = batch
        self._batches.drop(batch.drawn)
        if self._host is not None:
            self._host.release()
        self.observers.leave(count, self._builder.nbytes, self._snapshot)
        if self.arena.num_slots:
            self.arena.trim(1)
        batch.is_prepared = True

    def _check_failures(self, failures: FailureCount) -> None:
        try:
            failures.check()
        except ErrorBudgetError:
            self._batches, self._progress = IndexBatches.of(()), None
            raise

    def _drop(self, batch: _Batch) -> None:
        """Leave out a batch all of whose samples were skipped."""
        batch.is_empty = True
        if self._progress is not None:
            kept = batch.size - batch.missing
            self._progress.skipped(list(range(batch.first, batch.first + kept)), 0)
            self._progress.drop(range(batch.first + kept, batch.first + batch.size), 0)
        self._position = batch.first + batch.size
        self._batches.drop(batch.drawn)

    def _finish(self) -> None:
        if self._progress is not None:
            if self._has_ended:
                self._progress.drop_rest(self._position)
            self._progress.finish()
        if self._epoch.readers is not None:
            self._epoch.readers.state_of = lambda reader, ordinal: None
            self.afterwards[0] = _nothing_to_end
        try:
            if self._failures is not None:
                self._failures.end(self._progress)
            if self._cost_history is not None:
                save_costs(
                    self._cost_history, self._costs, [self._meters], self.slow_threshold.recent
                )
        finally:
            self.observers.finish()
        self._is_over = True

    def _make(self, batch: _Batch) -> None:
        """Make a batch, or its error, unless it has no samples."""
        current, runner = self._current, self._runner
        current.batch = batch
        if self._tried is not None or current.kinds is not ERRORS:
            current.kinds = _ANYTHING if self._tried is batch.drawn else ERRORS
            runner.catches = current.kinds
            if self._host is not None:
                self._host.catches = current.kinds
        self._tried = batch.drawn
        batch.began_ns = began_ns = now_ns()
        if is_profiling():
            with in_profile("minato: load samples"):
                self._run(batch)
        else:
            self._run(batch)
        runner.be_program()  # an interruption may be the error of the batch
        self._tried = None
        activity, size = self._activity, batch.size
        activity.until_ns = now = now_ns()
        busy_ns = now - began_ns
        self._lease.enter(-1, now)
        activity.samples += size
        activity.busy_ns += busy_ns
        runner.observe(busy_ns / size)
        if self._has_threshold:
            self._update_threshold()
        if self._tracer.enabled:
            self._tracer.slice("load", began_ns)
            self._sample_tracer.flush()

    def _update_threshold(self) -> None:
        threshold, total = self.slow_threshold, self._meters.total
        if threshold.due(total.count):
            self._history.decision = decision = threshold.observe(total)
            self._history.costs = threshold.recent
            self._slow_ns = decision.threshold_ns

    def _run(self, batch: _Batch) -> None:
        fetcher = self._fetcher
        error: BaseException | None
        index: object = batch.given
        if self._host is not None:
            self._run_items(self._host, batch)
            return
        if self._flight is not None and len(batch.given):
            indices = list(batch.given)
            samples, error = self._run_reads(self._flight, batch, indices)
            if error is not None:
                index = indices[len(samples)]
        elif self._takes_rows and (rows := self._rows(fetcher, batch)) is not None:
            self._give(batch, rows)
            return
        elif fetcher.takes_lists or not len(batch.given):
            samples, error = self._run_list(fetcher, batch)
        else:
            indices = batch.given if type(batch.given) is list else list(batch.given)
            samples, error = self._run_retrying(fetcher, batch, indices)
            if error is not None:
                index = indices[len(samples)]
        if error is not None:
            self._give(batch, None, _error_of(error, index))
            return
        self._build(batch, samples)

    def _count_slow(self, batch: _Batch, count: int) -> None:
        batch.num_slow += sum(cost > self._slow_ns for cost in self._runner.durations[:count])

    def _run_reads(
        self, flight: InFlight, batch: _Batch, indices: list[object]
    ) -> tuple[list[Any], BaseException | None]:
        """Read all samples of a batch at once, and run their transforms one after the other, until one raises."""
        runner, plan, first = self._runner, self.plan.worker, batch.first
        seed = self._epoch.seed if plan.seeds_samples else None
        flight.forget()  # what an interrupted call has begun
        occurrences = batch.occurrences or [0] * len(indices)
        for k, (index, occurrence) in enumerate(zip(indices, occurrences, strict=True)):
            flight.add(Read(index, self._number, seed, k, occurrence=occurrence), first + k)
        complete: dict[int, Read] = {}
        while flight.positions:
            flight.begin()
            oldest, position = next(iter(flight.positions.items()))
            self._lease.begin(position, oldest.started_ns or now_ns())
            straggling_s = flight.hedge()
            read = flight.reads.finished()
            if read is None:
                flight.reads.wait(_PATIENCE_S if straggling_s is None else straggling_s)
            elif flight.take(read) is not None:
                complete[read.tag] = read
        transform, again = plan.pipeline.transforms.run, self._fetcher.single
        samples: list[Any] = []
        for k, index in enumerate(indices):
            read = complete[k]
            if self._sample_tracer.enabled:
                ended_ns = read.started_ns + read.duration_ns
                self._sample_tracer.span("read", read.started_ns, ended_ns, {"index": index})
            runner.ahead_ns = read.duration_ns
            fetch = functools.partial(runner.transformed, read, transform, again)
            found, error = runner.run(first + k, self._number, [index], fetch)
            if error is not None and self._retry is not None:
                found, error = self._retry.settle(first + k, self._number, index, error)
            if error is not None:
                return samples, error
            samples += found
            if 0 < self._slow_ns < runner.longest_ns:
                self._count_slow(batch, 1)
        return samples, None

    def _run_retrying(
        self, fetcher: Fetcher, batch: _Batch, indices: list[object], k: int = 0
    ) -> tuple[Any, BaseException | None]:
        """Run samples k, k+1, … until one raises for good; SKIP stands for those that are skipped."""
        position = batch.first + k
        if self._retry is None:
            return self._run_singly(fetcher, position, indices)
        run = functools.partial(self._run_singly, fetcher)
        return self._retry.run(position, self._number, indices, run)

    def _run_singly(
        self, fetcher: Fetcher, position: int, indices: list[object]
    ) -> tuple[list[Any], BaseException | None]:
        runner = self._runner
        number = self._number
        if fetcher.takes_lists:
            return runner.run(position, number, indices, fetcher.single)
        found = runner.run_steps(position, number, indices, fetcher.now(len(indices)), 0)
        if 0 < self._slow_ns < runner.longest_ns and self._batch is not None:
            self._count_slow(self._batch, len(found[0]))
        return found

    def _run_list(self, fetcher: Fetcher, batch: _Batch) -> tuple[Any, BaseException | None]:
        """Run a whole or an empty batch by one call of the dataset, which may return any object."""
        given, runner = batch.given, self._runner
        fetch = fetcher.many if fetcher.takes_lists else list
        results, error = runner.run(
            batch.first, self._number, [given], fetch, batch_size=batch.size
        )
        # What another container than a list says of its indices would be missing in calls for single ones.
        divisible = type(given) in LISTS and len(given) > 0
        if isinstance(error, Exception) and self._retry is not None and divisible:
            return self._run_retrying(fetcher, batch, list(given))
        return results[0] if results else None, error

    def _run_items(self, host: Host, batch: _Batch) -> None:
        """Have a reader give items, run their transforms, and build their batch."""
        keys, runner = batch.given, self._runner
        if self._is_plain and runner.is_plain:
            taken, error = runner.run_quickly(
                batch.first, self._number, [keys], host.take_next, None
            )
            items = taken[0] if error is None else host.taken
            if error is not None and len(items) == len(keys):
                raise error  # a second interruption: no item has raised it
            self._build_items(batch, items, error)
            return
        with nullcontext() if host.binds else host.turn(keys[0], 0, self._number):
            self._build_items(batch, *self._items(host, batch))

    def _build_items(self, batch: _Batch, samples: list[Any], error: BaseException | None) -> None:
        """Build a batch of the samples of a reader, or give it the error of the one after them."""
        if error is not None:
            batch.missing = 0
            self._give(batch, None, _error_of(error, item_of(batch.given[len(samples)])))
            return
        missing = batch.size - len(samples)
        if missing:
            batch.missing = batch.size if self._drops_short else missing
            if batch.missing == batch.size:
                return
        self._build(batch, samples)

    def _items(self, host: Host, batch: _Batch) -> tuple[list[Any], BaseException | None]:
        """The samples of a batch of items, until one raises for good; fewer if the reader ends."""
        keys, samples = list(batch.given), [*batch.samples]
        runner, number = self._runner, self._number
        fetcher: Any = self._fetcher
        while len(samples) < len(keys):
            done = len(samples)
            rest = keys[done:] if done else keys
            with host.turn(rest[0], 0, number):
                items, error = runner.read(
                    batch.first + done, number, rest, lambda keys: host.take(keys, 0, number)
                )
            if items and self._runs_items:
                retries = 0 if self._retry is None else self._retry.policy.retries
                fetcher.dataset.hold(rest, items, retries > 0 or runner.is_looking)
                items, failure = self._run_retrying(fetcher, batch, rest[: len(items)], done)
                if failure is not None:
                    return samples + items, failure
            samples = samples + items if samples else items
            if error is None:
                break
            if self._retry is not None:
                made, error = self._retry.give_up(number, keys[len(samples)], error)
                batch.samples = samples = [*samples, *made]
            if error is not None:
                return samples, error
        return samples, None

    def _rows(self, fetcher: Fetcher, batch: _Batch) -> Any:
        """A batch of samples that are rows, copied together; None if they must be loaded one by one."""
        begun_ns, indices = now_ns(), list(batch.given)
        rows = fetcher.rows(indices)
        made = None if rows is None else self._builder.gather(rows)
        if made is None:
            return None
        runner = self._runner
        runner.record_rows(indices, self._number, begun_ns)
        return made

    def _build(self, batch: _Batch, samples: object) -> None:
        """Have a batch hold its samples but those that are skipped, or the error of ``collate_fn``."""
        if self._retry is not None and type(samples) is list and any(map(is_skip, samples)):
            places = enumerate(samples, batch.first)
            batch.skipped = [position for position, sample in places if sample is SKIP]
            samples = [sample for sample in samples if sample is not SKIP]
            if not samples:
                return
        builder, collate = self._builder, self._builder.collate
        if self._draws_collating():
            collate = functools.partial(self._collated, batch)
        made, error = None, None
        try:
            tracer, how = self._sample_tracer, "copy"
            begun_ns = tracer.now() if tracer.enabled else 0
            if not builder.collates and type(samples) is list and samples:
                made = builder.pack(samples)
            if made is None:
                made, how = collate(samples), "collate"
            if tracer.enabled:
                tracer.slice(how, begun_ns)
        except self._current.kinds as raised:
            error = self._collate_error(batch, samples, raised)
        self._give(batch, made, error)

    def _collate_error(self, batch: _Batch, samples: object, error: BaseException) -> BaseException:
        indices = self._names(batch.given)
        name = f"the batch of {listed(indices)}"
        if isinstance(error, StopIteration):
            error = not_the_end(f"collate_fn, called for {name},", error)
        else:
            noted(error, self._builder.explain(error, samples, indices, name))
        return SampleError(error).exception()

    def _draws_collating(self) -> bool:
        """Whether ``collate_fn`` may draw numbers that belong to the batch."""
        return self._builder.draws and self.plan.worker.seeds_samples

    def _collated(self, batch: _Batch, samples: object) -> Any:
        """What ``collate_fn`` makes of the samples; what it draws depends on nothing that was run before."""
        epoch, runner = self._epoch, self._runner
        index = next(iter(batch.given), None)
        occurrence = 0 if batch.occurrences is None else batch.occurrences[0]
        bound = runner.bound_to_batch(epoch.seed, epoch.number, index, occurrence)
        return runner.collated(self._builder.collate, samples, bound)

    def _give(self, batch: _Batch, made: object, error: BaseException | None = None) -> None:
        if self._copier is not None and error is None:
            try:
                made = self._copier.copy(self._builder.last_slot, lambda: made)
            except Exception as raised:
                made, error = None, Outgoing.of_error(raised).error
        batch.batch, batch.error, batch.is_made = made, error, True

    def _prepare(self, batch: _Batch) -> None:
        """Prepare what to record of a batch before it is given; each part once."""
        progress, count, tracer = self._progress, len(batch.given), self._tracer
        if progress is not None:
            end = batch.first + batch.size
            positions = range(batch.first, end - batch.missing)
            batch.records = records = [progress.returns(positions, 0, batch.num_slow)]
            if batch.skipped:
                records.insert(0, functools.partial(progress.skipped, list(batch.skipped), 0))
            if batch.missing:
                records.append(functools.partial(progress.drop, range(positions.stop, end), 0))
            progress.last = batch
        if tracer.enabled:
            args = {"epoch": self._number, "samples": count}
            tracer.span("batch", batch.began_ns, tracer.now(), args)
            tracer.slice("read", tracer.now())
        self._batches.drop(batch.drawn)
        if self._failures is not None:
            self._failures.finished += count
        if batch.skipped or batch.missing:
            count -= len(batch.skipped) + batch.missing
        if self._host is not None:
            self._host.release()
        self.observers.leave(count, self._builder.nbytes, self._snapshot)
        if self.arena.num_slots:
            self.arena.trim(1)
        batch.is_prepared = True

    def _snapshot(self) -> LoaderSnapshot:
        return LoaderSnapshot(1, 0, 0, 1, self._builder.nbytes, self.plan.budget_bytes)

    def pinned(self, duration_ns: int) -> None:
        self.observers.pinned(duration_ns)

    def workers_ended(self, duration_ns: int) -> None:
        """Do nothing: there are none."""

    def pin_slots(self, locker: MemoryPinner) -> None:
        self.arena.pin_slots(locker)

    def stop(self) -> None:
        """Do nothing: ``next()`` runs the samples itself."""

    def shut_down(self) -> None:
        """End the engine, unless it is kept for the next iterator."""
        if self._is_over and self._finalizer.alive:
            self.afterwards[0]()
            self._is_started = False
            if self._keep(self):
                return
        self.end()

    def end(self) -> None:
        """End the engine; runs by itself when it is dropped or the interpreter exits."""
        if self._finalizer.alive:
            self._end()
            self._finalizer.detach()

    def _names(self, indices: Sequence[Any]) -> list[Any]:
        return list(indices) if self._host is None else list(map(item_of, indices))

    def running(self, least_ns: int) -> list[tuple[int, CurrentSample, int]]:
        """Worker, sample and time in ns of the sample that runs, if it has run for at least ``least_ns``."""
        position, started_ns, step = self._lease.state()
        batch, epoch, taken_ns = self._batch, self._epoch, now_ns() - started_ns
        if position is None or batch is None:
            return []
        k = position - batch.first
        if taken_ns < least_ns or not 0 <= k < len(batch.given):
            return []
        names = self.plan.worker.pipeline.transforms.names
        name = names[step] if 0 <= step < len(names) else None
        index = self._names(batch.given)[k]
        sample = CurrentSample(position, index, epoch.number, epoch.seed, name, started_ns)
        return [(0, sample, taken_ns)]


def _detach(
    readers: EpochReaders, reference: weakref.ref[Host], part: weakref.ref[_Current]
) -> None:
    """Keep what is known of readers without their host; with it, where the dataset may be in use.

    Args:
        part: Of the engine, which is gone before it only where a collection has found both: in the midst of anything.
    """
    host = reference()
    if host is None or (host.is_at_rest and part() is not None):
        readers.detach()


def _reads_in_flight(plan: WorkerPlan) -> InFlight:
    dataset, options = plan.pipeline.dataset, plan.fetching
    memory = np.zeros(SharedReadLimit.nbytes(1), np.uint8)
    return InFlight(
        0,
        reads_of(dataset, options.concurrency),
        SharedReadLimit(memory, 0, 1, options.max_in_flight),
        options,
    )


def _randomness(plan: WorkerPlan, history: History, seed: int) -> SampleRandomness:
    """The randomness of samples from a seed; warns of generators that cannot be bound to them."""
    owned = OwnedGenerators(plan.generator_roots(plan.fetching.at_once))
    if not plan.fetching.at_once:
        history.warn_of_generators(owned.others)
    # In another thread, restoring the generators would undo the draws of the main thread.
    bind = threading.current_thread() is threading.main_thread()
    return SampleRandomness(seed, bind_globals=bind, owned=owned if bind else None)


def _nothing_to_end() -> bool:
    return True


def _error_of(error: BaseException, index: object) -> BaseException:
    """The exception that ``next()`` raises for that of a sample; ``index`` None: of a batch."""
    if isinstance(error, StopIteration):
        error = not_the_end("a batch" if index is None else name_of(index), error)
    return SampleError(error, index).exception()
