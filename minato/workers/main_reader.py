"""``Readers(1, where="main")``: a thread of the training process reads what can be neither forked nor pickled."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Protocol, cast

from minato._support.threads import start_thread
from minato.batching.blobs import ErrorTransport, wrapped
from minato.workers.hosting import ReadingWorker
from minato.workers.reading import Host
from minato.workers.shared_state import SharedState
from minato.workers.worker_process import WorkerContext

__all__ = ["MainReader"]

_GRACE_S = 4.0
"""How long the end of a loader waits for the thread, which a dataset may hold up."""


class _Pool(Protocol):
    def wait(self, seen: int, timeout_s: float) -> None: ...

    def check(self) -> None: ...


class MainReader:
    """The pool of workers as the dispatcher sees it, with a thread of this process that reads for them.

    While the thread sleeps it does not refer to this object, which may belong to a cycle through the dataset.

    Args:
        context: Makes the thread's part; its plan has the dataset.
        number: Of the thread in the ledger, after those of the workers.

    Attributes:
        thread: The thread.
        end: Ends it once the workers have ended; does not refer to the engine.
    """

    def __init__(
        self, pool: _Pool, context: WorkerContext, state: SharedState, number: int
    ) -> None:
        self._pool = pool
        self._context, self._state, self._number = context, state, number
        self._worker: ReadingWorker | None = None
        self._failures: list[BaseException] = []
        run = functools.partial(_run, weakref.ref(self), state, self._failures)
        self.thread = threading.Thread(target=run, name="minato-reader", daemon=True)
        self.end: Callable[[], object] = functools.partial(_join, weakref.ref(self.thread))

    def start(self) -> None:
        """Start the thread, after the processes: a fork would copy what it holds at that moment."""
        start_thread(self.thread)

    def work(self) -> Callable[[], bool] | None:
        """Read until there is nothing to do, in the thread; returns as ``Worker.work``."""
        if self._worker is None:
            self._worker = self._make_worker()
        rest = self._worker.work(lambda: True)
        if rest is None:
            self._worker.close()
        return rest

    def _make_worker(self) -> ReadingWorker:
        plan, state, number = self._context.plan, self._state, self._number
        host = Host(plan, number, state.board, alone=False, binds=plan.seeds_samples, here=True)
        host.make_readers()
        transport = ErrorTransport((BaseException,), wrapped("reader thread"))
        ledger = state.worker_ledger(number)
        worker = self._context.worker(ledger, state, transport, host=host, kind=ReadingWorker)
        return cast(ReadingWorker, worker)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until the ready events exceed ``seen``."""
        self._pool.wait(seen, timeout_s)

    def check(self) -> None:
        """Raise what ended the thread, or that a worker has died and is not replaced."""
        if self._failures:
            raise RuntimeError("the thread that reads the dataset has ended") from self._failures[0]
        self._pool.check()


def _join(reference: weakref.ref[threading.Thread]) -> None:
    thread = reference()
    if thread is not None and thread.ident is not None and thread is not threading.current_thread():
        thread.join(_GRACE_S)


def _run(
    reference: weakref.ref[MainReader], state: SharedState, failures: list[BaseException]
) -> None:
    try:
        while (rest := _work(reference)) is not None and rest():
            pass
    except BaseException as error:
        failures.append(error)
        state.ready.notify()


def _work(reference: weakref.ref[MainReader]) -> Callable[[], bool] | None:
    reader = reference()
    return None if reader is None else reader.work()
