"""The workers that a plan asks for: processes, threads, or Ray actors."""

from __future__ import annotations

import functools

from minato._compat import preload_in_server
from minato._system import available_cores
from minato.engine.plan import Plan
from minato.errors import log
from minato.transforms import rng_memory
from minato.workers.pools import ProcessPool, ThreadPool, WorkerPool
from minato.workers.shared_state import SharedState
from minato.workers.supervision import WorkerRecovery
from minato.workers.worker_process import WorkerContext, run_worker_process

__all__ = ["make_pool"]


def make_pool(
    plan: Plan, context: WorkerContext, state: SharedState, recovery: WorkerRecovery
) -> WorkerPool:
    """Make the workers of a plan, which are not started yet."""
    work = plan.worker
    if work.method == "thread":
        return ThreadPool(state, context)
    if work.method == "ray":
        from minato.ray.pool import ActorPool

        return ActorPool(state, context, recovery, plan.options.actor_options)
    return _processes(plan, context, state, recovery)


def _processes(
    plan: Plan, context: WorkerContext, state: SharedState, recovery: WorkerRecovery
) -> ProcessPool:
    work, starts = plan.worker, plan.context
    if work.seeds_samples:
        rng_memory.probe_generators()
    method = starts.get_start_method()
    if method == "forkserver":
        preload_in_server(run_worker_process.__module__)
        log("%d workers start from the fork server of multiprocessing", work.most_workers)
    return ProcessPool(
        state,
        recovery,
        functools.partial(run_worker_process, context=context),
        context=starts,
        num_workers=work.most_workers,
        first=plan.first,
        # A fork is fast. Other processes first import the script, or even torch, which occupies a core.
        max_starting=work.most_workers if method == "fork" else max(int(available_cores()), 1),
    )
