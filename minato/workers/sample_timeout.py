"""``ErrorPolicy.sample_timeout``: ends workers whose sample takes too long."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import Any

from minato._core import ConsumerLedger, now_ns
from minato._core.codes import STARTING, LeaseState
from minato._support.files import anonymous_log
from minato.errors import SampleTimeoutError

__all__ = ["SampleWatchdog", "StackFile"]

_LOOKS = 4
"""Checks of a sample within its limit."""
_STACK_S = 1.0
"""How long a process may take to write its stack; a stopped process never does."""
_WRITTEN_S = 0.02
"""A stack that has not grown for this time is complete."""


class StackFile:
    """A file to which a worker process writes its stack when it gets a signal, even if it hangs.

    Children inherit it by ``fork``, or get it pickled while they are spawned.
    """

    _SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGTERM) - 1

    def __init__(self) -> None:
        self._adopt(anonymous_log())

    def _adopt(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def listen(self) -> None:
        """Have this process write its stack here when it gets the signal."""
        faulthandler.register(self._SIGNAL, self._descriptor, all_threads=True, chain=False)

    def request(self, pid: int) -> None:
        """Have a listening process write its stack; ``answer`` returns it. This cancels an earlier request."""
        os.ftruncate(self._descriptor, 0)
        os.kill(pid, self._SIGNAL)
        self._size, self._grown_s = 0, time.monotonic()
        self._deadline_s = self._grown_s + _STACK_S

    def answer(self) -> str | None:
        """The stack; None while it is awaited; empty if the process did not write it in time."""
        now_s, size = time.monotonic(), os.fstat(self._descriptor).st_size
        if size != self._size:
            self._size, self._grown_s = size, now_s
        if now_s < self._deadline_s and (not size or now_s < self._grown_s + _WRITTEN_S):
            return None
        return os.pread(self._descriptor, size, 0).decode(errors="replace")

    def __getstate__(self) -> dict[str, Any]:
        return {"descriptor": reduction.DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._adopt(state["descriptor"].detach())


@dataclass(eq=False)
class SampleWatchdog:
    """Ends worker processes that spend too long on a sample.

    Each first writes its stack, one at a time. The consumer does not wait for it: one call of ``end`` requests the
    stack, a later one reads it.
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
        """Interval between two calls of ``end``."""
        return self.limit_s / _LOOKS if self._requested is None else _WRITTEN_S

    def restart_timers(self) -> None:
        """Restart the time limit of all running samples, because all processes were stopped for a while."""
        self._since_ns = now_ns()
        self._requested = None

    def end(self, processes: Sequence[BaseProcess]) -> None:
        """End the workers whose sample, ``collate_fn`` or ``worker_init_fn`` has exceeded the limit."""
        if self._requested is not None and not self._finish(*self._requested):
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
        what = "a sample"
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
