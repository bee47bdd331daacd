"""Keeps threads of minato from holding locks while the process forks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["at_work", "forget_in_children"]

_lock = threading.RLock()
_forgotten: list[Callable[[], None]] = []


@contextmanager
def at_work() -> Iterator[bool]:
    """Hold forks back while a thread of minato works, so that no child inherits a held lock.

    Yields False during a fork; the thread must then skip its work. Waiting for the fork could deadlock with code that
    waits for the thread.
    """
    entered = _lock.acquire(blocking=False)
    try:
        yield entered
    finally:
        if entered:
            _lock.release()


def forget_in_children(forget: Callable[[], None]) -> None:
    """Call ``forget`` in each forked child, where the thread that it belongs to does not exist."""
    _forgotten.append(forget)


def _in_child() -> None:
    _lock.release()
    for forget in _forgotten:
        forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child
    )
