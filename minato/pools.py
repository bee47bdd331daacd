"""The workers of an engine: in processes, in threads, in a Ray cluster, or in line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

from minato._core.clock import now_ns
from minato._core.codes import STARTING
from minato._core.ledger import Ledger
from minato._core.wait import Gate
from minato._machine import available_cores
from minato._postponed import not_the_end
from minato.assembler.transport import LocalStore
from minato.assembler.writer import BatchWriter
from minato.chain import generators
from minato.plan import Plan
from minato.scheduler.burial import Burial
from minato.scheduler.cluster import ActorPool, Crew, wrapped_in_actor
from minato.scheduler.deaths import Deaths
from minato.scheduler.flow import Flow
from minato.scheduler.in_hand import has_begun
from minato.scheduler.local import InlinePool, ThreadPool, wrapped_in_thread
from minato.scheduler.overdue import Overdue, StackFile
from minato.scheduler.process import (
    ProcessPool,
    announced,
    enter_worker_process,
    parent_watch,
    wrapped_in_process,
)
from minato.scheduler.remote import Work
from minato.scheduler.roster import Roster
from minato.scheduler.worker import Worker
from minato.workplace import Workplace

__all__ = ["make_pool"]


def make_pool(
    plan: Plan,
    workplace: Workplace,
    ledger: Ledger,
    ready: Gate,
    roster: Roster,
    deaths: Deaths,
    flow: Flow,
) -> ProcessPool | ThreadPool | InlinePool:
    """The workers that a plan asks for, not yet started."""
    if plan.num_workers == 0:

        def in_line(number: int) -> Worker:
            _restore(plan, number)
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
        return workplace.roster(ledger, number).stand_by(
            number, lambda: ledger.stopping or ledger.draining, parent_lives
        )

    if plan.worker_method == "thread":

        def in_thread(number: int, consumer_lives: Callable[[], bool]) -> Worker | None:
            if not wanted(number, consumer_lives):
                return None
            with announced(number, plan.all_workers, plan.base_seed, plan.dataset):
                failure = _initialise(plan, number)
            return workplace.worker(
                number, ledger, wrapped_in_thread(number), failure, BaseException
            )

        return ThreadPool(plan.all_workers, in_thread, ready, stop, may_leave)
    overdue: Overdue | None = None
    if plan.sample_timeout_s is not None:
        workplace.stacks = StackFile()
        overdue = Overdue(ledger, plan.sample_timeout_s, workplace.stacks)

    def sink(number: int) -> BatchWriter:
        return workplace.writer(number, ledger, lambda error: error)

    buried = Burial(
        ledger,
        functools.partial(workplace.read_keys, ledger),
        plan.chain.names,
        sink,
        plan.all_workers,
        deaths,
        flow,
        overdue,
        plan.policy,
        plan.worker_tracer,
    )
    if plan.worker_method == "ray":
        work = Work(plan.dataset, plan.chain, plan.all_workers, plan.base_seed, plan.worker_init_fn)
        crew = Crew(work, plan.ray_options)

        def with_actor(number: int, consumer_lives: Callable[[], bool]) -> Worker | None:
            if not wanted(number, consumer_lives):
                return None
            wrap = wrapped_in_actor(number)
            return workplace.worker(number, ledger, wrap, None, Exception, hired=crew.hire(number))

        return ActorPool(crew, buried, plan.all_workers, with_actor, ready, stop, may_leave)
    if plan.seeds_samples:
        generators.examine()
    is_forked = plan.context.get_start_method() == "fork"
    return ProcessPool(
        plan.context,
        plan.all_workers,
        plan.num_workers,
        _run_worker_process,
        (workplace,),
        ready,
        stop,
        may_leave,
        buried,
        lambda: ledger.unclaimed() > 0,
        functools.partial(has_begun, ledger),
        # Forking is quick. Others import torch first, which takes a core.
        plan.all_workers if is_forked else max(int(available_cores()), 1),
        overdue,
        plan.standby_workers,
    )


def _run_worker_process(number: int, workplace: Workplace) -> None:
    parent_lives = parent_watch()
    plan = workplace.plan
    try:
        enter_worker_process(number, plan.all_workers, plan.base_seed, plan.dataset)
        if workplace.stacks is not None:
            workplace.stacks.listen()
        ledger = Ledger(workplace.segment.array, None, workplace.segment.descriptor)
        if not workplace.roster(ledger, number).stand_by(
            number, lambda: ledger.stopping or ledger.draining, parent_lives
        ):
            return
        lease = ledger.lease_words(number)
        if plan.worker_init_fn is not None:
            lease[1], lease[2] = now_ns(), STARTING
        failure = _initialise(plan, number)
        lease[2] = -1
        wrap = wrapped_in_process(number)
        worker = workplace.worker(number, ledger, wrap, failure, BaseException)
        worker.loop(parent_lives)
        worker.close()
    except KeyboardInterrupt:
        pass  # the consumer was interrupted too, and says so


def _initialise(plan: Plan, number: int) -> Exception | None:
    try:
        if plan.worker_init_fn is not None:
            plan.worker_init_fn(number)
        _restore(plan, number)
    except StopIteration as stop:
        return not_the_end("worker_init_fn", stop)
    except Exception as error:
        return error
    return None


def _restore(plan: Plan, number: int) -> None:
    """Give this worker's copy of the dataset the state that an earlier run left it in."""
    state = None if plan.replicas is None else plan.replicas.each[number].dataset
    if state is not None:
        plan.dataset.load_state_dict(state)
