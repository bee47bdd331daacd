"""Starting threads; whether the interpreter exits, which ends them."""

from __future__ import annotations

import _thread
import atexit
from threading import Thread
from types import BuiltinFunctionType

__all__ = ["exiting", "start_thread", "threads_are_real"]


def threads_are_real() -> bool:
    """Whether threads are those of the system; gevent and eventlet put their own in the place of all."""
    return isinstance(_thread.start_new_thread, BuiltinFunctionType)


def start_thread(thread: Thread) -> None:
    """Start a thread; what a signal's handler raises meanwhile, is raised.

    Raises:
        RuntimeError: There are no threads of the system, or no more.

    ``Thread.start`` waits until the thread runs. If a handler raises at the wrong moment of that wait, CPython releases
    a lock twice and raises RuntimeError instead.
    """
    if not threads_are_real():
        raise RuntimeError(
            f"the thread {thread.name} needs a thread of the system, but this program has replaced all by those of "
            "gevent or eventlet, which would never run while the loader waits: use workers='process' with "
            "multiprocessing_context='forkserver' and without fetch_concurrency, or patch_all(thread=False)"
        )
    try:
        thread.start()
    except RuntimeError as error:
        raised = error.__context__
        if raised is None or str(error) != "release unlocked lock":
            raise  # the limit of threads is reached
        raise raised from None


_exit_began = False


@atexit.register
def _begin_exit() -> None:
    global _exit_began
    _exit_began = True


def exiting() -> bool:
    """Whether the interpreter is exiting."""
    return _exit_began
