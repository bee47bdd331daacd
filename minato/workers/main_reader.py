"""``Readers(1, where="main")``: a thread of the training process reads what can be neither forked nor pickled."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

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
        self._failures: list[BaseException] = []
        run = functools.partial(_run, context, state, number, self._failures)
        self.thread = threading.Thread(target=run, name="minato-reader", daemon=True)
        self.end: Callable[[], object] = functools.partial(_join, weakref.ref(self.thread))

    def start(self) -> None:
        """Start the thread, after the processes: a fork would copy what it holds at that moment."""
        start_thread(self.thread)

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
    context: WorkerContext, state: SharedState, number: int, failures: list[BaseException]
) -> None:
    try:
        plan, ledger = context.plan, state.worker_ledger(number)
        host = Host(plan, number, state.board, alone=False, binds=plan.seeds_samples, here=True)
        host.make_readers()
        transport = ErrorTransport((BaseException,), wrapped("reader thread"))
        worker = context.worker(ledger, state, transport, host=host, kind=ReadingWorker)
        worker.loop(lambda: True)
        worker.close()
    except BaseException as error:
        failures.append(error)
        state.ready.notify()
