"""The main function of a worker process. It imports only what a worker needs: spawned processes import it again."""

from __future__ import annotations

from minato._core.clock import now_ns
from minato._core.codes import STARTING
from minato._support.exceptions import not_the_end
from minato.engine.plan import WorkerPlan
from minato.engine.shared_state import SharedState
from minato.engine.worker_context import WorkerContext
from minato.workers.exceptions import wrapped
from minato.workers.process_pool import enter_worker_process, parent_watch

__all__ = ["initialise", "restore", "run_worker_process"]


def run_worker_process(number: int, context: WorkerContext) -> None:
    """Run as worker ``number`` until nothing is left to do, or the training process ends."""
    parent_lives = parent_watch()
    plan = context.plan
    try:
        enter_worker_process(number, plan.count, plan.base_seed, plan.pipeline.dataset)
        if context.stacks is not None:
            context.stacks.listen()
        state = SharedState.attach(context.layout)
        ledger = state.ledger
        if not state.active.wait_until_active(
            number, lambda: ledger.stopping or ledger.draining, parent_lives
        ):
            return
        lease = ledger.lease_words(number)
        if plan.init_fn is not None:
            lease[1], lease[2] = now_ns(), STARTING
        failure = initialise(plan, number)
        lease[2] = -1
        wrap = wrapped(f"worker process {number}", in_process=True)
        worker = context.worker(number, state, wrap, failure, BaseException)
        worker.loop(parent_lives)
        worker.close()
    except KeyboardInterrupt:
        pass  # the training process was interrupted too, and reports it


def initialise(plan: WorkerPlan, number: int) -> Exception | None:
    """Prepare worker ``number``; returns its error, which becomes that of its first sample."""
    try:
        if plan.init_fn is not None:
            plan.init_fn(number)
        restore(plan, number)
    except StopIteration as stop:
        return not_the_end("worker_init_fn", stop)
    except Exception as error:
        return error
    return None


def restore(plan: WorkerPlan, number: int) -> None:
    """Load the state of this worker's copy of the dataset at the end of an earlier epoch."""
    state = None if plan.dataset_states is None else plan.dataset_states.each[number].dataset
    if state is not None:
        plan.pipeline.dataset.load_state_dict(state)
