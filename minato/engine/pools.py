"""The workers of an engine: processes, threads, Ray actors, or the main process itself."""

from __future__ import annotations

import functools
from collections.abc import Callable

from minato._core import WorkerLedger
from minato._system import available_cores
from minato.batching.sample_error import ErrorTransport, wrapped
from minato.batching.writer import BatchWriter
from minato.engine.plan import Plan
from minato.engine.shared_state import SharedState
from minato.engine.worker_context import WorkerContext, initialise, run_worker_process
from minato.engine.worker_parts import collate_of
from minato.scheduling.waiting import ConsumerWait
from minato.transforms import rng_memory
from minato.workers.current_sample import CurrentWork, has_begun
from minato.workers.local_pools import ThreadPool, ThreadSettings
from minato.workers.pool import WorkerPool
from minato.workers.process_pool import ProcessPool, ProcessSettings, announced
from minato.workers.sample_timeout import SampleWatchdog, StackFile
from minato.workers.supervision import RestartPolicy, WorkerRecovery
from minato.workers.worker import Worker

__all__ = ["make_pool"]


def make_pool(
    plan: Plan,
    context: WorkerContext,
    state: SharedState,
    current_work: CurrentWork,
    restart_policy: RestartPolicy,
    wait_stats: ConsumerWait,
) -> WorkerPool:
    """Make the worker pool of a plan; its workers are not started yet."""
    work, ledger, ready = plan.worker, state.ledger, state.ready

    def stop() -> None:
        ledger.shut_down()
        state.active.wake_inactive()

    def may_leave(number: int) -> bool:
        return ledger.draining and not ledger.owns(number)

    def activated(number: int, parent_lives: Callable[[], bool]) -> bool:
        return state.active.wait_until_active(
            number, lambda: ledger.stopping or ledger.draining, parent_lives
        )

    def threads(make_worker: Callable[[int], Worker]) -> ThreadSettings:
        return ThreadSettings(work.most_workers, activated, make_worker, ready, stop, may_leave)

    if work.method == "thread":

        def in_thread(number: int) -> Worker:
            with announced(number, work.most_workers, work.base_seed, work.pipeline.dataset):
                failure = initialise(work, number)
            errors = ErrorTransport((BaseException,), wrapped(f"worker thread {number}"))
            return context.worker(state.worker_ledger(number), state, errors, failure)

        return ThreadPool(threads(in_thread))
    watchdog: SampleWatchdog | None = None
    if plan.failures.sample_timeout_s is not None:
        context.stacks = StackFile()
        watchdog = SampleWatchdog(ledger, plan.failures.sample_timeout_s, context.stacks)

    def writer(end: WorkerLedger) -> BatchWriter:
        return BatchWriter(end, context.store, collate_of(work.pipeline))

    def progress() -> int:
        # A worker that is killed before it has counted its samples has still delivered them in batches.
        return wait_stats.delivered + sum(
            ledger.activity(i).samples for i in range(work.most_workers)
        )

    recover = WorkerRecovery(
        ledger=ledger,
        current_work=current_work,
        make_writer=writer,
        progress=progress,
        restart_policy=restart_policy,
        watchdog=watchdog,
        policy=plan.failures.policy,
        tracer_of=work.tracer,
    )
    if work.method == "ray":
        from minato.ray.actor import ActorSpec
        from minato.ray.pool import ActorGroup, ActorPool, ActorReads

        spec = ActorSpec(
            work.pipeline.dataset,
            work.pipeline.transforms,
            work.most_workers,
            work.base_seed,
            work.init_fn,
        )
        group = ActorGroup(plan.pool.ray_options)

        def with_actor(number: int) -> Worker:
            errors = ErrorTransport((Exception,), wrapped(f"Ray actor {number}"))
            reads = functools.partial(ActorReads, *group.start_actor(number))
            end = state.worker_ledger(number)
            return context.worker(end, state, errors, None, remote_reads=reads)

        return ActorPool(threads(with_actor), group, spec, recover)
    if work.seeds_samples:
        rng_memory.probe_generators()
    pipeline = work.pipeline
    used = (
        pipeline.dataset,
        pipeline.collate_fn,
        work.init_fn,
        *pipeline.transforms.steps,
    )
    from minato.workers.fork_server import fork_server_context  # which Windows cannot import

    processes = fork_server_context(plan.pool.context, used)
    is_forked = processes is not plan.pool.context or processes.get_start_method() == "fork"
    settings = ProcessSettings(
        context=processes,
        num_workers=work.most_workers,
        first=plan.pool.first,
        # A fork is fast. Other processes first import torch, which occupies a core.
        max_starting=work.most_workers if is_forked else max(int(available_cores()), 1),
        target=run_worker_process,
        args=(context,),
    )
    return ProcessPool(
        settings,
        ready=ready,
        stop=stop,
        may_leave=may_leave,
        recover=recover,
        has_work=lambda: ledger.unclaimed() > 0,
        has_begun=functools.partial(has_begun, ledger),
        watchdog=watchdog,
    )
