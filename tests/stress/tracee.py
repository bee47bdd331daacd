"""A process that runs instruction by instruction."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from collections.abc import Callable

from tests.subprocesses import fork

_TRACEME, _CONT, _SINGLESTEP = 0, 7, 9

# Elsewhere pairs of load-linked and store-conditional never succeed step by step.
POSSIBLE = sys.platform == "linux" and platform.machine() == "x86_64"

UNTRACEABLE = 77
"""Exit status where processes cannot be traced."""

_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class Tracee:
    """A forked process that stops whenever it calls ``pause``, and can be stepped from there.

    Args:
        run: What it does; called with ``pause``.

    Raises:
        PermissionError: This system does not let processes be traced.
    """

    def __init__(self, run: Callable[[Callable[[], None]], None]) -> None:
        self.pid = fork(lambda: self._run(run))
        if not self._stopped_by(signal.SIGSTOP):
            raise PermissionError("processes cannot be traced here")

    @staticmethod
    def _run(run: Callable[[Callable[[], None]], None]) -> None:
        if _ptrace(_TRACEME, 0, None, None) < 0:
            raise PermissionError("processes cannot be traced here")
        me = os.getpid()
        run(lambda: os.kill(me, signal.SIGSTOP))

    def _stopped_by(self, number: int) -> bool:
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSTOPPED(status):
            return os.WSTOPSIG(status) == number
        self.pid = 0
        assert os.waitstatus_to_exitcode(status) == 0, "the traced process failed"
        return False

    def step(self) -> bool:
        """Run one instruction; False if it was the last before the next pause."""
        _ptrace(_SINGLESTEP, self.pid, None, None)
        return self._stopped_by(signal.SIGTRAP)

    def resume(self) -> bool:
        """Run to the next pause; False if it ends instead."""
        _ptrace(_CONT, self.pid, None, None)
        return self._stopped_by(signal.SIGSTOP)

    def kill(self) -> None:
        """End it where it is."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
