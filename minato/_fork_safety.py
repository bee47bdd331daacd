"""Threads of ours that must not be in the middle of something while the process forks."""

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
    """For what a thread of ours does: no fork happens meanwhile, so that no child inherits a lock that it holds.

    Gives False if it should not do it now, because a fork is under way: a thread that waited for that could keep those
    waiting who wait for the thread.
    """
    entered = _lock.acquire(blocking=False)
    try:
        yield entered
    finally:
        if entered:
            _lock.release()


def forget_in_children(forget: Callable[[], None]) -> None:
    """Have ``forget`` called in each forked child: the thread that it belongs to is not there."""
    _forgotten.append(forget)


def _in_child() -> None:
    _lock.release()
    for forget in _forgotten:
        forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child
    )
