"""Workers wired together: what each of them needs, and the pool that runs them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch._utils import ExceptionWrapper

from minato._core.ledger import Ledger
from minato._core.segment import Segment
from minato._core.wait import Gate
from minato.assembler.arena import Arena
from minato.assembler.transport import Store
from minato.assembler.writer import BatchWriter
from minato.chain.rng import SampleRandomness
from minato.errors import NotPicklableError
from minato.plan import Plan
from minato.scheduler.deaths import Deaths
from minato.scheduler.fetch import Fetcher, StreamFetcher
from minato.scheduler.local import InlinePool, ThreadPool, wrapped_in_thread
from minato.scheduler.parking import Parking
from minato.scheduler.process import (
    ProcessPool,
    enter_worker_process,
    parent_watch,
    wrapped_in_process,
)
from minato.scheduler.runner import Runner
from minato.scheduler.stepper import Stepper
from minato.scheduler.worker import Worker
from minato.stats.profile import Meters

__all__ = ["Workplace", "make_pool"]

_PARKED_SHARE = 4
"""What workers have set aside may take the memory budget divided by this, besides the batches in flight."""


@dataclass
class Workplace:
    """What a worker needs besides its number; travels to worker processes."""

    plan: Plan
    segment: Segment
    meters_offset: int
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
        """Keys of samples k … k+count-1 of a batch."""
        *_, offset, nbytes, _ = ledger.describe(batch)
        if not offset:
            return ledger.keys(batch, k, count)
        keys: list[Any] = self.store.peek(offset, nbytes)
        return keys[k : k + count]

    def meters(self, number: int) -> Meters:
        """What a worker measures."""
        num_steps = len(self.plan.chain)
        nbytes = Meters.nbytes(num_steps)
        start = self.meters_offset + number * nbytes
        return Meters(num_steps, self.segment.array[start : start + nbytes])

    def worker(
        self,
        number: int,
        ledger: Ledger,
        describe_error: Callable[[BaseException], ExceptionWrapper | BaseException],
        failure: BaseException | None,
        catches: type[BaseException],
        in_line: bool = False,
    ) -> Worker:
        """A worker, to be made where it runs; the arguments are those of ``Runner`` and ``BatchWriter``."""
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
            most_bytes = plan.budget_bytes // (_PARKED_SHARE * plan.num_workers)
            always = plan.order.name == "fast_first"
            parking = Parking(ledger, stepper.left, always, plan.order.bound, most_bytes=most_bytes)
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
            plan.order.name == "fast_first",
            plan.round_robin,
        )


def make_pool(
    plan: Plan, place: Workplace, ledger: Ledger, ready: Gate
) -> ProcessPool | ThreadPool | InlinePool:
    """The workers, not yet started, in processes or threads or in line."""
    if plan.num_workers == 0:
        return InlinePool(
            lambda number: place.worker(
                number, ledger, lambda error: error, None, BaseException, in_line=True
            )
        )
    if plan.worker_method == "thread":

        def in_thread(number: int) -> Worker:
            failure = _initialise(plan, number)
            return place.worker(number, ledger, wrapped_in_thread(number), failure, BaseException)

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
            if 0 <= k < count:  # else it had finished its last sample, whose batch is gone
                sample = epoch, place.read_keys(ledger, batch, k, 1)[0]
        progress = sum(ledger.activity(worker)[0] for worker in range(plan.num_workers))
        deaths.report(pid, exit_code, sample, progress)
        ledger.release(number)

    return ProcessPool(
        plan.context,
        plan.num_workers,
        _run_worker_process,
        (place,),
        ready,
        ledger.shut_down,
        lambda number: ledger.draining and ledger.lease(number)[0] is None,
        bury,
    )


def _run_worker_process(number: int, place: Workplace) -> None:
    parent_lives = parent_watch()
    plan = place.plan
    try:
        enter_worker_process(number, plan.num_workers, plan.base_seed, plan.dataset)
        ledger = Ledger(place.segment.array, None, place.segment.descriptor)
        failure = _initialise(plan, number)
        wrap = wrapped_in_process(number)
        place.worker(number, ledger, wrap, failure, Exception).loop(parent_lives)
    except KeyboardInterrupt:
        pass  # the consumer was interrupted too, and says so


def _initialise(plan: Plan, number: int) -> Exception | None:
    try:
        if plan.worker_init_fn is not None:
            plan.worker_init_fn(number)
    except Exception as error:
        return error
    return None
