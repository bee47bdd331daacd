"""What all kinds of worker pools (processes, threads, actors) have in common, and the time that workers use."""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from minato._fork_safety import check_owner
from minato._system import text_of
from minato.observe.tracer import in_profile
from minato.workers.shared_state import SharedState

__all__ = ["CpuUsage", "WorkerPool", "exiting", "process_usage", "thread_usage"]


class WorkerPool(ABC):
    """The workers of an engine: they are started, watched and ended together.

    Args:
        state: What the workers share with the training loop.

    Attributes:
        state: The same.
        processes: The workers that are processes of this machine.
        shut_down: Ends all workers; returns whether all have ended. Refers neither to the loader nor to an object that
            does.
    """

    processes: Sequence[BaseProcess] = ()
    shut_down: Callable[[], bool]

    def __init__(self, state: SharedState) -> None:
        self.state = state
        self._owner = os.getpid()

    @abstractmethod
    def start(self, enough: Callable[[], object] | None = None) -> None:
        """Start the workers.

        Args:
            enough: Called between slow starts; once it holds, the other workers may start later. None: all start now.
        """

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
        """Replace dead workers, or raise torch's RuntimeError.

        Raises:
            RuntimeError: Also in a forked child, to which the workers do not belong.
        """
        check_owner(self._owner)

    def check_early(self) -> None:
        """Replace dead workers before the loop waits, where a start takes time; by default it takes none."""
        return


_exit_began = False


@atexit.register
def _begin_exit() -> None:
    global _exit_began
    _exit_began = True


def exiting() -> bool:
    """Whether the interpreter is exiting."""
    return _exit_began


class CpuUsage(NamedTuple):
    """Nanoseconds since the start of processes or threads.

    Attributes:
        ran_ns: On a core.
        queued_ns: Ready to run, but without a core; 0 where the system does not measure it.
    """

    ran_ns: int
    queued_ns: int


def process_usage(pids: Iterable[int]) -> CpuUsage:
    """The sum over processes, with all their threads; those that have ended count as zero."""
    return _total(task for pid in pids for task in _tasks(pid))


def thread_usage(native_ids: Iterable[int]) -> CpuUsage:
    """The sum over threads of this process."""
    return _total(f"/proc/self/task/{native_id}" for native_id in native_ids)


def _tasks(pid: int) -> list[str]:
    directory = f"/proc/{pid}/task"
    try:
        return [f"{directory}/{name}" for name in os.listdir(directory)]
    except OSError:
        return []


def _total(tasks: Iterable[str]) -> CpuUsage:
    ran_ns = queued_ns = 0
    for task in tasks:
        try:
            ran, queued, _ = text_of(f"{task}/schedstat").split()
        except (OSError, ValueError):
            ran, queued = _ticks(task), "0"
        ran_ns += int(ran)
        queued_ns += int(queued)
    return CpuUsage(ran_ns, queued_ns)


def _ticks(task: str) -> str:
    """Time on a core from a kernel without scheduler statistics, to a hundredth of a second."""
    try:
        fields = text_of(f"{task}/stat").rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return str(ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return "0"
