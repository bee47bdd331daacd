"""Signals during finalizers and forks: what their handlers raise is not lost.

Python runs the handler of a signal in the main thread between any two instructions. What it raises (KeyboardInterrupt,
the SystemExit of a trainer that is preempted) is printed and forgotten if these belong to a finalizer, or to what
modules have Python call around a fork.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import util
from types import FrameType
from typing import Any

__all__ = ["exiting", "keep_raised", "raise_kept", "signals_deferred"]

_PAUSE_S = 0.01
"""How long after a finalizer its exception is raised again: it has returned by then, or it is waited for."""
_LONGEST_PAUSE_S = 0.5

_deferred: dict[int, Any] = {}
"""Handlers of the signals that are deferred at present, by number."""
_exit_began = threading.Event()


@atexit.register
def _begin_exit() -> None:
    _exit_began.set()
    # Python calls the hook until its very end, when this module is empty.
    if isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = sys.unraisablehook.others


def exiting() -> bool:
    """Whether the interpreter is exiting."""
    return _exit_began.is_set()


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Run the handlers of signals that come in this block at its end.

    A forked child has its handlers at once. In other threads than the main one, where no handler runs, this
    does nothing.
    """
    if threading.current_thread() is not threading.main_thread() or _deferred:
        yield
        return
    arrived: set[int] = set()
    try:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                _deferred[number] = handler
                signal.signal(number, lambda number, _: arrived.add(number))
        yield
    finally:
        _restore(arrived)


def _restore(arrived: set[int]) -> None:
    """Install the handlers again and run those of signals that have arrived; all run, even if some raise."""
    try:
        while _deferred:
            number, handler = next(iter(_deferred.items()))
            signal.signal(number, handler)
            _deferred.pop(number, None)
        while arrived:
            signal.raise_signal(arrived.pop())
    finally:
        if _deferred or arrived:
            _restore(arrived)


def keep_raised() -> None:
    """Have the main thread raise what a signal's handler raises in a finalizer, as soon as that has returned.

    From now on, in the whole program: Python may run the handler at the first instruction of any callback, where no
    code of the callback can catch what it raises. All else that Python ignores is reported as before.
    """
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


def raise_kept() -> None:
    """Raise now, in the main thread, what is kept until finalizers have returned, unless one runs.

    A signal of a process group ends helper processes, too. What the program then gets from them must not come first.
    """
    kept = signal.getsignal(signal.SIGINT)
    if isinstance(kept, _RaiseAgain) and threading.current_thread() is threading.main_thread():
        kept(signal.SIGINT, sys._getframe(1))


class _Hook:
    """Takes what Python ignores.

    Args:
        others: Takes what no handler has raised.
    """

    def __init__(self, others: Callable[[Any], object]) -> None:
        self.others = others

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        is_lost = error is not None and (isinstance(error, KeyboardInterrupt) or _by_handler(error))
        in_main = threading.current_thread() is threading.main_thread()
        if is_lost and in_main and not exiting():
            _RaiseAgain.soon(error)
        else:
            self.others(unraisable)


def _by_handler(error: BaseException) -> bool:
    """Whether the handler of a signal has raised it."""
    codes = set()
    for number in signal.valid_signals():
        handler = _deferred.get(number) or signal.getsignal(number)
        for function in (getattr(handler, "__func__", handler), type(handler).__call__):
            codes.add(getattr(function, "__code__", None))
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


class _RaiseAgain:
    """A handler of SIGINT, for a signal that this process sends to its main thread.

    Args:
        error: What is raised once no finalizer runs.
        handler: What the handler is otherwise.
    """

    def __init__(self, error: BaseException, handler: Any) -> None:
        self._error = error
        self.handler = handler
        self._lock = threading.RLock()  # the handler may run within itself
        self._over = False

    @classmethod
    def soon(cls, error: BaseException) -> None:
        """Have the main thread, which calls this, raise an exception when its finalizers have returned."""
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, cls):  # another exception is kept already
            handler._error = error
            return
        again = cls(error, signal.SIG_DFL if handler is None else handler)
        signal.signal(signal.SIGINT, again)
        threading.Thread(target=again._send, name="minato-signal", daemon=True).start()

    def _send(self) -> None:
        main, pause_s = threading.main_thread().ident, _PAUSE_S
        assert main is not None
        while True:
            time.sleep(pause_s)
            # Again and again: one that comes just before a system call does not end that.
            with self._lock:
                if self._over:
                    return
                signal.pthread_kill(main, signal.SIGINT)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._over or _in_finalizer(frame):
            return
        with self._lock:
            self._over = True
        signal.signal(signal.SIGINT, self)  # the kernel delivers here what was sent until now, and
        signal.signal(
            signal.SIGINT, self.handler
        )  # Python takes it here, before it changes the handler
        raise self._error


_FILES = {
    code.co_filename
    for code in (
        weakref.finalize.__call__.__code__,
        weakref.WeakSet.add.__code__,
        util.Finalize.__call__.__code__,
    )
}
"""Files of Python's that have callbacks for objects that are gone: where several go at once, theirs are among ours."""


def _in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if (
            code is _Hook.__call__.__code__
            or code.co_name == "__del__"
            or code.co_filename in _FILES
        ):
            return True
        frame = frame.f_back
    return False


def _restore_in_child() -> None:
    _restore(set())
    if isinstance(handler := signal.getsignal(signal.SIGINT), _RaiseAgain):
        signal.signal(signal.SIGINT, handler.handler)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_child)
