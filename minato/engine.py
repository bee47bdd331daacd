"""The stages wired together: from a loader's options to running workers and back to batches."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch._utils import ExceptionWrapper

from minato import _pickling
from minato._core.histogram import NBYTES as HISTOGRAM_NBYTES
from minato._core.histogram import Histogram
from minato._core.ledger import Ledger
from minato._core.segment import Segment
from minato._core.wait import Gate
from minato.assembler.arena import Arena
from minato.assembler.reader import BatchReader
from minato.assembler.transport import LocalStore, SharedStore, Store
from minato.assembler.writer import BatchWriter
from minato.chain.chain import Chain
from minato.chain.rng import SampleRandomness
from minato.errors import NotPicklableError
from minato.scheduler.assignment import AnyWorker, RoundRobin
from minato.scheduler.concurrent_worker import ConcurrentWorker
from minato.scheduler.deaths import Deaths
from minato.scheduler.dispatcher import Dispatcher, Order
from minato.scheduler.fetch import Fetcher, StreamFetcher
from minato.scheduler.local import InlinePool, ThreadPool, wrapped_in_thread
from minato.scheduler.process import (
    ProcessPool,
    enter_worker_process,
    parent_watch,
    wrapped_in_process,
)
from minato.scheduler.reads import reads_of
from minato.scheduler.window import Window
from minato.scheduler.worker import Worker

__all__ = ["Engine", "Plan"]

_SLOW_SHARE, _SLOW_FACTOR = 0.75, 2
"""A sample is slow if it costs more than this share of all samples, and so many times the median."""
_SLOW_WARM_UP = 32
"""So many samples are measured before any counts as slow."""
_BATCH_RECORDS = 2048
_POSITIONS = 1 << 16
"""Batches and samples that can be in flight: 4 MiB of ledger that is only touched as far as it is used."""


@dataclass(frozen=True)
class Plan:
    """All that defines the work, as the loader's arguments give it.

    Attributes:
        batched: Keys come in lists (``batch_size`` or a ``batch_sampler``).
        seeds_samples: Randomness is bound to each sample rather than to the worker.
        window_batches: Batches in flight, None to let the budget decide.
        persistent: The workers stay for further passes.
        streams: The dataset is iterable.
        round_robin: Batch k is for worker k mod n, as with torch.
        restarts: A dead worker process is replaced.
        fetch_concurrency: Samples that a worker reads at once.
        drop_last: Whether a stream's incomplete batch is dropped.
        largest_batch: Samples in the largest batch, as far as it is known.
    """

    dataset: Any
    chain: Chain
    collate_fn: Callable[[Any], Any]
    batched: bool
    num_workers: int
    worker_method: str
    context: Any
    worker_init_fn: Callable[[int], None] | None
    base_seed: int
    seeds_samples: bool
    order: Order
    window_batches: int | None
    budget_bytes: int
    largest_batch: int
    timeout_s: float
    persistent: bool
    streams: bool
    round_robin: bool
    drop_last: bool
    restarts: bool
    fetch_concurrency: int = 1


class Engine:
    """Workers, their shared memory, and the consumer's end of it.

    Args:
        arena: Where the batches lie; that of an earlier engine has warm pages.
    """

    def __init__(self, plan: Plan, arena: Arena) -> None:
        self.arena = arena
        positions = max(_POSITIONS, 1 << (4 * plan.largest_batch - 1).bit_length())
        sizes = (max(plan.num_workers, 1), _BATCH_RECORDS, positions)
        ledger_nbytes = -(-Ledger.nbytes(*sizes) // 64) * 64
        in_processes = plan.num_workers > 0 and plan.worker_method == "process"
        segment = Segment(ledger_nbytes + sizes[0] * HISTOGRAM_NBYTES, shared=in_processes)
        self.ledger = Ledger(segment.array, sizes, segment.descriptor)
        ready = Gate(segment.array, self.ledger.ready_gate_offset)
        store = SharedStore(self.arena.segment) if in_processes else LocalStore()
        bench = _Bench(plan, segment, ledger_nbytes, self.arena.segment, store)
        self.service_times = [bench.histogram(number) for number in range(sizes[0])]
        """Histogram of each worker's service times in nanoseconds."""
        self._pool = _make_pool(plan, bench, self.ledger, ready)
        self._reader = BatchReader(self.ledger, self.arena, store)
        self._dispatcher = Dispatcher(
            self.ledger,
            ready,
            self._pool,
            self.arena,
            Window(
                plan.num_workers,
                plan.window_batches,
                plan.budget_bytes,
                # A sample is bound to the batch max_lag after its own when that one is opened. Its own must be
                # delivered by then: else nothing would keep it from being in time.
                None if plan.order.bound else plan.order.max_lag,
                # Batches that hold as many samples as all workers read at once.
                -(-plan.num_workers * plan.fetch_concurrency // plan.largest_batch),
            ),
            plan.order,
            RoundRobin(
                max(plan.num_workers, 1),
                plan.order.name == "strict",
                cast(int, plan.window_batches),
            )
            if plan.round_robin
            else AnyWorker(),
            store,
            self._reader.discard,
            plan.timeout_s,
            plan.num_workers > 0 and not plan.persistent,
        )
        self._started = False
        self._works_ahead = plan.num_workers > 0
        self._parts_slow = plan.order.name == "fast_first" and not plan.order.bound
        self._sent = plan if in_processes and plan.context.get_start_method() != "fork" else None
        if self._sent is not None:
            bench.write_plan(self.arena)
        self.shut_down = weakref.finalize(self, self._pool.shut_down)
        """Ends the workers; runs by itself when the engine is dropped or the interpreter exits."""

    def begin(
        self,
        batches: Iterable[list[Any]],
        epoch: int,
        seed: int,
        expected: Callable[[], tuple[Iterable[list[Any]], int, int] | None],
    ) -> bool:
        """Start a pass (see ``Dispatcher.begin``) and, with the first one, the workers."""
        foretold = self._dispatcher.begin(batches, epoch, seed, expected)
        if self._works_ahead:
            self._dispatcher.refill()
        if not self._started:
            self._start()
        return foretold

    @property
    def over(self) -> bool:
        """Whether the pass has no more batches."""
        return self._dispatcher.over

    def next(self) -> Any:
        """The next batch. Raises StopIteration at the end of the pass, and what the batch's samples raised."""
        item = self._dispatcher.next()
        used_bytes = self.ledger.contents(item.record)[-1]
        try:
            return self._reader.read(item.record, item.slot)
        finally:
            self._dispatcher.done(item, used_bytes)
            if self._parts_slow:
                self._mark_slow()
            if self._works_ahead:
                self._dispatcher.refill()
            self.arena.trim(self._dispatcher.num_open)

    def _mark_slow(self) -> None:
        """Tell the workers from which cost on a sample is slow."""
        times = Histogram()
        for worker_times in self.service_times:
            times.merge(worker_times)
        if times.count >= _SLOW_WARM_UP:
            median_ns, large_ns = times.percentile(0.5), times.percentile(_SLOW_SHARE)
            self.ledger.slow_ns = max(large_ns, _SLOW_FACTOR * median_ns)

    def _start(self) -> None:
        self._started = True
        try:
            self._pool.start()
        except Exception as error:
            self.shut_down()
            if self._sent is not None:
                _pickling.advise(error)
                _pickling.check_picklable("transforms", self._sent.chain.steps)
                for name in ("dataset", "collate_fn", "worker_init_fn"):
                    _pickling.check_picklable(name, getattr(self._sent, name))
            raise

    def cancel(self) -> None:
        """Abandon what is in flight."""
        self._dispatcher.cancel_all()


@dataclass
class _Bench:
    """What a worker needs besides its number; travels to worker processes."""

    plan: Plan
    segment: Segment
    histograms_offset: int
    arena: Segment
    store: Store
    written_plan: tuple[int, int] | None = None

    def write_plan(self, arena: Arena) -> None:
        """Pickle the plan once for all workers, into a slot that stays theirs.

        What only a starting child can be given (locks, queues, tensors in shared memory) travels with each of them.
        """
        slot = arena.acquire()
        plan = dataclasses.replace(self.plan, context=None)
        try:
            self.written_plan = self.store.put(lambda nbytes: slot.start, plan, "process")
        except NotPicklableError:
            raise
        except Exception:
            arena.release(slot)

    def __getstate__(self) -> dict[str, Any]:
        plan = None if self.written_plan else dataclasses.replace(self.plan, context=None)
        return {**self.__dict__, "plan": plan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.written_plan:
            self.plan = self.store.peek(*self.written_plan)

    def read_keys(self, ledger: Ledger, batch: int, k: int, count: int) -> Sequence[Any]:
        *_, offset, nbytes, _ = ledger.describe(batch)
        if not offset:
            return ledger.keys(batch, k, count)
        keys: list[Any] = self.store.peek(offset, nbytes)
        return keys[k : k + count]

    def histogram(self, number: int) -> Histogram:
        start = self.histograms_offset + number * HISTOGRAM_NBYTES
        return Histogram(self.segment.array[start : start + HISTOGRAM_NBYTES])

    def worker(
        self,
        number: int,
        ledger: Ledger,
        describe_error: Callable[[BaseException], ExceptionWrapper | BaseException],
        failure: BaseException | None,
        catches: type[BaseException],
        in_line: bool = False,
    ) -> Worker:
        plan, store = self.plan, self.store

        def make_randomness(seed: int) -> SampleRandomness:
            return SampleRandomness(seed, bind_globals=plan.worker_method == "process")

        make: Callable[..., Worker] = Worker
        if plan.fetch_concurrency > 1:
            reads = reads_of(plan.dataset, plan.fetch_concurrency)
            make = functools.partial(ConcurrentWorker, reads, plan.chain)
        return make(
            number,
            ledger,
            Gate(self.segment.array, ledger.work_gate_offset),
            StreamFetcher(plan.dataset, plan.chain, plan.batched, plan.drop_last)
            if plan.streams
            else Fetcher(plan.dataset, plan.chain, plan.batched),
            BatchWriter(
                number, ledger, self.arena, store, plan.collate_fn, plan.batched, describe_error
            ),
            functools.partial(self.read_keys, ledger),
            make_randomness if plan.seeds_samples else None,
            self.histogram(number),
            plan.round_robin,
            failure,
            in_line,
            catches,
        )


def _make_pool(
    plan: Plan, bench: _Bench, ledger: Ledger, ready: Gate
) -> ProcessPool | ThreadPool | InlinePool:
    if plan.num_workers == 0:
        return InlinePool(
            lambda number: bench.worker(
                number, ledger, lambda error: error, None, BaseException, in_line=True
            )
        )
    if plan.worker_method == "thread":

        def in_thread(number: int) -> Worker:
            failure = _initialise(plan, number)
            return bench.worker(number, ledger, wrapped_in_thread(number), failure, BaseException)

        return ThreadPool(
            plan.num_workers, in_thread, ready, ledger.shut_down, lambda: ledger.draining
        )
    deaths = Deaths(plan.restarts)

    def bury(number: int, pid: int | None, exit_code: int | None) -> None:
        position, _, _ = ledger.lease(number)
        sample: tuple[Any, ...] = ()
        if position is not None:
            batch, k = ledger.locate(position)
            _, _, count, _, epoch, *_ = ledger.describe(batch)
            if (
                0 <= k < count
            ):  # else the sample was done, and its place belongs to another batch by now
                sample = epoch, bench.read_keys(ledger, batch, k, 1)[0]
        progress = sum(ledger.activity(worker)[0] for worker in range(plan.num_workers))
        deaths.report(pid, exit_code, sample, progress)
        ledger.release(number)

    return ProcessPool(
        plan.context,
        plan.num_workers,
        _run_worker_process,
        (bench,),
        ready,
        ledger.shut_down,
        lambda number: ledger.draining and ledger.lease(number)[0] is None,
        bury,
    )


def _run_worker_process(number: int, bench: _Bench) -> None:
    parent_lives = parent_watch()
    plan = bench.plan
    try:
        enter_worker_process(number, plan.num_workers, plan.base_seed, plan.dataset)
        ledger = Ledger(bench.segment.array, None, bench.segment.descriptor)
        failure = _initialise(plan, number)
        wrap = wrapped_in_process(number)
        worker = bench.worker(number, ledger, wrap, failure, Exception)
        worker.loop(parent_lives)
        worker.close()
    except KeyboardInterrupt:
        pass  # the consumer was interrupted too, and says so


def _initialise(plan: Plan, number: int) -> Exception | None:
    try:
        if plan.worker_init_fn is not None:
            plan.worker_init_fn(number)
    except Exception as error:
        return error
    return None
