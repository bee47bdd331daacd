"""Notices at once when a worker process ends, without looking again and again."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

__all__ = ["UNREADABLE", "ExitWatch", "exit_code"]

_RECORDING_S = 1.0
"""How long another thread may take to write down the exit code that it has read."""
UNREADABLE = 255
"""What multiprocessing takes for the exit code where it comes through a fork server, and another thread has read it."""


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
        self._latest: dict[int, BaseProcess] = {}
        self._added: deque[tuple[int, int, BaseProcess]] = deque()
        self._gone: deque[tuple[int, BaseProcess]] = deque()
        self._thread: threading.Thread | None = None
        self._woken: connection.Connection[bytes, bytes]
        self._wake: connection.Connection[bytes, bytes]

    def add(self, number: int, process: BaseProcess) -> None:
        """Take a process that was just started, under a number of the caller's, to watch it from ``run`` on.

        At once: the start of another process reaps those that have ended, and then nothing is left to watch. To add the
        same process again is harmless.
        """
        if self._latest.get(number) is process:
            return
        descriptor = self._descriptor(process)
        if descriptor is None:
            self._gone.append((number, process))
            self._notify()
        else:
            self._added.append((descriptor, number, process))
        self._latest[number] = process

    def run(self) -> None:
        """Watch what was added; the first time this starts a thread."""
        if self._thread is not None:
            with suppress(BrokenPipeError):  # the thread has failed, and said so
                self._wake.send_bytes(b"look")
            return
        self._woken, self._wake = connection.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name="minato-exits", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there may be no more threads
            self._thread = None
            raise

    def first_gone(self) -> tuple[int, BaseProcess] | None:
        """Number and process of one that has ended; the same until ``forget`` is called."""
        return self._gone[0] if self._gone else None

    def forget(self) -> None:
        """Be done with the one that ``first_gone`` names."""
        self._gone.popleft()

    def outlast(self, processes: Iterable[BaseProcess], timeout_s: float) -> list[BaseProcess]:
        """Wait until processes have ended.

        Args:
            processes: They have been started.
            timeout_s: How long to wait for the next one to end.

        Returns:
            Those that have not.
        """
        waiting: dict[int, BaseProcess] = {}
        try:
            for process in processes:
                descriptor = self._descriptor(process)
                if descriptor is None:
                    exit_code(process)
                else:
                    waiting[descriptor] = process
            while waiting and (ended := connection.wait(list(waiting), timeout_s)):
                for descriptor in cast(list[int], ended):
                    process = waiting.pop(descriptor)
                    _let_go(descriptor, process)
                    exit_code(process)
            return list(waiting.values())
        finally:
            for descriptor, process in waiting.items():
                _let_go(descriptor, process)

    def close(self) -> None:
        """End the thread."""
        if self._thread is None:
            self._let_go_of_added()
            return
        with suppress(BrokenPipeError):
            self._wake.send_bytes(b"end")
        # A loader that is part of a reference cycle may be collected in this very thread, which cannot wait for itself.
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._wake.close()
        self._thread = None

    def _descriptor(self, process: BaseProcess) -> int | None:
        """What becomes readable when a process ends; None if that is known already."""
        if process.exitcode is not None:
            return None
        if self._uses_pidfd:
            assert process.pid is not None
            try:
                return os.pidfd_open(process.pid)
            except ProcessLookupError:
                return None
            except OSError:  # no more descriptors can be had
                pass
        return process.sentinel

    def _let_go_of_added(self) -> None:
        while self._added:
            descriptor, _, process = self._added.popleft()
            _let_go(descriptor, process)

    def _run(self) -> None:
        watched: dict[int, tuple[int, BaseProcess]] = {}
        with self._woken:
            try:
                self._watch(watched)
            finally:
                for descriptor, (_, process) in watched.items():
                    _let_go(descriptor, process)
                self._let_go_of_added()

    def _watch(self, watched: dict[int, tuple[int, BaseProcess]]) -> None:
        woken = self._woken
        while True:
            while self._added:
                descriptor, number, process = self._added.popleft()
                watched[descriptor] = number, process
            for one in connection.wait([woken, *watched]):
                if one is woken:
                    if woken.recv_bytes() == b"end":
                        return
                    continue
                descriptor = cast(int, one)
                number, process = watched.pop(descriptor)
                _let_go(descriptor, process)
                self._gone.append((number, process))
            if self._gone:
                self._notify()


def _let_go(descriptor: int, process: BaseProcess) -> None:
    if descriptor != process.sentinel:
        os.close(descriptor)


def exit_code(process: BaseProcess) -> int | None:
    """The exit code of a process that has ended; None if nobody can tell it any more.

    Whenever any thread starts a process, ``multiprocessing`` reaps all that have ended. Until that thread has written
    down the exit code it has got, ``join`` returns in other threads although the code is still unknown.
    """
    process.join()
    until = time.monotonic() + _RECORDING_S
    while process.exitcode is None and time.monotonic() < until:
        time.sleep(0.001)
    return process.exitcode
