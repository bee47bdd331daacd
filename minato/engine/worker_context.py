"""Where a worker works: the parts of the engine that travel to it, and what it makes of them there."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minato._compat import ExceptionWrapper
from minato._core.ledger import Ledger
from minato._core.segment import Segment
from minato._core.wait import EventCount
from minato.batching.arena import Arena
from minato.batching.serialization import Store, stored_indices
from minato.batching.writer import BatchWriter, WriterSettings
from minato.engine.plan import Plan
from minato.errors import NotPicklableError
from minato.observe.stats.costs import Meters
from minato.observe.trace.tracer import NULL_TRACER, Tracer
from minato.scheduling.dataset_state import Replica
from minato.transforms.compose import Transforms
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import SampleRandomness
from minato.workers.active_workers import ActiveWorkers
from minato.workers.concurrent import ConcurrentWorker
from minato.workers.deferral import Deferral
from minato.workers.error_policy import FailureHandler
from minato.workers.fetch import Fetcher, StreamFetcher
from minato.workers.read_limit import SharedReadLimit
from minato.workers.reads import Reads, reads_of
from minato.workers.retry import SampleRetry
from minato.workers.runner import CostEstimate, Runner
from minato.workers.sample_timeout import StackFile
from minato.workers.staged_runner import StageRunner
from minato.workers.worker import Worker

__all__ = ["WorkerContext"]


@dataclass
class WorkerContext:
    """What a worker needs besides its number; travels to worker processes.

    Attributes:
        meters_offset: Where in ``segment`` the measurements lie, behind the ledger.
        roster_offset: Where it says which workers work.
        traffic_offset: Where it says how many reads are under way.
        arena: Memory of the batches.
        written_plan: Where in the arena the pickled plan lies, if it was written there.
        stacks: Where stuck workers write their stacks.
        habits: What the worker in line has learned, kept for the next engine's.
        policy: What to do about failures; not in the written plan, because only a starting child can be given its log.
    """

    plan: Plan
    segment: Segment
    meters_offset: int
    roster_offset: int
    traffic_offset: int
    arena: Segment
    store: Store
    written_plan: tuple[int, int] | None = None
    stacks: StackFile | None = None
    habits: CostEstimate | None = None
    policy: FailureHandler | None = None
    _meters: dict[int, Meters] = field(default_factory=dict)

    def write_plan(self, arena: Arena) -> None:
        """Pickle the plan once for all workers, into a slot that stays theirs.

        What only a starting child can be given (locks, queues, tensors in shared memory) travels with each of them.
        """
        slot = arena.acquire()
        plan = dataclasses.replace(self.plan, context=None, policy=None)
        try:
            self.written_plan = self.store.put(lambda nbytes: slot.start, plan, "process")
        except NotPicklableError:
            raise
        except Exception:
            arena.release(slot)

    def __getstate__(self) -> dict[str, Any]:
        plan = None
        if not self.written_plan:
            plan = dataclasses.replace(self.plan, context=None, policy=None)
        return {**self.__dict__, "plan": plan, "_meters": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.written_plan:
            try:
                self.plan = self.store.peek(*self.written_plan)
            except AttributeError as error:
                raise NotPicklableError(
                    f"{error}: workers that are not forked import the main module anew, without what stands below "
                    "if __name__ == '__main__'. Define it above"
                ) from error

    def read_keys(self, ledger: Ledger, batch: int, k: int, count: int) -> Sequence[Any]:
        """The keys of samples k … k+count-1 of a batch."""
        return stored_indices(ledger, self.store, batch, k, count)

    def meters(self, number: int) -> Meters:
        """Where worker ``number`` keeps what it measures."""
        if number not in self._meters:
            num_steps = len(self.plan.chain)
            nbytes = Meters.nbytes(num_steps)
            start = self.meters_offset + number * nbytes
            self._meters[number] = Meters(num_steps, self.segment.array[start : start + nbytes])
        return self._meters[number]

    def roster(self, ledger: Ledger) -> ActiveWorkers:
        """Which workers work."""
        work = EventCount(self.segment.array, ledger.work_events_offset)
        return ActiveWorkers(self.segment.array, self.roster_offset, work)

    def writer(
        self,
        number: int,
        ledger: Ledger,
        describe_error: Callable[[BaseException], ExceptionWrapper | BaseException],
        catches: type[BaseException] = Exception,
        tracer: Tracer = NULL_TRACER,
    ) -> BatchWriter:
        """What writes the samples of worker ``number``."""
        settings = WriterSettings(
            worker=number,
            collate_fn=self.plan.collate_fn,
            auto_collation=self.plan.batched,
            describe_error=describe_error,
            catches=catches,
            in_main_process=self.plan.num_workers == 0,
        )
        return BatchWriter(
            settings, ledger=ledger, segment=self.arena, store=self.store, tracer=tracer
        )

    def worker(
        self,
        number: int,
        ledger: Ledger,
        describe_error: Callable[[BaseException], ExceptionWrapper | BaseException],
        failure: BaseException | None,
        catches: type[BaseException],
        in_line: bool = False,
        hired: tuple[Any, Callable[[], None], Callable[[], bool]] | None = None,
    ) -> Worker:
        """Worker ``number``.

        Args:
            describe_error: Turns an exception that is being handled into what the consumer raises.
            failure: What ``worker_init_fn`` raised.
            catches: What a sample or the ``collate_fn`` may raise without ending the worker.
            in_line: It runs in the consumer's thread.
            hired: An actor that runs its samples, what ends it, and what tells whether it can be asked.
        """
        plan = self.plan
        # Where several samples are read at once, the dataset's generators serve them all.
        at_once = plan.fetching.at_once and hired is None
        roots = {"dataset": None if at_once else plan.dataset, **plan.chain.by_name}

        def make_randomness(seed: int) -> SampleRandomness:
            # Beside the main thread, what that one draws meanwhile would be undone.
            beside = in_line and threading.current_thread() is not threading.main_thread()
            bind = plan.worker_method == "process" and not beside
            owned = OwnedGenerators(roots) if bind else None
            return SampleRandomness(seed, bind_globals=bind, owned=owned)

        lease, meters = ledger.lease_words(number), self.meters(number)
        dataset, chain = plan.dataset, plan.chain
        reads: Reads | None = None
        if hired is not None:
            from minato.ray.reads import ActorReads

            reads = dataset = ActorReads(*hired, lease, meters)
            chain = Transforms()  # the actor runs the transforms
        roster = self.roster(ledger)
        tracer = plan.worker_tracer(number)
        fetcher: Fetcher | StreamFetcher
        stepper: StageRunner | None = None
        deferral: Deferral | None = None
        if plan.streams:
            replica = None if plan.replicas is None else plan.replicas.each[number]
            fetcher = StreamFetcher(
                plan.dataset,
                plan.chain,
                plan.batched,
                plan.drop_last,
                in_line,
                replica,
                plan.state_every,
            )
            present: Callable[[], Replica | None] = fetcher.present
        else:
            fetcher = Fetcher(dataset, chain, plan.batched, plan.sends_states)
            present = fetcher.state
        if in_line and plan.replicas is not None:
            plan.replicas.present = present
        if not plan.streams and not fetcher.takes_lists and reads is None:
            if plan.defers:
                deferral = Deferral(ledger=ledger, meters=meters, num_workers=lambda: roster.wanted)
            stepper = StageRunner(plan.dataset, plan.chain, lease, meters, deferral, tracer=tracer)
        runner = Runner(
            lease,
            make_randomness if plan.seeds_samples else None,
            meters,
            stepper,
            failure,
            in_line,
            catches,
            plan.measure,
            self.habits,
            ledger.occurrences,
            tracer=tracer,
        )
        leniency: SampleRetry | None = None
        if self.policy is not None and failure is None and isinstance(fetcher, Fetcher):
            leniency = SampleRetry(number, self.policy, runner, fetcher, plan.chain, lease)
        make: Callable[..., Worker] = Worker
        fetching = plan.fetching
        if (fetching.at_once or reads is not None) and failure is None:
            workers = max(plan.most_workers, 1)
            traffic = SharedReadLimit(
                self.segment.array, self.traffic_offset, workers, fetching.max_in_flight
            )
            reads = reads or reads_of(dataset, fetching.concurrency)
            make = functools.partial(
                ConcurrentWorker, reads, chain, plan.seeds_samples, traffic, fetching
            )
        return make(
            number,
            ledger,
            EventCount(self.segment.array, ledger.work_events_offset),
            fetcher,
            runner,
            self.writer(number, ledger, describe_error, catches, tracer),
            functools.partial(self.read_keys, ledger),
            deferral,
            plan.order.slow_to_newest,
            plan.round_robin,
            leniency,
            roster,
            tracer=tracer,
        )
