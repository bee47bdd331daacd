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
from minato._core.clock import now_ns
from minato._core.ledger import Ledger
from minato._core.segment import Segment
from minato._core.wait import Gate
from minato.assembler.arena import Arena
from minato.assembler.reader import BatchReader
from minato.assembler.transport import LocalStore, SharedStore, Store
from minato.assembler.writer import BatchWriter
from minato.chain.rng import SampleRandomness
from minato.errors import NotPicklableError
from minato.plan import Plan
from minato.scheduler.assignment import AnyWorker, RoundRobin
from minato.scheduler.deaths import Deaths
from minato.scheduler.dispatcher import Dispatcher
from minato.scheduler.fetch import Fetcher, StreamFetcher
from minato.scheduler.flow import Flow
from minato.scheduler.local import InlinePool, ThreadPool, wrapped_in_thread
from minato.scheduler.parking import Parking
from minato.scheduler.policy import TimeoutPolicy
from minato.scheduler.process import (
    ProcessPool,
    enter_worker_process,
    parent_watch,
    wrapped_in_process,
)
from minato.scheduler.roster import Roster
from minato.scheduler.runner import Runner
from minato.scheduler.scaling import Scaler, Staffing, WatchedPool
from minato.scheduler.stepper import Stepper
from minato.scheduler.window import Window
from minato.scheduler.worker import Worker
from minato.stats.profile import Meters, Profile
from minato.stats.summary import merged

__all__ = ["Engine"]

_PARKED_SHARE = 4
"""What workers have set aside may take the memory budget divided by this, besides the batches in flight."""
_BATCH_RECORDS = 2048
_POSITIONS = 1 << 16
"""Batches and samples that can be in flight: 4 MiB of ledger that is only touched as far as it is used."""


class Engine:
    """Workers, their shared memory, and the consumer's end of it.

    Args:
        arena: Where the batches lie; that of an earlier engine has warm pages.
        staffing: Decides how many workers work; None: all of them.
    """

    def __init__(self, plan: Plan, arena: Arena, staffing: Staffing | None = None) -> None:
        self.arena = arena
        positions = max(_POSITIONS, 1 << (4 * plan.largest_batch - 1).bit_length())
        sizes = (max(plan.most_workers, 1), _BATCH_RECORDS, positions)
        ledger_nbytes = -(-Ledger.nbytes(*sizes) // 64) * 64
        in_processes = plan.num_workers > 0 and plan.worker_method == "process"
        meters_nbytes = sizes[0] * Meters.nbytes(len(plan.chain))
        roster_offset = ledger_nbytes + meters_nbytes
        segment = Segment(roster_offset + Roster.NBYTES, shared=in_processes)
        self.ledger = Ledger(segment.array, sizes, segment.descriptor)
        ready = Gate(segment.array, self.ledger.ready_gate_offset)
        store = SharedStore(self.arena.segment) if in_processes else LocalStore()
        bench = _Bench(plan, segment, ledger_nbytes, roster_offset, self.arena.segment, store)
        roster = bench.roster(self.ledger)
        roster.want(sizes[0])
        self.meters = [bench.meters(number) for number in range(sizes[0])]
        """What each worker has measured."""
        self._profile = Profile(plan.chain.names)
        self._pool = _make_pool(plan, bench, self.ledger, ready, roster)
        self._reader = BatchReader(self.ledger, self.arena, store)
        window = Window(
            plan.num_workers,
            plan.window_batches,
            plan.budget_bytes,
            # A sample is bound to the batch max_lag after its own when that one is opened. Its own must be
            # delivered by then: else nothing would keep it from being in time.
            None if plan.order.bound else plan.order.max_lag,
        )
        self._scaler: Scaler | None = None
        flow: Flow | None = None
        if staffing is not None and not isinstance(self._pool, InlinePool):
            flow, times = Flow(), [meters.total for meters in self.meters]
            self._scaler = Scaler(
                staffing, sizes[0], self._pool, roster, window, flow, self.ledger, times
            )
        self._dispatcher = Dispatcher(
            self.ledger,
            ready,
            self._pool if self._scaler is None else WatchedPool(self._pool, self._scaler),
            self.arena,
            window,
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
            flow,
        )
        self._started = False
        self._works_ahead = plan.num_workers > 0
        self._started_ns = now_ns()
        self.timeouts = TimeoutPolicy()
        """Decides which samples are slow."""
        self._parts_slow = plan.leaves_samples or (
            plan.order.name == "fast_first" and not plan.order.bound
        )
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
        if self._scaler is not None:
            self._scaler.restart()
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
            if self._scaler is not None:
                self._scaler.look()
            if self._works_ahead:
                self._dispatcher.refill()
            self.arena.trim(self._dispatcher.num_open)

    def profile(self) -> Profile:
        """What samples have cost so far, and since this was last asked."""
        self._profile.update(self.meters)
        return self._profile

    def _mark_slow(self) -> None:
        """Tell the workers from which cost on a sample is slow, when enough have run since the last time."""
        elapsed_s = (now_ns() - self._started_ns) / 1e9
        if self.timeouts.due(sum(meters.total.count for meters in self.meters), elapsed_s):
            times = merged(meters.total for meters in self.meters)
            self.ledger.slow_ns = self.timeouts.observe(times, elapsed_s).threshold_ns

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
    meters_offset: int
    roster_offset: int
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

    def meters(self, number: int) -> Meters:
        num_steps = len(self.plan.chain)
        nbytes = Meters.nbytes(num_steps)
        start = self.meters_offset + number * nbytes
        return Meters(num_steps, self.segment.array[start : start + nbytes])

    def roster(self, ledger: Ledger) -> Roster:
        work = Gate(self.segment.array, ledger.work_gate_offset)
        return Roster(self.segment.array, self.roster_offset, work)

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

        lease, meters = ledger.lease_words(number), self.meters(number)
        fetcher: Fetcher | StreamFetcher
        stepper: Stepper | None = None
        parking: Parking | None = None
        if plan.streams:
            fetcher = StreamFetcher(plan.dataset, plan.chain, plan.batched, plan.drop_last)
        else:
            fetcher = Fetcher(plan.dataset, plan.chain, plan.batched)
        if not plan.streams and not fetcher.takes_lists:
            stepper = Stepper(plan.dataset, plan.chain, lease, meters)
        if stepper is not None and plan.leaves_samples:
            most_bytes = plan.budget_bytes // (_PARKED_SHARE * plan.most_workers)
            always = plan.order.name == "fast_first"
            parking = Parking(ledger, stepper.left, always, most_bytes=most_bytes)
            stepper.may_leave = parking.may_leave
        runner = Runner(
            lease,
            make_randomness if plan.seeds_samples else None,
            meters,
            stepper,
            failure,
            in_line,
            catches,
        )
        return Worker(
            number,
            ledger,
            Gate(self.segment.array, ledger.work_gate_offset),
            fetcher,
            runner,
            BatchWriter(
                number, ledger, self.arena, store, plan.collate_fn, plan.batched, describe_error
            ),
            functools.partial(self.read_keys, ledger),
            parking,
            plan.round_robin,
            self.roster(ledger),
        )


def _make_pool(
    plan: Plan, bench: _Bench, ledger: Ledger, ready: Gate, roster: Roster
) -> ProcessPool | ThreadPool | InlinePool:
    if plan.num_workers == 0:
        return InlinePool(
            lambda number: bench.worker(
                number, ledger, lambda error: error, None, BaseException, in_line=True
            )
        )

    def stop() -> None:
        ledger.shut_down()
        roster.dismiss()

    if plan.worker_method == "thread":

        def in_thread(number: int, consumer_lives: Callable[[], bool]) -> Worker | None:
            if not roster.stand_by(
                number, lambda: ledger.stopping or ledger.draining, consumer_lives
            ):
                return None
            failure = _initialise(plan, number)
            return bench.worker(number, ledger, wrapped_in_thread(number), failure, BaseException)

        return ThreadPool(plan.most_workers, in_thread, ready, stop, lambda: ledger.draining)
    deaths = Deaths(plan.restarts)

    def bury(number: int, pid: int | None, exit_code: int | None) -> None:
        position, _, _ = ledger.lease(number)
        sample: tuple[Any, ...] = ()
        if position is not None:
            batch, k = ledger.locate(position)
            _, _, count, _, epoch, *_ = ledger.describe(batch)
            if 0 <= k < count:  # else it had finished its last sample, whose batch is gone
                sample = epoch, bench.read_keys(ledger, batch, k, 1)[0]
        progress = sum(ledger.activity(worker)[0] for worker in range(plan.most_workers))
        deaths.report(pid, exit_code, sample, progress)
        ledger.release(number)

    return ProcessPool(
        plan.context,
        plan.most_workers,
        plan.num_workers,
        _run_worker_process,
        (bench,),
        ready,
        stop,
        lambda number: ledger.draining and ledger.lease(number)[0] is None,
        bury,
    )


def _run_worker_process(number: int, bench: _Bench) -> None:
    parent_lives = parent_watch()
    plan = bench.plan
    try:
        enter_worker_process(number, plan.most_workers, plan.base_seed, plan.dataset)
        ledger = Ledger(bench.segment.array, None, bench.segment.descriptor)
        if not bench.roster(ledger).stand_by(
            number, lambda: ledger.stopping or ledger.draining, parent_lives
        ):
            return
        failure = _initialise(plan, number)
        wrap = wrapped_in_process(number)
        bench.worker(number, ledger, wrap, failure, Exception).loop(parent_lives)
    except KeyboardInterrupt:
        pass  # the consumer was interrupted too, and says so


def _initialise(plan: Plan, number: int) -> Exception | None:
    try:
        if plan.worker_init_fn is not None:
            plan.worker_init_fn(number)
    except Exception as error:
        return error
    return None
