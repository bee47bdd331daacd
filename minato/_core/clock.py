"""Clocks in whole nanoseconds, and the test of a timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._core import USE_EXTENSIONS

if TYPE_CHECKING or not USE_EXTENSIONS:
    from minato._core._clock_py import expired, now_ns, thread_cpu_ns
else:
    from minato._core._clock_c import expired, now_ns, thread_cpu_ns

__all__ = ["expired", "now_ns", "thread_cpu_ns"]
