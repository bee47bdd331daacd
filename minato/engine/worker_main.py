"""What a worker process runs. It imports no more than a worker needs: processes that are not forked load it anew."""

from __future__ import annotations

from minato._core.clock import now_ns
from minato._core.codes import STARTING
from minato._core.ledger import Ledger
from minato._support.exceptions import not_the_end
from minato.engine.plan import Plan
from minato.engine.worker_context import WorkerContext
from minato.workers.exceptions import wrapped
from minato.workers.process_pool import enter_worker_process, parent_watch

__all__ = ["initialise", "restore", "run_worker_process"]


def run_worker_process(number: int, workplace: WorkerContext) -> None:
    """Work as worker ``number`` until there is nothing left to do, or the consumer ends."""
    parent_lives = parent_watch()
    plan = workplace.plan
    try:
        enter_worker_process(number, plan.most_workers, plan.base_seed, plan.dataset)
        if workplace.stacks is not None:
            workplace.stacks.listen()
        ledger = Ledger(workplace.segment.array, None, workplace.segment.descriptor)
        if not workplace.roster(ledger).stand_by(
            number, lambda: ledger.stopping or ledger.draining, parent_lives
        ):
            return
        lease = ledger.lease_words(number)
        if plan.worker_init_fn is not None:
            lease[1], lease[2] = now_ns(), STARTING
        failure = initialise(plan, number)
        lease[2] = -1
        wrap = wrapped(f"worker process {number}", in_process=True)
        worker = workplace.worker(number, ledger, wrap, failure, BaseException)
        worker.loop(parent_lives)
        worker.close()
    except KeyboardInterrupt:
        pass  # the consumer was interrupted too, and says so


def initialise(plan: Plan, number: int) -> Exception | None:
    """Prepare worker ``number``; what goes wrong is the failure of its first sample."""
    try:
        if plan.worker_init_fn is not None:
            plan.worker_init_fn(number)
        restore(plan, number)
    except StopIteration as stop:
        return not_the_end("worker_init_fn", stop)
    except Exception as error:
        return error
    return None


def restore(plan: Plan, number: int) -> None:
    """Give this worker's copy of the dataset the state that an earlier run left it in."""
    state = None if plan.replicas is None else plan.replicas.each[number].dataset
    if state is not None:
        plan.dataset.load_state_dict(state)
