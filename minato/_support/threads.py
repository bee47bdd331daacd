"""Starting threads; which run; how they pause; what runs when the process ends; whether the interpreter exits."""

from __future__ import annotations

import atexit
import errno
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import parent_process, util
from threading import Thread

from minato._compat import exit_code, watch_exit_code
from minato._core.limits import limit_met


def threads_are_real() -> bool:
    """Whether threads are those of the system; gevent and eventlet put their own in the place of all.

    Debuggers replace functions of ``_thread``, too.
    """
    gevent, eventlet = map(sys.modules.get, ("gevent.monkey", "eventlet.patcher"))
    return not (
        (gevent is not None and gevent.is_module_patched("_thread"))
        or (eventlet is not None and eventlet.is_monkey_patched("thread"))
    )


def start_thread(thread: Thread) -> None:
    """Start a thread; what a signal's handler raises meanwhile, is raised.

    ``Thread.start`` waits until the thread runs. If a handler raises at the wrong moment of that wait, CPython releases
    a lock twice and raises RuntimeError instead. RuntimeError: there are no threads of the system, or no more.
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
        if str(error) == "can't start new thread":
            raise RuntimeError(f"{error}: {limit_met(errno.EAGAIN)}") from None
        raised = error.__context__
        if raised is None or str(error) != "release unlocked lock":
            raise
        raise raised from None


def living(*threads: Thread) -> set[Thread]:
    """Return those of the threads that run.

    If a signal's handler raises within ``Thread.is_alive``, Python before 3.13 takes a thread for ended from then on.
    """
    running, main = set(threading.enumerate()), threading.main_thread()
    # The main thread stays in the list when it has ended. Handlers run in no other.
    if main is not threading.current_thread() and not main.is_alive():
        running.discard(main)
    return running.intersection(threads)


_BEFORE_DAEMONS = 10
"""Priority of finalizers that multiprocessing calls before it ends daemon processes, such as workers."""


def at_end(function: Callable[[], object]) -> Callable[[], object]:
    """Call a function when this process ends, the latest one first; returns what cancels that.

    One that multiprocessing forks calls none of ``atexit``, and a spawned one only after the end of its workers.
    Children that are forked otherwise may call the function, too.
    """
    if parent_process() is None:
        atexit.register(function)
        return partial(atexit.unregister, function)
    watch_exit_code()
    return util.Finalize(None, function, exitpriority=_BEFORE_DAEMONS).cancel


def ends_by_exception() -> bool:
    """Whether an exception ends this process, asked in a function of :func:`at_end`."""
    if parent_process() is None:
        return hasattr(sys, "last_value")  # Python has printed it
    # One of multiprocessing is not printed yet; the last one may be of a notebook that has forked this process.
    if (code := exit_code()) is not None:
        return code != 0
    raised = sys.exc_info()[1]
    return raised.code not in (None, 0) if isinstance(raised, SystemExit) else raised is not None


_exit_began = False


@atexit.register  # not at_end(): threads of a child of multiprocessing go on then, and workers are replaced for them
def _begin_exit() -> None:
    global _exit_began
    _exit_began = True


def exiting() -> bool:
    """Whether the interpreter is exiting."""
    return _exit_began


class _ThisThread(threading.local):
    is_over: Callable[[], bool] | None = None


_this_thread = _ThisThread()
_LOOK_S = 0.05


def set_is_over(is_over: Callable[[], bool]) -> None:
    """Have this thread pause no longer once a function returns True: nobody waits for what it reads."""
    _this_thread.is_over = is_over


def pause(seconds: float) -> bool:
    """Sleep before another attempt; False: there is to be none."""
    is_over = _this_thread.is_over
    if is_over is None:
        time.sleep(seconds)
        return True
    end = time.monotonic() + seconds
    while not is_over():
        left_s = end - time.monotonic()
        if left_s <= 0:
            return True
        time.sleep(min(left_s, _LOOK_S))
    return False


def if_alive(
    function: Callable[..., object], thing: object, *arguments: object
) -> Callable[[], None]:
    """A call of a function with an object, unless that is gone by then: a finalizer must not keep it."""
    reference = weakref.ref(thing)

    def call() -> None:
        found = reference()
        if found is not None:
            function(found, *arguments)

    return call
