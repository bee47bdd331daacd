"""Workers in this process: threads, or the consumer itself."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

from minato._core.wait import EventCount
from minato.observe.trace.torch_profiler import in_profile
from minato.workers.cpu_time import CpuUsage, thread_usage
from minato.workers.worker import Worker

__all__ = ["InlinePool", "ThreadPool"]

_GRACE_S = 4.0
"""How long the end of a loader waits for its threads; one that is stuck in user code cannot be ended."""


class ThreadPool:
    """Starts worker threads and ends them.

    Args:
        make_worker: Called in each thread with its number and a function that tells whether the consumer lives; may
            sleep until the worker is wanted, and returns None if it never is.
        stop: Tells the workers to leave.
        may_leave: Whether worker number i may have left by itself.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        make_worker: Callable[[int, Callable[[], bool]], Worker | None],
        ready: EventCount,
        stop: Callable[[], None],
        may_leave: Callable[[int], bool],
    ) -> None:
        self._may_leave = may_leave
        self._make_worker = make_worker
        self._ready = ready
        self._stop = stop
        self._owner = os.getpid()
        self.threads = [self._make(number) for number in range(num_workers)]

    @property
    def processes(self) -> Sequence[BaseProcess]:
        """None: workers are threads."""
        return ()

    def _make(self, number: int) -> threading.Thread:
        name = f"minato-{number}"
        return threading.Thread(target=self._run, args=(number,), name=name, daemon=True)

    def start(self, enough: Callable[[], object] | None = None) -> None:
        """Start all threads. They start too quickly for ``enough`` to be asked in between."""
        for thread in self.threads:
            thread.start()

    def grow(self, count: int) -> None:
        """All are there already."""

    def usage(self) -> CpuUsage:
        """Processor time of all workers."""
        return thread_usage(
            thread.native_id for thread in self.threads if thread.native_id is not None
        )

    def _run(self, number: int) -> None:
        def process_lives() -> bool:
            return True  # whatever has become of its main thread: another one may train

        try:
            worker = self._make_worker(number, process_lives)
            if worker is not None:
                try:
                    worker.loop(process_lives)
                finally:
                    worker.close()
        finally:
            self._ready.notify()  # whoever waits for this thread learns that it is gone

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until the ready gate has had an event since ``seen``."""
        with in_profile("minato: wait for workers"):
            self._ready.wait(seen, timeout_s)

    def check(self) -> None:
        """Raise if a thread is gone."""
        gone = [self.threads[n].name for n in self._gone() if not self._may_leave(n)]
        if gone:
            raise RuntimeError(f"DataLoader worker thread(s) {', '.join(gone)} ended unexpectedly")

    def check_early(self) -> None:
        """Nothing: starting a thread takes no time."""

    def _gone(self) -> list[int]:
        return [number for number, thread in enumerate(self.threads) if not thread.is_alive()]

    @property
    def _is_owner(self) -> bool:
        # A forked child of the user's holds a copy of this pool, but no threads.
        return os.getpid() == self._owner

    def shut_down(self) -> bool:
        """Ask the threads to leave and wait a while for them; returns whether there are none any more."""
        if not self._is_owner:
            return False
        self._stop()
        deadline = time.monotonic() + _GRACE_S
        for thread in self.threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self.threads)


class InlinePool:
    """``num_workers=0``: whoever waits for a batch works on it.

    Args:
        make_worker: Called with its number, 0.
        give_back: Offers again what an interrupted worker has not finished.
    """

    def __init__(
        self, make_worker: Callable[[int], Worker], give_back: Callable[[], object]
    ) -> None:
        self._make_worker = make_worker
        self._give_back = give_back
        self._worker: Worker | None = None
        self._closing = _Closing()
        self.shut_down = self._closing.shut_down
        """Ends what the worker has begun in other threads. Holds no loader, as a ``collate_fn`` may."""

    @property
    def processes(self) -> Sequence[BaseProcess]:
        """None: the consumer is the worker."""
        return ()

    def start(self, enough: Callable[[], object] | None = None) -> None:
        """Prepare the one worker."""
        self._worker = self._make_worker(0)
        self._closing.endings = self._worker.endings

    def wait(self, seen: int, timeout_s: float) -> None:
        """Work."""
        assert self._worker is not None
        try:
            with in_profile("minato: load samples"):
                self._worker.turn(timeout_s)
        except BaseException:
            self._worker.forget()
            self._give_back()  # whoever catches this may ask for the next batch
            raise

    def check(self) -> None:
        """Nobody can die here."""

    def check_early(self) -> None:
        """Nobody can die here."""

    def grow(self, count: int) -> None:
        """There is one worker only."""

    def usage(self) -> CpuUsage:
        """Nothing: what the consumer uses is not the workers'."""
        return CpuUsage(0, 0)


class _Closing:
    """The end of a worker in line."""

    def __init__(self) -> None:
        self.endings: list[Callable[[], None]] = []
        self._owner = os.getpid()

    def shut_down(self) -> bool:
        """End what the worker has begun in other threads; returns whether this was that worker's process."""
        if os.getpid() != self._owner:
            return False
        for end in self.endings:
            end()
        return True
