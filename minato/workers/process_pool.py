"""Workers in processes of their own: when they start, are replaced, and end."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from minato._compat import close_ends_of_parent, forget_child_processes
from minato._core.limits import explaining_limits
from minato._fork_safety import forget_in_children, signals_deferred, starting_worker
from minato._support.pickling import holding_descriptors
from minato.errors import warn
from minato.workers.pool import CpuUsage, WorkerPool, exiting, process_usage
from minato.workers.shared_state import SharedState
from minato.workers.supervision import UNREADABLE, ExitWatch, StartedProcesses, WorkerRecovery

__all__ = ["ProcessPool"]

_ARRIVAL_S = 2.0
"""A worker that has not begun after this time does not wait for a core, and further workers start."""
_STARTS = 20
"""Attempts to start a process while its fork server ends."""
_LOOK_S = 0.02
"""Interval between two checks whether a starting worker has begun."""


class ProcessPool(WorkerPool):
    """Starts worker processes, replaces those that die, and ends them.

    Args:
        state: What the workers share with this process.
        recovery: Called with ``(number, pid, exit code)`` of a dead worker; releases its samples and returns what to
            warn of, or None; or raises. Its watchdog ends workers whose sample takes too long.
        run: Called in each process with the worker's number.
        context: A multiprocessing context; its start method is used.
        num_workers: Largest number of processes.
        first: Processes that ``start`` starts; with ``fork`` it starts all.
        max_starting: Processes that start at the same time; more would compete for the same cores.
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
        self._run = run
        self._context = context
        self._max_starting = max_starting
        self._starting: dict[int, float] = {}  # start times of workers that have not begun
        self._forks = context.get_start_method() == "fork"
        self._to_start = deque(range(num_workers if self._forks else first))
        self._unwatched = False
        look_s = None if self._watchdog is None else self._watchdog.interval_s
        self._watch = ExitWatch(context, state.ready.notify, look_s)
        self._started = StartedProcesses(state.stop, self._watch)
        self.shut_down = self._started.shut_down
        self.processes: list[BaseProcess] = [self._make(number) for number in range(num_workers)]
        _POOLS.add(self)

    def _make(self, number: int) -> BaseProcess:
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]  # typeshed: its subclasses
            target=self._run, args=(number,), daemon=True
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
        super().check()
        if self._to_start and not self._is_ending and self.state.has_work():
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
    def _is_ending(self) -> bool:
        # A thread that still iterates must not replace workers that a shutdown ends.
        return self._started.is_over or exiting()

    def check(self) -> None:
        """Replace dead workers, or raise torch's RuntimeError; during shutdown, do nothing."""
        super().check()
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
