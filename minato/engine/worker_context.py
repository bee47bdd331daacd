"""The context that travels to a worker, the worker made of it, and the main function of a worker process.

It imports only what a worker needs: spawned processes import it again.
"""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minato._compat import forget_dataset, serves_other_processes
from minato._core import Lease, WorkerLedger, now_ns
from minato._core.codes import STARTING
from minato._core.segment import Segment
from minato._fork_safety import end_copy, renew_in_children
from minato._support.pickling import ForChild, Snapshot
from minato.batching.sample_error import ErrorTransport, wrapped
from minato.batching.serialization import Store
from minato.batching.writer import BatchWriter
from minato.engine.plan import WorkerPlan
from minato.engine.shared_state import SharedLayout, SharedState
from minato.engine.worker_parts import collate_of, fetcher_of, generators_of, restore
from minato.errors import not_the_end
from minato.observe.meters import Meters
from minato.transforms.compose import Transforms
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import SampleRandomness
from minato.workers.concurrent import ConcurrentFetch, ConcurrentWorker
from minato.workers.deferral import Deferral
from minato.workers.error_policy import FailureHandler, SampleRetry
from minato.workers.fetch import Fetcher
from minato.workers.pool import process_usage
from minato.workers.process_pool import enter_worker_process, parent_watch
from minato.workers.reads import BegunLists, Reads, reads_of
from minato.workers.runner import Runner, RunnerSettings
from minato.workers.sample_timeout import StackFile
from minato.workers.staged_runner import StageRunner
from minato.workers.worker import Worker, WorkerSettings, WorkQueue, run_again

__all__ = ["WorkerContext", "initialise", "restore", "run_worker_process"]


_SERVING_S = 0.02
"""Interval between two looks whether a worker that has sent descriptors may end."""


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
        failure: BaseException | None,
        remote_reads: Callable[[Lease, Meters], Reads] | None = None,
    ) -> Worker:
        """Make a worker.

        Args:
            ledger: Its end of the ledger.
            errors: How exceptions get to the training loop.
            failure: The error of ``worker_init_fn``, or None.
            remote_reads: Makes reads that return complete samples of another machine, from lease and meters.
        """
        plan, pipeline, number = self.plan, self.plan.pipeline, ledger.number
        # Concurrent reads share the dataset's generators.
        at_once = plan.fetching.at_once and remote_reads is None
        roots = generators_of(plan, at_once)

        def make_randomness(seed: int) -> SampleRandomness:
            bind = plan.method == "process"
            owned = OwnedGenerators(roots) if bind else None
            return SampleRandomness(seed, bind_globals=bind, owned=owned)

        lease, meters = ledger.lease, state.meters(number)
        dataset, transforms = pipeline.dataset, pipeline.transforms
        reads: Reads | None = None
        if remote_reads is not None:
            reads = dataset = remote_reads(lease, meters)
            transforms = Transforms()  # they run on the other machine
        active_workers = state.active
        tracer = plan.tracer(number)
        stage_runner: StageRunner | None = None
        deferral: Deferral | None = None
        fetcher = fetcher_of(plan, number, (dataset, transforms))
        by_samples = not (pipeline.streams or pipeline.refetches or fetcher.takes_lists)
        if by_samples and reads is None:
            if plan.defers:
                deferral = Deferral(
                    ledger=ledger, meters=meters, num_workers=lambda: active_workers.count
                )
            stage_runner = StageRunner(
                pipeline.dataset,
                pipeline.transforms,
                lease=lease,
                meters=meters,
                deferral=deferral,
                tracer=tracer,
            )
        runner = Runner(
            RunnerSettings(catches=lambda: errors.kinds, stats=plan.stats, failure=failure),
            lease=lease,
            meters=meters,
            make_randomness=make_randomness if plan.seeds_samples else None,
            stage_runner=stage_runner,
            occurrences=ledger.occurrences,
            tracer=tracer,
        )
        sample_retry: SampleRetry | None = None
        if self.policy is not None and failure is None and isinstance(fetcher, Fetcher):
            sample_retry = SampleRetry(
                number,
                policy=self.policy,
                runner=runner,
                fetcher=fetcher,
                transforms=pipeline.transforms,
                lease=lease,
            )
        settings = WorkerSettings(plan.order.slow_to_newest, plan.round_robin)
        queue = WorkQueue(ledger, state.work, active_workers)
        writer = BatchWriter(
            ledger,
            self.store,
            collate_of(pipeline, runner.bound_to_batch),
            errors=errors,
            run_again=(
                functools.partial(run_again, ledger, runner, fetcher, sample_retry)
                if isinstance(fetcher, Fetcher)
                else None
            ),
            handover=state.handover if plan.in_processes else None,
            skips=sample_retry is not None,
            tracer=tracer,
        )
        fetching = plan.fetching
        if plan.begins_lists:
            reads = BegunLists(dataset.__beginitems__, _busy_ns)
        if (fetching.at_once or reads is not None) and failure is None:
            return ConcurrentWorker(
                settings,
                concurrency=ConcurrentFetch(
                    reads=reads or reads_of(dataset, fetching.concurrency),
                    transforms=transforms,
                    binds_randomness=plan.seeds_samples,
                    read_limit=state.read_limit(fetching.max_in_flight),
                    options=fetching,
                ),
                queue=queue,
                fetcher=fetcher,
                runner=runner,
                writer=writer,
                sample_retry=sample_retry,
                tracer=tracer,
            )
        return Worker(
            settings,
            queue=queue,
            fetcher=fetcher,
            runner=runner,
            writer=writer,
            deferral=deferral,
            sample_retry=sample_retry,
            tracer=tracer,
        )


def _busy_ns() -> int:
    return sum(process_usage([os.getpid()]))


def run_worker_process(number: int, context: WorkerContext) -> None:
    """Run as worker ``number`` until nothing is left to do, or the training process ends."""
    # A collection would write to every object, and so copy the pages that a forked worker shares with its parent.
    gc.freeze()
    # A copy of this worker that a sample forks must not write to batches, until it ends.
    renew_in_children(context.store.segment, Segment.separate)
    try:
        _work(number, context, parent_watch())
    except KeyboardInterrupt:
        pass  # the training process was interrupted too, and reports it
    finally:
        # The process ends without a last collection: the dataset's files are flushed as it is destroyed here.
        forget_dataset()
        vars(context).clear()
        gc.collect()


def _work(number: int, context: WorkerContext, parent_lives: Callable[[], bool]) -> None:
    plan = context.plan
    enter_worker_process(number, plan.most_workers, plan.base_seed, plan.pipeline.dataset)
    if context.stacks is not None:
        context.stacks.listen()
    state = SharedState.attach(context.layout)
    ledger = state.worker_ledger(number)
    if not state.active.wait_until_active(
        number, lambda: ledger.stopping or ledger.draining, parent_lives
    ):
        return
    if plan.init_fn is not None:
        ledger.lease.enter(STARTING, now_ns())
    failure = initialise(plan, number)
    ledger.lease.step = -1
    wrap = wrapped(f"worker process {number}", in_process=True)
    errors = ErrorTransport((BaseException,), wrap)
    worker = context.worker(ledger, state, errors, failure)
    worker.loop(parent_lives)
    worker.close()
    # What the training loop has not unpickled yet may need this process: an end of a pipe, memory of a device.
    while serves_other_processes() and not ledger.stopping and parent_lives():
        time.sleep(_SERVING_S)


def initialise(plan: WorkerPlan, number: int) -> Exception | None:
    """Prepare worker ``number``; returns its error, which becomes that of its first sample."""
    owner = os.getpid()
    failure: Exception | None = None
    try:
        if plan.init_fn is not None:
            plan.init_fn(number)
        restore(plan, number)
    except StopIteration as stop:
        failure = not_the_end("worker_init_fn", stop)
    except Exception as error:
        failure = error
    except BaseException as error:
        end_copy(owner, error)
        raise
    end_copy(owner, failure)
    return failure
