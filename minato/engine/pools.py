"""The workers of an engine: in processes, in threads, in a Ray cluster, or in line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

from minato._core.ledger import Ledger
from minato._core.wait import EventCount
from minato._system import available_cores
from minato.batching.serialization import LocalStore
from minato.batching.writer import BatchWriter
from minato.engine.plan import Plan
from minato.engine.worker_context import WorkerContext
from minato.engine.worker_main import initialise, restore, run_worker_process
from minato.scheduling.wait_stats import ConsumerWait
from minato.transforms import rng_memory
from minato.workers.active_workers import ActiveWorkers
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
    workplace: WorkerContext,
    ledger: Ledger,
    ready: EventCount,
    roster: ActiveWorkers,
    restart_policy: RestartPolicy,
    flow: ConsumerWait,
) -> WorkerPool:
    """The workers that a plan asks for, not yet started."""
    if plan.num_workers == 0:

        def in_line(number: int) -> Worker:
            restore(plan, number)
            return workplace.worker(
                number, ledger, lambda error: error, None, BaseException, in_line=True
            )

        def give_back() -> None:
            ledger.release(0)
            cast(LocalStore, workplace.store).sweep(ledger)

        return InlinePool(in_line, give_back)

    def stop() -> None:
        ledger.shut_down()
        roster.dismiss()

    def may_leave(number: int) -> bool:
        return ledger.draining and not ledger.owns(number)

    def wanted(number: int, parent_lives: Callable[[], bool]) -> bool:
        return workplace.roster(ledger).stand_by(
            number, lambda: ledger.stopping or ledger.draining, parent_lives
        )

    if plan.worker_method == "thread":

        def in_thread(number: int, consumer_lives: Callable[[], bool]) -> Worker | None:
            if not wanted(number, consumer_lives):
                return None
            with announced(number, plan.most_workers, plan.base_seed, plan.dataset):
                failure = initialise(plan, number)
            return workplace.worker(
                number, ledger, wrapped(f"worker thread {number}"), failure, BaseException
            )

        return ThreadPool(plan.most_workers, in_thread, ready, stop, may_leave)
    watchdog: SampleWatchdog | None = None
    if plan.sample_timeout_s is not None:
        workplace.stacks = StackFile()
        watchdog = SampleWatchdog(ledger, plan.sample_timeout_s, workplace.stacks)

    def sink(number: int) -> BatchWriter:
        return workplace.writer(number, ledger, lambda error: error)

    recover = WorkerRecovery(
        ledger,
        functools.partial(workplace.read_keys, ledger),
        plan.chain.names,
        sink,
        plan.most_workers,
        restart_policy,
        flow,
        watchdog,
        plan.policy,
        plan.worker_tracer,
    )
    if plan.worker_method == "ray":
        from minato.ray.actor import ActorSpec
        from minato.ray.pool import ActorGroup, ActorPool

        spec = ActorSpec(
            plan.dataset, plan.chain, plan.most_workers, plan.base_seed, plan.worker_init_fn
        )
        group = ActorGroup(spec, plan.ray_options)

        def with_actor(number: int, consumer_lives: Callable[[], bool]) -> Worker | None:
            if not wanted(number, consumer_lives):
                return None
            wrap = wrapped(f"Ray actor {number}")
            return workplace.worker(
                number, ledger, wrap, None, Exception, hired=group.start_actor(number)
            )

        return ActorPool(group, recover, plan.most_workers, with_actor, ready, stop, may_leave)
    if plan.seeds_samples:
        rng_memory.probe_generators()
    is_forked = plan.context.get_start_method() == "fork"
    return ProcessPool(
        plan.context,
        plan.most_workers,
        plan.num_workers,
        run_worker_process,
        (workplace,),
        ready,
        stop,
        may_leave,
        recover,
        lambda: ledger.unclaimed() > 0,
        functools.partial(has_begun, ledger),
        # Forking is quick. Others import torch first, which takes a core.
        plan.most_workers if is_forked else max(int(available_cores()), 1),
        watchdog,
    )
