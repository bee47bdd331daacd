"""Programs of several ranks: one process for each, with a barrier between the steps."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError
from typing import Any, TypeVar

T = TypeVar("T")

_STUCK_S = 60.0
"""A rank that does not reach the barrier within this time is stuck."""
_barrier: Barrier | None = None


def run_ranks(program: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
    """Call a program once for each element of ``arguments``, each in a forked process; return the results in order."""
    fork = multiprocessing.get_context("fork")
    count = len(arguments)
    with ProcessPoolExecutor(count, fork, _enter, (fork.Barrier(count),)) as ranks:
        calls = [ranks.submit(_call, program, each) for each in arguments]
        errors = [error for call in calls if (error := call.exception()) is not None]
    if errors:  # the error of one rank breaks the barrier of the others
        raise min(errors, key=lambda error: isinstance(error, BrokenBarrierError))
    return [call.result() for call in calls]


def wait_for_all() -> None:
    """In a rank: wait until all ranks have reached this call."""
    assert _barrier is not None
    _barrier.wait(_STUCK_S)


def _enter(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _call(program: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    wait_for_all()  # so no process takes two of them
    try:
        return program(*arguments)
    except BaseException:
        assert _barrier is not None
        _barrier.abort()
        raise
