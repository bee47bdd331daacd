"""The workers of an engine, in processes or threads: when they start, are replaced, and end."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, cast

from minato._compat import AsWorker, close_ends_of_parent, forget_child_processes
from minato._core.limits import explaining_limits
from minato._fork_safety import check_owner, forget_in_children, signals_deferred, starting_worker
from minato._support.pickling import holding_descriptors, is_unguarded, named_as_worker
from minato._support.threads import exiting, living, set_is_over, start_thread
from minato._system import CpuUsage, process_usage, thread_usage
from minato.batching.blobs import ErrorTransport, wrapped
from minato.errors import CLOSED, unguarded_error, warn
from minato.observe.tracer import in_profile
from minato.workers.hosting import ReadingWorker
from minato.workers.reading import Host
from minato.workers.shared_state import SharedState
from minato.workers.supervision import UNREADABLE, ExitWatch, StartedProcesses, WorkerRecovery
from minato.workers.worker import Worker
from minato.workers.worker_process import WorkerContext, host_of, initialise

_ARRIVAL_S = 2.0
"""A worker that has not begun after this time does not wait for a core, and further workers start."""
_SERVER_ENDS_S = 10.0
"""How long a start is tried again while its fork server, which was killed, ends."""
_LOOK_S = 0.02  # interval between two checks whether a starting worker has begun
_GRACE_S = 4.0
"""How long a shutdown waits for the threads; a thread that hangs in user code cannot be ended."""


class WorkerPool(ABC):
    """The workers of an engine: processes of this machine or threads, which are started, watched and ended together.

    ``shut_down`` ends all, and returns whether all have ended; ``end_rest`` ends what it has left when it was
    interrupted. Nothing that they refer to refers to the loader.
    """

    processes: Sequence[BaseProcess] = ()
    threads: Sequence[threading.Thread] = ()
    shut_down: Callable[[], bool]
    end_rest: Callable[[], object]

    def __init__(self, state: SharedState) -> None:
        self.state = state
        self._owner = os.getpid()

    @abstractmethod
    def start(self, enough: Callable[[], object] | None = None) -> None:
        """Start the workers; once ``enough``, which is called between slow starts, holds, others may start later."""

    @abstractmethod
    def usage(self) -> CpuUsage:
        """Processor time of all workers."""

    def grow(self, count: int) -> None:
        """Start those of the first ``count`` workers that have not been started; by default all have."""
        return

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until the ready events exceed ``seen``."""
        with in_profile("minato: wait for workers"):
            self.state.ready.wait(seen, timeout_s)

    def check(self) -> None:
        """Replace dead workers, or raise torch's RuntimeError, also in a forked child, to which they do not belong."""
        check_owner(self._owner)
        if self.is_over and not exiting():
            raise RuntimeError(CLOSED)

    @property
    def is_over(self) -> bool:
        """Whether the workers were asked to exit, whatever work is left."""
        return self.state.ledger.stopping

    def check_early(self) -> None:
        """Replace dead workers that there is work for before the loop waits, where a start takes time."""
        return


# ---- processes ----


class ProcessPool(WorkerPool):
    """Starts worker processes, replaces those that die, and ends them.

    ``start`` starts ``first`` processes, with ``fork`` all; ``max_starting`` start at the same time: more would compete
    for the same cores.
    """

    def __init__(
        self,
        state: SharedState,
        recovery: WorkerRecovery,
        run: Callable[[int], None],
        *,
        context: BaseContext,
        num_workers: int,
        first: int,
        max_starting: int,
    ) -> None:
        super().__init__(state)
        self._recover = recovery
        self._watchdog = recovery.watchdog
        self._run, self._context, self._max_starting = run, context, max_starting
        self._starting: dict[int, float] = {}  # start times of workers that have not begun
        self._forks = context.get_start_method() == "fork"
        self._to_start = deque(range(num_workers if self._forks else first))
        self._unwatched = False
        look_s = None if self._watchdog is None else self._watchdog.interval_s
        self._watch = ExitWatch(context, state.ready.notify, look_s)
        self._started = StartedProcesses(state.stop, self._watch)
        self.shut_down = self.end_rest = self._started.shut_down
        self.processes: list[BaseProcess] = [self._make(number) for number in range(num_workers)]
        _POOLS.add(self)

    def _make(self, number: int) -> BaseProcess:
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]  # typeshed: its subclasses
            target=self._run, args=(number,), daemon=True
        )
        return process

    def start(self, enough: Callable[[], object] | None = None) -> None:
        """Start one process after the other; each works at once.

        Once ``enough`` holds, or the largest number is starting, ``wait`` starts the others. With ``fork`` all start
        now: a later fork would hand on what the program has opened, locked or begun since.
        """
        while self._to_start and (
            self._forks or enough is None or (self._has_room() and not enough())
        ):
            self._start_next()
        if not self._to_start:
            self._watch_all()

    def grow(self, count: int) -> None:
        for number in range(count):
            if self.processes[number].pid is None:
                self._start(number)
        self._watch_all()

    def _start_next(self) -> None:
        self._start(self._to_start[0])
        self._starting[self._to_start.popleft()] = time.monotonic()

    def _has_room(self) -> bool:
        since = time.monotonic() - _ARRIVAL_S
        self._starting = {
            number: started
            for number, started in self._starting.items()
            if started > since and not self.state.has_begun(number)
        }
        return len(self._starting) < self._max_starting

    def _start(self, number: int) -> None:
        process = self.processes[number]
        if process.pid is None:
            self._started.processes[number] = process  # first: a signal may interrupt the start
            self._launch(process)
        self._watch.add(number, process)
        self._unwatched = True

    def _launch(self, process: BaseProcess) -> None:
        with explaining_limits("start a worker process"):
            if self._forks:
                # Python ignores what a signal's handler raises in a callback that is registered around forks.
                with signals_deferred(), starting_worker(self._started.borrower):
                    process.start()
                return
            pause_s = _LOOK_S
            while True:
                try:
                    with holding_descriptors(), named_as_worker(process):
                        process.start()
                    return
                except (EOFError, ConnectionError) as error:
                    # From Python 3.13 on the server itself imports the main module.
                    if is_unguarded():
                        raise unguarded_error(process.pid) from None
                    if pause_s > _SERVER_ENDS_S:
                        raise RuntimeError(
                            "cannot start a worker process: the fork server ends whenever it is asked for one. See "
                            "what it wrote to stderr, or use another multiprocessing_context"
                        ) from error
                    # The fork server was killed. Once the kernel has ended it, the next start makes another, which
                    # writes a traceback if it cannot fork: few are made.
                    time.sleep(pause_s)
                    pause_s *= 2

    def _watch_all(self) -> None:
        # After all starts, not between them, because it starts a thread.
        with explaining_limits("watch the worker processes"):
            self._watch.run()
        self._unwatched = False

    def usage(self) -> CpuUsage:
        return process_usage(process.pid for process in self.processes if process.pid is not None)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until the ready events exceed ``seen``, or start one of the processes that ``start`` has left."""
        super().check()
        if self._to_start and not exiting() and self.state.has_work():
            if self._has_room():
                self._start_next()
                return
            timeout_s = min(timeout_s, _LOOK_S)
        if self._unwatched:
            self._watch_all()
        if self._watchdog is not None:
            timeout_s = min(timeout_s, self._watchdog.interval_s)
        super().wait(seen, timeout_s)

    @property
    def is_over(self) -> bool:
        """Whether the workers were asked to exit, or a shutdown has begun and was interrupted."""
        return self._started.is_over or super().is_over

    def check(self) -> None:
        """Replace dead workers, or raise torch's RuntimeError; while the interpreter exits, do nothing."""
        super().check()
        if exiting():
            return  # a thread that still iterates must not replace workers that the exit ends
        while (ended := self._watch.first_ended()) is not None:
            warning = self._replace(*ended)
            self._watch.forget()  # only now: after an interrupt or an error the next call handles the same process
            if warning is not None:
                warn(warning)
        if self._watchdog is not None:
            if self._watch.was_stopped():
                self._watchdog.restart_timers()
            self._watchdog.end_overdue(self.processes)

    def check_early(self) -> None:
        if self._watch.first_ended() is not None and self.state.has_work():
            self.check()

    def _replace(self, number: int, dead: BaseProcess) -> str | None:
        """Replace a dead worker unless it may be gone; returns what to warn of, or None."""
        warning: str | None = None
        if self.processes[number] is dead:
            if self.state.may_leave(number) and dead.exitcode in (0, None, UNREADABLE):
                return None
            warning = self._recover(number, dead.pid, self._watch.exit_code(dead))
            self.processes[number] = self._make(number)
        self._start(number)
        self._watch_all()
        return warning


_POOLS: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


def _forget_parents_workers() -> None:
    for pool in list(_POOLS):
        # At exit multiprocessing would end them, because it regards them as children of this process.
        forget_child_processes(pool.processes)
        # They end with the process that holds the other end of their pipes: that must not be this one.
        for process in pool.processes:
            close_ends_of_parent(process)
    _POOLS.clear()


forget_in_children(_forget_parents_workers)


# ---- threads ----


class ThreadPool(WorkerPool):
    """Starts worker threads and ends them.

    A thread that sleeps refers neither to the pool nor to its worker: both may belong to a cycle through the dataset,
    which the garbage collector can free then. Nor must ``stop``, which asks the workers to exit, refer to the user's.
    """

    def __init__(
        self, state: SharedState, context: WorkerContext, stop: Callable[[], None] | None = None
    ) -> None:
        super().__init__(state)
        self.context = context
        self._workers: dict[threading.Thread, Worker] = {}
        self.threads: list[threading.Thread] = [
            self._make(number) for number in range(context.plan.most_workers)
        ]
        end = functools.partial(_end_threads, stop or state.stop, owner=os.getpid())
        self.shut_down, self.end_rest = (
            functools.partial(end, self.threads),
            functools.partial(end, ()),
        )

    def _make(self, number: int) -> threading.Thread:
        arguments, name = (weakref.ref(self), number, self.state), f"minato-{number}"
        return threading.Thread(target=_run_thread, args=arguments, name=name, daemon=True)

    def start(self, enough: Callable[[], object] | None = None) -> None:
        # Without a call of ``enough``: threads start fast.
        for thread in self.threads:
            start_thread(thread)

    def usage(self) -> CpuUsage:
        return thread_usage(
            thread.native_id for thread in self.threads if thread.native_id is not None
        )

    def work(self, number: int) -> Callable[[], bool] | None:
        """Work as worker ``number``, in its thread, until there is nothing to do; returns as ``Worker.work``."""
        me = threading.current_thread()
        # No longer: a thread that sleeps does not refer to the dataset.
        with AsWorker(self.context.plan.worker_info(number)):
            if me not in self._workers:
                self._workers[me] = self.make_worker(number)
            return self._workers[me].work(_process_lives)

    def make_worker(self, number: int) -> Worker:
        """Make worker ``number``, in its thread."""
        plan, ledger = self.context.plan, self.state.worker_ledger(number)
        set_is_over(lambda: ledger.stopping)
        host = host_of(plan, number, self.state)
        failure = initialise(plan, number, host)
        errors = ErrorTransport((BaseException,), wrapped(f"worker thread {number}"))
        return self.context.worker(ledger, self.state, errors, failure, host=host)

    def leave(self) -> None:
        """End what the worker of this thread has started."""
        worker = self._workers.pop(threading.current_thread(), None)
        if worker is not None:
            worker.close()

    def check(self) -> None:
        """Raise RuntimeError if the workers were ended, one has ended by itself, or this is a forked child.

        While the interpreter exits, which ends them, a thread may still iterate.
        """
        super().check()
        running = living(*self.threads)
        ended = [
            thread.name
            for number, thread in enumerate(self.threads)
            if not (thread in running or self.may_leave(number))
        ]
        if ended and not exiting():
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


def _run_thread(reference: weakref.ref[ThreadPool], number: int, state: SharedState) -> None:
    try:
        if state.wait_until_active(number, _process_lives):
            while (rest := _work(reference, number)) is not None and rest():
                pass
    finally:
        if (pool := reference()) is not None:
            pool.leave()
        state.ready.notify()  # wake the consumer, which then sees that this thread has ended


def _work(reference: weakref.ref[Any], *number: int) -> Callable[[], bool] | None:
    at_work = reference()
    return None if at_work is None else at_work.work(*number)


def _end_threads(stop: Callable[[], None], threads: Sequence[threading.Thread], owner: int) -> bool:
    """End the threads of a pool; returns whether all have ended."""
    if os.getpid() != owner:
        return False  # a child that the user forked has a copy of the pool, but no threads
    stop()
    deadline = time.monotonic() + _GRACE_S
    for thread in threads:
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))
    return not living(*threads)


# ---- the thread that reads ----


class _Pool(Protocol):
    def wait(self, seen: int, timeout_s: float) -> None: ...

    def check(self) -> None: ...


class MainReader:
    """The pool of workers as the dispatcher sees it, with a thread of this process that reads for them.

    While the thread sleeps it does not refer to this object, which may belong to a cycle through the dataset. Its
    number in the ledger is after those of the workers. ``end`` ends it after theirs, and does not refer to the engine.
    """

    def __init__(
        self, pool: _Pool, context: WorkerContext, state: SharedState, number: int
    ) -> None:
        self._pool = pool
        self._context, self._state, self._number = context, state, number
        self._worker: ReadingWorker | None = None
        self._failures: list[BaseException] = []
        run = functools.partial(_run_reader, weakref.ref(self), state, self._failures)
        self.thread = threading.Thread(target=run, name="minato-reader", daemon=True)
        self.end: Callable[[], object] = functools.partial(_join, weakref.ref(self.thread))

    def start(self) -> None:
        """Start the thread, after the processes: a fork would copy what it holds at that moment."""
        start_thread(self.thread)

    def work(self) -> Callable[[], bool] | None:
        """Read until there is nothing to do, in the thread; returns as ``Worker.work``."""
        if self._worker is None:
            self._worker = self._make_worker()
        rest = self._worker.work(lambda: True)
        if rest is None:
            self._worker.close()
        return rest

    def _make_worker(self) -> ReadingWorker:
        plan, state, number = self._context.plan, self._state, self._number
        ledger = state.worker_ledger(number)
        set_is_over(lambda: ledger.stopping)
        host = Host(plan, number, state.board, here=True)
        host.make_readers()
        transport = ErrorTransport((BaseException,), wrapped("reader thread"))
        worker = self._context.worker(ledger, state, transport, host=host, kind=ReadingWorker)
        return cast(ReadingWorker, worker)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until the ready events exceed ``seen``."""
        self._pool.wait(seen, timeout_s)

    def check(self) -> None:
        """Raise what ended the thread, or that a worker has died and is not replaced."""
        if self._failures:
            raise RuntimeError("the thread that reads the dataset has ended") from self._failures[0]
        self._pool.check()


def _join(reference: weakref.ref[threading.Thread]) -> None:
    thread = reference()
    if thread is not None and thread.ident is not None and thread is not threading.current_thread():
        thread.join(_GRACE_S)


def _run_reader(
    reference: weakref.ref[MainReader], state: SharedState, failures: list[BaseException]
) -> None:
    try:
        while (rest := _work(reference)) is not None and rest():
            pass
    except BaseException as error:
        failures.append(error)
        state.ready.notify()
