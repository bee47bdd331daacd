"""Clocks: what does a test of a deadline cost? The system call is the larger part of each."""

from __future__ import annotations

from types import ModuleType

from bench.micro._twins import Operations, main


def operations(clock: ModuleType) -> Operations:
    names = {"clock": clock, "start_ns": clock.now_ns()}
    return {
        "now_ns": ("clock.now_ns()", names),
        "thread_cpu_ns": ("clock.thread_cpu_ns()", names),
        "expired": ("clock.expired(start_ns, 3_600_000_000_000)", names),
    }


if __name__ == "__main__":
    main("clock", operations)
