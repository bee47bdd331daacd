"""Notices at once when a worker process ends, without looking again and again."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

__all__ = ["ExitWatch"]


class ExitWatch:
    """A thread that sleeps until a process ends.

    Args:
        context: The multiprocessing context that the processes come from.
        notify: Called, in the thread, whenever a process has ended.
    """

    def __init__(self, context: Any, notify: Callable[[], None]) -> None:
        # A process's sentinel stays open while a child of its own lives. Its pidfd does not, but can only be had for a
        # child of this process, which nobody else reaps.
        self._uses_pidfd = hasattr(os, "pidfd_open") and context.get_start_method() != "forkserver"
        self._notify = notify
        self._watched: dict[int, int] = {}
        self._added: deque[tuple[int, int]] = deque()
        self._gone: deque[int] = deque()
        self._thread: threading.Thread | None = None
        self._woken, self._wake = -1, -1

    def add(self, number: int, process: BaseProcess) -> None:
        """Take a process that was just started, under a number of the caller's, to watch it from ``run`` on.

        At once: the start of another process reaps those that have ended, and then nothing is left to watch.
        """
        descriptor = process.sentinel
        if self._uses_pidfd:
            assert process.pid is not None
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:  # it has ended, and somebody has asked for its exit code
                self._gone.append(number)
                self._notify()
                return
        self._added.append((number, descriptor))

    def run(self) -> None:
        """Watch what was added; the first time this starts a thread."""
        if self._thread is None:
            self._woken, self._wake = os.pipe()
            self._thread = threading.Thread(target=self._run, name="minato-exits", daemon=True)
            self._thread.start()
        else:
            os.write(self._wake, b"+")

    def gone(self) -> list[int]:
        """Numbers of the processes that have ended since the last call."""
        return [self._gone.popleft() for _ in range(len(self._gone))]

    def put_back(self, number: int) -> None:
        """Name this one again at the next call of ``gone``."""
        self._gone.appendleft(number)

    def close(self) -> None:
        """End the thread."""
        if self._thread is None:
            self._let_go()
            return
        os.write(self._wake, b"x")
        # A loader that is part of a reference cycle may be collected in this very thread, which cannot wait for itself.
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    def _let_go(self) -> None:
        if self._uses_pidfd:
            for descriptor in (*self._watched, *(added[1] for added in self._added)):
                os.close(descriptor)
        self._watched.clear()
        self._added.clear()

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            self._let_go()
            os.close(self._wake)
            os.close(self._woken)

    def _watch(self) -> None:
        while True:
            while self._added:
                number, descriptor = self._added.popleft()
                self._watched[descriptor] = number
            ended = cast(list[int], connection.wait([self._woken, *self._watched]))
            for descriptor in ended:
                if descriptor == self._woken:
                    if os.read(self._woken, 1) == b"x":
                        return
                    continue
                self._gone.append(self._watched.pop(descriptor))
                if self._uses_pidfd:
                    os.close(descriptor)
            if self._gone:
                self._notify()
