"""Clocks in whole nanoseconds, and the test of a timeout."""

from libc.stdint cimport int64_t

from minato._core.clock_gettime cimport mn_expired, mn_now_ns, mn_thread_cpu_ns

__all__ = ["expired", "now_ns", "thread_cpu_ns"]


def now_ns() -> int:
    """Return the monotonic clock in ns; on Linux all processes share its origin."""
    return mn_now_ns()


def thread_cpu_ns() -> int:
    """Return the CPU time that the calling thread has used, in ns."""
    return mn_thread_cpu_ns()


def expired(int64_t start_ns, int64_t timeout_ns) -> bool:
    """Tell whether ``timeout_ns`` have passed since ``start_ns``, a value of :func:`now_ns`.

    A timeout of 0 has always expired; a negative one never does.
    """
    return mn_expired(start_ns, timeout_ns)
