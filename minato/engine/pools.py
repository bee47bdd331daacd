"""The workers of an engine: processes, threads, Ray actors, or the main process itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

from minato._system import available_cores
from minato.batching.serialization import LocalStore
from minato.batching.writer import BatchWriter
from minato.engine.plan import Plan
from minato.engine.shared_state import SharedState
from minato.engine.worker_context import WorkerContext
from minato.engine.worker_main import initialise, restore, run_worker_process
from minato.scheduling.wait_stats import ConsumerWait
from minato.transforms import rng_memory
from minato.workers.current_sample import has_begun
from minato.workers.exceptions import wrapped
from minato.workers.local_pools import InlinePool, ThreadPool
from minato.workers.pool import WorkerPool
from minato.workers.process_pool import ProcessPool, announced
from minato.workers.sample_timeout import SampleWatchdog, StackFile
from minato.workers.supervision import RestartPolicy, WorkerRecovery
from minato.workers.worker import Worker

__all__ = ["make_pool"]


def make_pool(
    plan: Plan,
    context: WorkerContext,
    state: SharedState,
    restart_policy: RestartPolicy,
    wait_stats: ConsumerWait,
) -> WorkerPool:
    """Make the worker pool of a plan; its workers are not started yet."""
    work, ledger, ready = plan.worker, state.ledger, state.ready
    if work.in_main_process:

        def in_main_process(number: int) -> Worker:
            restore(work, number)
            return context.worker(number, state, lambda error: error, None, BaseException)

        def give_back() -> None:
            ledger.release(0)
            cast(LocalStore, context.store).sweep(ledger)

        return InlinePool(in_main_process, give_back)

    def stop() -> None:
        ledger.shut_down()
        state.active.wake_inactive()

    def may_leave(number: int) -> bool:
        return ledger.draining and not ledger.owns(number)

    def wanted(number: int, parent_lives: Callable[[], bool]) -> bool:
        return state.active.wait_until_active(
            number, lambda: ledger.stopping or ledger.draining, parent_lives
        )

    if work.method == "thread":

        def in_thread(number: int, consumer_lives: Callable[[], bool]) -> Worker | None:
            if not wanted(number, consumer_lives):
                return None
            with announced(number, work.count, work.base_seed, work.pipeline.dataset):
                failure = initialise(work, number)
            return context.worker(
                number, state, wrapped(f"worker thread {number}"), failure, BaseException
            )

        return ThreadPool(work.count, in_thread, ready, stop, may_leave)
    watchdog: SampleWatchdog | None = None
    if plan.failures.sample_timeout_s is not None:
        context.stacks = StackFile()
        watchdog = SampleWatchdog(ledger, plan.failures.sample_timeout_s, context.stacks)

    def sink(number: int) -> BatchWriter:
        return context.writer(number, ledger, lambda error: error)

    recover = WorkerRecovery(
        ledger,
        functools.partial(context.read_indices, ledger),
        work.pipeline.transforms.names,
        sink,
        work.count,
        restart_policy,
        wait_stats,
        watchdog,
        plan.failures.policy,
        work.tracer,
    )
    if work.method == "ray":
        from minato.ray.actor import ActorSpec
        from minato.ray.pool import ActorGroup, ActorPool

        spec = ActorSpec(
            work.pipeline.dataset,
            work.pipeline.transforms,
            work.count,
            work.base_seed,
            work.init_fn,
        )
        group = ActorGroup(spec, plan.pool.ray_options)

        def with_actor(number: int, consumer_lives: Callable[[], bool]) -> Worker | None:
            if not wanted(number, consumer_lives):
                return None
            wrap = wrapped(f"Ray actor {number}")
            return context.worker(
                number, state, wrap, None, Exception, actor=group.start_actor(number)
            )

        return ActorPool(group, recover, work.count, with_actor, ready, stop, may_leave)
    if work.seeds_samples:
        rng_memory.probe_generators()
    is_forked = plan.pool.context.get_start_method() == "fork"
    return ProcessPool(
        plan.pool.context,
        work.count,
        plan.pool.first,
        run_worker_process,
        (context,),
        ready,
        stop,
        may_leave,
        recover,
        lambda: ledger.unclaimed() > 0,
        functools.partial(has_begun, ledger),
        # Forking is quick. Other start methods import torch first, which uses a whole core.
        work.count if is_forked else max(int(available_cores()), 1),
        watchdog,
    )
