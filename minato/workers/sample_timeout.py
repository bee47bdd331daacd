"""Samples that take too long: ``ErrorPolicy.sample_timeout`` ends their workers, torch's ``timeout`` names them."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from minato._core import ConsumerLedger, now_ns
from minato._core.codes import READING, STARTING, LeaseState
from minato._support.files import OwnDescriptor, anonymous_log
from minato._support.items import name_of
from minato.errors import SampleTimeoutError
from minato.workers.shared_state import CurrentWork

_LOOKS = 4  # checks of a sample within its limit
_LONGEST_S = 3600.0
"""Between two looks: no system call takes an infinite time, which a limit may be."""
_STACK_S = 1.0  # how long a process may take to write its stack; a stopped process never does
_WRITTEN_S = 0.2
"""A stack that has not grown for this time is complete: a process may lose its core while it writes."""
_POLL_S = 0.02  # time between two looks at a stack that is awaited
_MOST_TOLD = 4
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_FRAME = re.compile(r'^  File "(.*)", (line \d+ in .*)$', re.MULTILINE)


class StackFile:
    """A file to which a worker process writes its stack when it gets a signal, even if it hangs.

    Children inherit it by ``fork``, or get it pickled while they are spawned. ``pid`` was requested last.
    """

    pid = 0
    _SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGTERM) - 1

    def __init__(self) -> None:
        self._file = OwnDescriptor(anonymous_log())

    def listen(self) -> None:
        """Have this process write its stack here when it gets the signal."""
        faulthandler.register(self._SIGNAL, self._file.number, all_threads=True, chain=False)

    def request(self, pid: int) -> None:
        """Have a listening process write its stack; ``answer`` returns it. This cancels an earlier request."""
        self.pid = pid
        os.ftruncate(self._file.number, 0)
        os.kill(pid, self._SIGNAL)
        self._size, self._grown_s = 0, time.monotonic()
        self._deadline_s = self._grown_s + _STACK_S

    def answer(self) -> str | None:
        """The stack; None while it is awaited; empty if the process did not write it in time."""
        now_s, size = time.monotonic(), os.fstat(self._file.number).st_size
        if size != self._size:
            self._size, self._grown_s = size, now_s
        if now_s < self._deadline_s and (not size or now_s < self._grown_s + _WRITTEN_S):
            return None
        return os.pread(self._file.number, size, 0).decode(errors="replace")


@dataclass(eq=False)
class SampleWatchdog:
    """Ends worker processes that spend too long on a sample, one at a time, after they have written their stack.

    The consumer does not wait for that: one call of ``end_overdue`` requests the stack, a later one reads it.
    """

    ledger: ConsumerLedger
    limit_s: float
    stacks: StackFile

    def __post_init__(self) -> None:
        self._ended: dict[int, str] = {}  # the reason by number
        self._since_ns = 0
        # number, process, its lease then
        self._requested: tuple[int, BaseProcess, LeaseState] | None = None

    @property
    def interval_s(self) -> float:
        """Interval between two calls of ``end_overdue``."""
        return min(self.limit_s / _LOOKS, _LONGEST_S) if self._requested is None else _POLL_S

    def restart_timers(self) -> None:
        """Restart the time limit of all running samples, because all processes were stopped for a while."""
        self._since_ns = now_ns()
        self._requested = None

    def end_overdue(self, processes: Sequence[BaseProcess]) -> None:
        """End the workers whose sample, reader, ``collate_fn`` or ``worker_init_fn`` has exceeded the limit."""
        requested = self._requested
        if requested is not None and requested[1].pid != self.stacks.pid:
            requested = None  # torch's timeout has requested the stack of another one since
        if requested is not None and not self._finish(*requested):
            return
        self._requested = None
        for number, process in enumerate(processes):
            lease = self.ledger.lease(number)
            on_nothing = lease.position is None and lease.step > STARTING
            if on_nothing or number in self._ended or process.pid is None:
                continue
            taken_s = (now_ns() - max(lease.started_ns, self._since_ns)) / 1e9
            # The words of a lease are not written atomically: a second read confirms the first.
            if taken_s <= self.limit_s or self.ledger.lease(number) != lease:
                continue
            with contextlib.suppress(ProcessLookupError):
                self.stacks.request(process.pid)
                self._requested = number, process, lease
                return

    def _finish(self, number: int, process: BaseProcess, lease: LeaseState) -> bool:
        """End a worker whose stack was requested; False while the stack is awaited."""
        if self.ledger.lease(number) != lease or not process.is_alive():
            return True  # the sample or the worker has ended by itself
        stack = self.stacks.answer()
        if stack is None:
            return False
        what = "The iterator" if lease.step == READING else "a sample"
        if lease.position is None:
            what = "worker_init_fn" if lease.step == STARTING else "collate_fn"
        self._ended[number] = (
            f"{what} took more than sample_timeout={self.limit_s:g}, and its worker (pid {process.pid}) "
            f"was ended. Its stack:\n{stack or '(none: the process did not answer)'}"
        )
        process.kill()
        return True

    def cause(self, number: int) -> SampleTimeoutError | None:
        """The error of a dead worker that the watchdog has ended; None if it died otherwise."""
        reason = self._ended.get(number)
        # A new exception at each call: the traceback of a raised one would keep the loader alive.
        return None if reason is None else SampleTimeoutError(reason)

    def forget(self, number: int) -> None:
        """Drop the record of a dead worker, which another one replaces."""
        self._ended.pop(number, None)


@dataclass(frozen=True, eq=False)
class RunningSamples:
    """Names the samples that the workers run, when torch's ``timeout`` is over.

    ``stacks`` is the file that worker processes write their stacks to; ``reading`` the thread that reads for them, with
    a number after theirs. ``recommends``: ``sample_timeout`` is possible.
    """

    work: CurrentWork
    stacks: StackFile | None
    workers: Sequence[BaseProcess | threading.Thread]
    reading: threading.Thread | None
    recommends: bool

    def __call__(self) -> str:
        """Return a line for each busy worker, at most four, and the remedy; never an error."""
        lines: list[str] = []
        with contextlib.suppress(Exception):
            for number, worker in enumerate(self.workers):
                told = self._told(number)
                if told and len(lines) < _MOST_TOLD:
                    lines.append(f"  worker {number} {told}{self._place(worker)}")
            if lines and self.recommends:
                lines.append("  ErrorPolicy(sample_timeout=...) ends such a worker and goes on.")
            if self.reading is not None and (told := self._told(len(self.workers))):
                lines.append(f"  the thread of the dataset {told}{self._place(self.reading)}")
        if not lines:
            return "  No worker runs a sample: they start, or wait for the batches that you hold."
        return "\n".join(lines)

    def _told(self, number: int) -> str:
        """The sample or function that a worker runs, and for how long; empty: none."""
        lease = self.work.ledger.lease(number)
        since = f" for {(now_ns() - lease.started_ns) / 1e9:.1f} s"
        if (collation := self.work.collation(number)) is not None:
            return f"collates the batch of {collation.indices}{since}"
        if lease.step == STARTING:
            return f"runs worker_init_fn{since}"
        sample = self.work.sample(number)
        if sample is None:
            return ""
        of = "" if sample.transform is None else f", in transform {sample.transform},"
        return f"{'reads' if sample.is_read else 'runs'} {name_of(sample.index)}{of}{since}"

    def _place(self, worker: BaseProcess | threading.Thread) -> str:
        """Two lines of the program's code that a worker runs: that of the sample, and the innermost."""
        stack: list[tuple[str, str]] = []
        with contextlib.suppress(Exception):  # a worker that has just ended has none
            stack = self._stack(worker)
        inner = list(itertools.takewhile(lambda at: not at[0].startswith(_PACKAGE), stack))
        if not inner:
            return ""
        places = [f"{path}, {line}" for path, line in dict.fromkeys([inner[-1], inner[0]])]
        return f": {', at '.join(places)}"

    def _stack(self, worker: BaseProcess | threading.Thread) -> list[tuple[str, str]]:
        """Path, and line with function, of each frame of a worker, the innermost first."""
        if isinstance(worker, threading.Thread):
            frames = traceback.extract_stack(sys._current_frames()[worker.ident or 0])
            return [(each.filename, f"line {each.lineno} in {each.name}") for each in frames[::-1]]
        if self.stacks is None or worker.pid is None:
            return []
        self.stacks.request(worker.pid)
        while (text := self.stacks.answer()) is None:
            time.sleep(_POLL_S)
        main = next((each for each in text.split("\n\n") if "in run_worker_process" in each), text)
        return _FRAME.findall(main)
