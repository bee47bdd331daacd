"""The context that travels to a worker, and the worker that is made of it, whatever runs it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minato._core import Lease, WorkerLedger
from minato._support.pickling import ForChild, Snapshot
from minato.batching.collate import RunAgain
from minato.batching.sample_error import ErrorTransport
from minato.batching.serialization import Store
from minato.batching.writer import BatchWriter
from minato.observe.meters import Meters
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import SampleRandomness
from minato.workers.concurrent import ConcurrentWorker, InFlight
from minato.workers.error_policy import FailureHandler, SampleRetry
from minato.workers.fetch import Fetcher, StreamFetcher, fetcher_of
from minato.workers.plan import WorkerPlan
from minato.workers.pool import process_usage
from minato.workers.reads import BegunLists, Reads, reads_of
from minato.workers.runner import Runner, RunnerSettings
from minato.workers.sample_timeout import StackFile
from minato.workers.shared_state import SharedLayout, SharedState
from minato.workers.stages import Deferral, StageRunner
from minato.workers.worker import Worker, run_again

__all__ = ["WorkerContext"]


@dataclass
class WorkerContext:
    """All that a worker needs besides its number; travels to worker processes.

    Attributes:
        layout: Of the shared segment.
        store: Memory of the batches.
        sent: Travels in place of the plan, as which it arrives; None: the plan itself.
        stacks: The file that stuck workers write their stacks to.
        policy: Handles samples that raise; not in the plan, because only a starting child can inherit its log.
    """

    plan: WorkerPlan
    layout: SharedLayout
    store: Store
    sent: Snapshot | ForChild | None = None
    stacks: StackFile | None = None
    policy: FailureHandler | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "plan": self.sent or self.plan, "sent": None}

    def worker(
        self,
        ledger: WorkerLedger,
        state: SharedState,
        errors: ErrorTransport,
        failure: BaseException | None = None,
        remote_reads: Callable[[Lease, Meters], Reads] | None = None,
    ) -> Worker:
        """Make a worker.

        Args:
            ledger: Its end of the ledger.
            errors: How exceptions get to the training loop.
            failure: The error of ``worker_init_fn``, or None.
            remote_reads: Makes reads that return complete samples of another machine, from lease and meters.
        """
        plan, number = self.plan, ledger.number
        reads = None
        if remote_reads is not None:
            reads = remote_reads(ledger.lease, state.meters(number))
        fetcher = fetcher_of(plan, number, reads)
        runner = _runner(plan, ledger, state, fetcher, reads is not None, errors, failure)
        retry: SampleRetry | None = None
        if self.policy is not None and failure is None and isinstance(fetcher, Fetcher):
            retry = SampleRetry(
                number,
                policy=self.policy,
                runner=runner,
                fetcher=fetcher,
                transforms=plan.pipeline.transforms,
                lease=ledger.lease,
            )
        rerun: RunAgain | None = None
        if isinstance(fetcher, Fetcher):
            rerun = functools.partial(run_again, ledger, runner, fetcher, retry)
        writer = BatchWriter(
            ledger,
            self.store,
            plan.pipeline.collate(runner.bound_to_batch),
            errors=errors,
            run_again=rerun,
            handover=state.handover if plan.in_processes else None,
            skips=retry is not None,
            tracer=runner.tracer,
        )
        flight = None if failure is not None else _flight(plan, number, state, reads)
        if flight is None or isinstance(fetcher, StreamFetcher):
            return Worker(plan, ledger, state, fetcher, runner, writer, retry)
        return ConcurrentWorker(flight, plan, ledger, state, fetcher, runner, writer, retry)


def _runner(
    plan: WorkerPlan,
    ledger: WorkerLedger,
    state: SharedState,
    fetcher: Fetcher | StreamFetcher,
    is_remote: bool,
    errors: ErrorTransport,
    failure: BaseException | None,
) -> Runner:
    """The runner of a worker, which runs samples stage by stage where single ones run on this machine."""
    pipeline, meters, tracer = (
        plan.pipeline,
        state.meters(ledger.number),
        plan.tracer(ledger.number),
    )
    stage_runner: StageRunner | None = None
    if not (pipeline.streams or pipeline.refetches or fetcher.takes_lists or is_remote):
        deferral: Deferral | None = None
        if plan.defers:
            active = state.active
            deferral = Deferral(ledger=ledger, meters=meters, num_workers=lambda: active.count)
        stage_runner = StageRunner(
            pipeline.dataset,
            pipeline.transforms,
            lease=ledger.lease,
            meters=meters,
            deferral=deferral,
            tracer=tracer,
        )
    # Concurrent reads share the dataset's generators.
    roots = plan.generator_roots(plan.fetching.at_once and not is_remote)
    return Runner(
        RunnerSettings(catches=lambda: errors.kinds, stats=plan.stats, failure=failure),
        lease=ledger.lease,
        meters=meters,
        make_randomness=functools.partial(_randomness, plan, roots) if plan.seeds_samples else None,
        stage_runner=stage_runner,
        occurrences=ledger.occurrences,
        tracer=tracer,
    )


def _randomness(plan: WorkerPlan, roots: dict[str, object], seed: int) -> SampleRandomness:
    """The randomness of samples from a seed; threads share the generators, which are not bound there."""
    bind = plan.method == "process"
    owned = OwnedGenerators(roots) if bind else None
    return SampleRandomness(seed, bind_globals=bind, owned=owned)


def _flight(
    plan: WorkerPlan, number: int, state: SharedState, reads: Reads | None
) -> InFlight | None:
    """The reads of a worker that reads several samples, or batches, at once; None: it reads one after the other."""
    dataset, fetching = plan.pipeline.dataset, plan.fetching
    if plan.begins_lists:
        reads = BegunLists(dataset.__beginitems__, _busy_ns)
    elif reads is None and fetching.at_once:
        reads = reads_of(dataset, fetching.concurrency)
    if reads is None:
        return None
    return InFlight(number, reads, state.read_limit(fetching.max_in_flight), fetching)


def _busy_ns() -> int:
    return sum(process_usage([os.getpid()]))
