"""Workers in processes of their own: when they start, and how a process becomes a worker."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import numpy.random  # numpy imports it at first use: once here, not once in each worker
import torch

from minato._compat import (
    announce_worker,
    close_ends_of_parent,
    forget_child_processes,
    forget_executor_threads,
    name_process_thread,
    numpy_seed,
    set_signal_handlers,
    withdraw_worker,
)
from minato._core import EventCount
from minato._core.limits import explaining_limits
from minato._fork_safety import check_owner, forget_in_children, starting_worker
from minato._support.pickling import holding_descriptors
from minato.errors import warn
from minato.observe.tracer import in_profile
from minato.workers.pool import CpuUsage, process_usage
from minato.workers.sample_timeout import SampleWatchdog
from minato.workers.signals import exiting, signals_deferred
from minato.workers.supervision import UNREADABLE, ExitWatch, StartedProcesses

if sys.platform != "win32":  # which has threads only
    import fcntl

__all__ = [
    "ProcessPool",
    "ProcessSettings",
    "announced",
    "enter_worker_process",
    "parent_watch",
    "seed_worker",
]

_ANNOUNCED = threading.Lock()
_ARRIVAL_S = 2.0
"""A worker that has not begun after this time does not wait for a core, and further workers start."""
_STARTS = 20
"""Attempts to start a process while its fork server ends."""
_LOOK_S = 0.02
"""Interval between two checks whether a starting worker has begun."""


class ProcessSettings(NamedTuple):
    """The processes of a pool.

    Attributes:
        context: A multiprocessing context; its start method is used.
        num_workers: Largest number of processes.
        first: Processes that ``start`` starts; with ``fork`` it starts all.
        max_starting: Processes that start at the same time; more would compete for the same cores.
        target: Run in each process as ``target(number, *args)``.
        args: Its further arguments.
    """

    context: BaseContext
    num_workers: int
    first: int
    max_starting: int
    target: Callable[..., None]
    args: tuple[Any, ...]


class ProcessPool:
    """Starts worker processes, replaces those that die, and ends them.

    Args:
        ready: Counts the events that wake the training loop.
        stop: Asks the workers to exit.
        may_leave: Whether worker ``number`` may exit by itself.
        recover: Called with ``(number, pid, exit code)`` of a dead worker; releases its samples and returns what to
            warn of, or None; or raises.
        has_work: Whether there is work for one more worker.
        has_begun: Whether worker ``number`` has claimed a sample.
        watchdog: Ends workers whose sample takes too long.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        *,
        ready: EventCount,
        stop: Callable[[], None],
        may_leave: Callable[[int], bool],
        recover: Callable[[int, int | None, int | None], str | None],
        has_work: Callable[[], bool],
        has_begun: Callable[[int], bool],
        watchdog: SampleWatchdog | None = None,
    ) -> None:
        self._settings = settings
        self._recover = recover
        self._watchdog = watchdog
        self._ready = ready
        self._may_leave = may_leave
        self._has_work = has_work
        self._has_begun = has_begun
        self._starting: dict[int, float] = {}  # start times of workers that have not begun
        self._forks = settings.context.get_start_method() == "fork"
        self._owner = os.getpid()
        self._to_start = deque(range(settings.num_workers if self._forks else settings.first))
        self._unwatched = False
        look_s = None if watchdog is None else watchdog.interval_s
        self._watch = ExitWatch(settings.context, ready.notify, look_s)
        self._started = StartedProcesses(stop, self._watch)
        self.shut_down = self._started.shut_down
        """Ends all workers. Refers to no object of the user's, which may refer to the loader and so to this pool."""
        self.processes = [self._make(number) for number in range(settings.num_workers)]
        _POOLS.add(self)

    def _make(self, number: int) -> BaseProcess:
        settings = self._settings
        process: BaseProcess = settings.context.Process(  # type: ignore[attr-defined]  # typeshed: its subclasses
            target=settings.target, args=(number, *settings.args), daemon=True
        )
        return process

    def start(self, enough: Callable[[], object] | None = None) -> None:
        """Start one process after the other; each works at once.

        Args:
            enough: Called in between. Once it holds, or the largest number is starting, ``wait`` starts the others.
                None: all start now. With ``fork`` all start now in any case: a later fork would hand on what the
                program has opened, locked or begun since.
        """
        while self._to_start and (
            self._forks or enough is None or (self._has_room() and not enough())
        ):
            self._start_next()
        if not self._to_start:
            self._watch_all()

    def grow(self, count: int) -> None:
        """Start those of the first ``count`` processes that have not been started."""
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
            if started > since and not self._has_begun(number)
        }
        return len(self._starting) < self._settings.max_starting

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
            for left in reversed(range(_STARTS)):
                try:
                    with holding_descriptors():
                        process.start()
                except (EOFError, OSError) as error:
                    if not left or not isinstance(error, (EOFError, ConnectionError)):
                        raise
                    # The fork server was killed. Once the kernel has ended it, the next start makes another.
                    time.sleep(_LOOK_S)
                else:
                    return

    def _watch_all(self) -> None:
        # After all starts, not between them, because it starts a thread.
        with explaining_limits("watch the worker processes"):
            self._watch.run()
        self._unwatched = False

    def usage(self) -> CpuUsage:
        """Processor time of all workers."""
        return process_usage(process.pid for process in self.processes if process.pid is not None)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until the ready events exceed ``seen``, or start one of the processes that ``start`` has left.

        Raises:
            RuntimeError: This is a forked child, to which the workers do not belong.
        """
        check_owner(self._owner)
        if self._to_start and not self._is_ending and self._has_work():
            if self._has_room():
                self._start_next()
                return
            timeout_s = min(timeout_s, _LOOK_S)
        if self._unwatched:
            self._watch_all()
        if self._watchdog is not None:
            timeout_s = min(timeout_s, self._watchdog.interval_s)
        with in_profile("minato: wait for workers"):
            self._ready.wait(seen, timeout_s)

    @property
    def _is_ending(self) -> bool:
        # A thread that still iterates must not replace workers that a shutdown ends.
        return self._started.is_over or exiting()

    def check(self) -> None:
        """Replace dead workers, or raise torch's RuntimeError; during shutdown, do nothing."""
        check_owner(self._owner)
        if self._is_ending:
            return
        while (ended := self._watch.first_ended()) is not None:
            warning = self._replace(*ended)
            self._watch.forget()  # only now: after an interrupt or an error the next call handles the same process
            if warning is not None:
                warn(warning, stacklevel=2)
        if self._watchdog is not None:
            if self._watch.was_stopped():
                self._watchdog.restart_timers()
            self._watchdog.end(self.processes)

    def check_early(self) -> None:
        """Replace dead workers before the loop waits, if there is work for them: a start takes time."""
        if self._watch.first_ended() is not None and self._has_work():
            self.check()

    def _replace(self, number: int, dead: BaseProcess) -> str | None:
        """Replace a dead worker unless it may be gone; returns what to warn of, or None."""
        warning: str | None = None
        if self.processes[number] is dead:
            if self._may_leave(number) and dead.exitcode in (0, None, UNREADABLE):
                return None
            warning = self._recover(number, dead.pid, self._watch.exit_code(dead))
            self.processes[number] = self._make(number)
        self._start(number)
        self._watch_all()
        return warning


_POOLS: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


def _forget_parents_workers() -> None:
    global _ANNOUNCED
    _ANNOUNCED = threading.Lock()
    for pool in list(_POOLS):
        # At exit multiprocessing would end them, because it regards them as children of this process.
        forget_child_processes(pool.processes)
        # They end with the process that holds the other end of their pipes: that must not be this one.
        for process in pool.processes:
            close_ends_of_parent(process)
    _POOLS.clear()


forget_in_children(_forget_parents_workers)


def enter_worker_process(number: int, num_workers: int, base_seed: int, dataset: object) -> None:
    """Prepare this process as torch prepares a worker: signal handlers, one thread, seeds, worker info."""
    set_signal_handlers()
    # At exit Python joins the threads of executors; one of them may have forked this process, which would join itself.
    forget_executor_threads()
    _end_with_parent()
    name_process_thread("minato_worker")
    seed_worker(number, num_workers, base_seed, dataset)


def _end_with_parent() -> None:
    """Have the kernel kill this process when the process that requested its start ends or runs another program.

    The other side of the pipe between the two is then closed, and the kernel sends the chosen signal. That does not
    depend on the activity of this process nor on the thread that started it.
    """
    creator = multiprocessing.parent_process()
    # A context of another package may have no such pipe.
    if sys.platform != "linux" or creator is None or getattr(creator, "sentinel", 0) is None:
        return
    fcntl.fcntl(creator.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(creator.sentinel, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(creator.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(creator.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    if connection.wait([creator.sentinel], 0):  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)


def seed_worker(number: int, num_workers: int, base_seed: int, dataset: object) -> None:
    """Prepare a process that acts for a worker, local or remote: one thread, seeds, worker info."""
    torch.set_num_threads(1)
    seed = base_seed + number
    random.seed(seed)
    if torch.version.cuda or torch.version.hip:
        torch.manual_seed(seed)
    else:
        # torch.manual_seed also seeds the generators of other devices, and records a stack trace: 2 ms per worker.
        torch.default_generator.manual_seed(seed)
    np.random.seed(numpy_seed(base_seed, number))
    announce_worker(number, num_workers, seed, dataset)


@contextlib.contextmanager
def announced(number: int, num_workers: int, base_seed: int, dataset: object) -> Iterator[None]:
    """Have torch's ``get_worker_info()`` describe this worker thread; one at a time, as torch keeps one record."""
    with _ANNOUNCED:
        before = announce_worker(number, num_workers, base_seed + number, dataset)
        try:
            yield
        finally:
            withdraw_worker(before)


def parent_watch() -> Callable[[], bool]:
    """Return a function that returns whether the process that requested the start of this one is alive."""
    creator = multiprocessing.parent_process()
    assert creator is not None
    if os.getppid() == creator.pid:
        return lambda: os.getppid() == creator.pid
    # It has ended, or a fork server is between the two. Then the state of a pipe decides. Forked siblings inherit its
    # other end, but only those that start later.
    return creator.is_alive
