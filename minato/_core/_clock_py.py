"""Clocks in whole nanoseconds, and the test of a timeout."""

from __future__ import annotations

import time

__all__ = ["expired", "now_ns", "thread_cpu_ns"]


def now_ns() -> int:
    """Return the monotonic clock in ns; on Linux all processes share its origin."""
    return time.monotonic_ns()


def thread_cpu_ns() -> int:
    """Return the CPU time that the calling thread has used, in ns."""
    return time.thread_time_ns()


def expired(start_ns: int, timeout_ns: int) -> bool:
    """Tell whether ``timeout_ns`` have passed since ``start_ns``, a value of :func:`now_ns`.

    A timeout of 0 has always expired; a negative one never does.
    """
    if timeout_ns <= 0:
        return timeout_ns == 0
    return time.monotonic_ns() - start_ns >= timeout_ns
