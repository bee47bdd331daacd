"""A limit on the time that one sample may take."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
import weakref
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import Any

from minato._core.clock import now_ns
from minato._core.codes import STARTING
from minato._core.ledger import Ledger
from minato._support.files import anonymous_log
from minato.errors import SampleTimeoutError

__all__ = ["SampleWatchdog", "StackFile"]

_LOOKS = 4
"""How often a sample is looked at within its limit."""
_STACK_S = 1.0
"""How long a stuck process may take to write its stack; one that is stopped never does."""
_WRITTEN_S = 0.02
"""What has not grown for so long is complete."""


class StackFile:
    """Where a stuck worker process writes its stack when it is told to by a signal, whatever it is doing.

    It is passed on by ``fork``, or by pickling it while a child is spawned.
    """

    _SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGTERM) - 1

    def __init__(self) -> None:
        self._adopt(anonymous_log())

    def _adopt(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def listen(self) -> None:
        """Make this process write its stack here when it is asked to."""
        faulthandler.register(self._SIGNAL, self._descriptor, all_threads=True, chain=False)

    def ask(self, pid: int) -> None:
        """Have a process that listens write its stack; ``answer`` gives it. This ends an earlier request."""
        os.ftruncate(self._descriptor, 0)
        os.kill(pid, self._SIGNAL)
        self._size, self._grown_s = 0, time.monotonic()
        self._deadline_s = self._grown_s + _STACK_S

    def answer(self) -> str | None:
        """The stack; None as long as it may still come; empty if the process did not write it in time."""
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


class SampleWatchdog:
    """Ends worker processes that spend too long on a sample.

    Each is asked for its stack before, one at a time. The consumer does not wait for it: one call of ``end`` asks, a
    later one takes the answer.

    Args:
        limit_s: How long a sample may take.
        stacks: What the workers write their stacks to.
    """

    def __init__(self, ledger: Ledger, limit_s: float, stacks: StackFile) -> None:
        self._ledger = ledger
        self._limit_s = limit_s
        self._stacks = stacks
        self._ended: dict[int, str] = {}  # and why
        self._since_ns = 0
        self._asked: tuple[int, BaseProcess, Any] | None = None  # number, process, its lease then

    @property
    def interval_s(self) -> float:
        """How often ``end`` should be called."""
        return self._limit_s / _LOOKS if self._asked is None else _WRITTEN_S

    def restart_timers(self) -> None:
        """Let the samples that are running now begin anew: all processes were stopped for a while."""
        self._since_ns = now_ns()
        self._asked = None

    def end(self, processes: Sequence[BaseProcess]) -> None:
        """End those of the workers whose sample, ``collate_fn`` or ``worker_init_fn`` is overdue."""
        if self._asked is not None and not self._finish(*self._asked):
            return
        self._asked = None
        for number, process in enumerate(processes):
            lease = self._ledger.lease(number)
            on_nothing = lease[0] is None and lease[2] > STARTING
            if on_nothing or number in self._ended or process.pid is None:
                continue
            taken_s = (now_ns() - max(lease[1], self._since_ns)) / 1e9
            # The two words of a lease are not written at once, so one look is not enough.
            if taken_s <= self._limit_s or self._ledger.lease(number) != lease:
                continue
            with contextlib.suppress(ProcessLookupError):
                self._stacks.ask(process.pid)
                self._asked = number, process, lease
                return

    def _finish(self, number: int, process: BaseProcess, lease: Any) -> bool:
        """End a worker that was asked for its stack; False as long as that may still come."""
        if self._ledger.lease(number) != lease or not process.is_alive():
            return True  # the sample, or the worker, came to an end by itself
        stack = self._stacks.answer()
        if stack is None:
            return False
        what = "a sample"
        if lease[0] is None:
            what = "worker_init_fn" if lease[2] == STARTING else "collate_fn"
        self._ended[number] = (
            f"{what} took more than sample_timeout={self._limit_s:g}, and its worker (pid {process.pid}) "
            f"was ended. Its stack:\n{stack or '(none: the process did not answer)'}"
        )
        process.kill()
        return True

    def cause(self, number: int) -> SampleTimeoutError | None:
        """Why a worker was ended, if it was ended here; asked once it is dead."""
        why = self._ended.get(number)
        # A new one each time: its traceback, once it is raised, would keep the loader alive.
        return None if why is None else SampleTimeoutError(why)

    def forget(self, number: int) -> None:
        """Begin anew with the worker that takes the place of a dead one."""
        self._ended.pop(number, None)
