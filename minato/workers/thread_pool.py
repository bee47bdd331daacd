"""Workers that are threads of this process: when they start and end."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable

from minato._support.threads import start_thread
from minato.batching.sample_error import ErrorTransport, wrapped
from minato.workers.pool import CpuUsage, WorkerPool, thread_usage
from minato.workers.shared_state import SharedState
from minato.workers.worker import Worker
from minato.workers.worker_process import WorkerContext, announced, initialise

__all__ = ["ThreadPool"]

_GRACE_S = 4.0
"""How long a shutdown waits for the threads; a thread that hangs in user code cannot be ended."""


class ThreadPool(WorkerPool):
    """Starts worker threads and ends them.

    A thread that sleeps refers neither to the pool nor to its worker: both may belong to a cycle through the dataset,
    which the garbage collector can free then.

    Args:
        state: What the workers share with the training loop.
        context: Makes the workers.
        stop: Asks the workers to exit, in place of ``state.stop``; it must not refer to objects of the user's.

    Attributes:
        context: The same.
    """

    def __init__(
        self,
        state: SharedState,
        context: WorkerContext,
        stop: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(state)
        self.context = context
        self._workers: dict[threading.Thread, Worker] = {}
        self.threads = [self._make(number) for number in range(context.plan.most_workers)]
        self.shut_down = functools.partial(
            _end_threads, stop or state.stop, self.threads, os.getpid()
        )

    def _make(self, number: int) -> threading.Thread:
        name = f"minato-{number}"
        arguments = weakref.ref(self), number, self.state
        return threading.Thread(target=_run_thread, args=arguments, name=name, daemon=True)

    def start(self, enough: Callable[[], object] | None = None) -> None:
        """Start all threads, without a call of ``enough``: threads start fast."""
        for thread in self.threads:
            start_thread(thread)

    def usage(self) -> CpuUsage:
        """Processor time of all workers."""
        return thread_usage(
            thread.native_id for thread in self.threads if thread.native_id is not None
        )

    def work(self, number: int) -> Callable[[], bool] | None:
        """Work as worker ``number``, in its thread, until there is nothing to do; returns as ``Worker.work``."""
        me = threading.current_thread()
        worker = self._workers.get(me)
        if worker is None:
            worker = self._workers[me] = self.make_worker(number)
        return worker.work(_process_lives)

    def make_worker(self, number: int) -> Worker:
        """Make worker ``number``, in its thread."""
        plan = self.context.plan
        with announced(number, plan.most_workers, plan.base_seed, plan.pipeline.dataset):
            failure = initialise(plan, number)
        errors = ErrorTransport((BaseException,), wrapped(f"worker thread {number}"))
        return self.context.worker(self.state.worker_ledger(number), self.state, errors, failure)

    def leave(self) -> None:
        """End what the worker of this thread has started."""
        worker = self._workers.pop(threading.current_thread(), None)
        if worker is not None:
            worker.close()

    def check(self) -> None:
        """Raise RuntimeError if a thread has ended unexpectedly, or this is a forked child, which has no threads."""
        super().check()
        ended = [
            thread.name
            for number, thread in enumerate(self.threads)
            if not (thread.is_alive() or self.may_leave(number))
        ]
        if ended:
            raise RuntimeError(f"DataLoader worker thread(s) {', '.join(ended)} ended unexpectedly")

    def may_leave(self, number: int) -> bool:
        """Whether the thread of worker ``number`` may end by itself."""
        return self.state.may_leave(number)

    def replace(self, number: int) -> None:
        """Start a new thread for worker ``number``, whose own has ended."""
        self.threads[number] = self._make(number)
        start_thread(self.threads[number])


def _process_lives() -> bool:
    return True  # even if its main thread has ended: another thread may train


def _run_thread(
    reference: weakref.ref[ThreadPool],
    number: int,
    state: SharedState,
) -> None:
    """Be worker ``number`` of a pool as long as that lives."""
    try:
        if state.wait_until_active(number, _process_lives):
            while (rest := _work(reference, number)) is not None and rest():
                pass
    finally:
        if (pool := reference()) is not None:
            pool.leave()
        state.ready.notify()  # wake the consumer, which then sees that this thread has ended


def _work(reference: weakref.ref[ThreadPool], number: int) -> Callable[[], bool] | None:
    pool = reference()
    return None if pool is None else pool.work(number)


def _end_threads(stop: Callable[[], None], threads: list[threading.Thread], owner: int) -> bool:
    """End the threads of a pool; returns whether all have ended."""
    if os.getpid() != owner:
        return False  # a child that the user forked has a copy of the pool, but no threads
    stop()
    deadline = time.monotonic() + _GRACE_S
    for thread in threads:
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in threads)
