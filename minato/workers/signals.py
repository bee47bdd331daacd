"""Signals during a fork: what their handlers raise is not lost.

Python runs the handler of a signal in the main thread between any two instructions. What it raises (KeyboardInterrupt,
the SystemExit of a trainer that is preempted) is printed and forgotten if these belong to what modules have Python
call around a fork. It does the same in finalizers, where no code can help.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["exiting", "signals_deferred"]

_deferred: dict[int, Any] = {}
"""Handlers of the signals that are deferred at present, by number."""
_exit_began = threading.Event()


@atexit.register
def _begin_exit() -> None:
    _exit_began.set()


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


def _restore_in_child() -> None:
    _restore(set())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_child)
