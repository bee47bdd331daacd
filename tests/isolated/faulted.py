"""Meet one fault, as the test that starts this describes: ``faulted.py FAULT [ARGUMENT]``."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
import time
from multiprocessing.sharedctypes import RawValue
from typing import Any

import torch

from minato import DataLoader, ErrorPolicy
from tests.datasets import Numbers, Sleepy


def slow(seconds: float) -> Sleepy:
    """The first four at once, the others after so many seconds."""
    return Sleepy(12, seconds, dict.fromkeys(range(4), 0))


class UntilStopped(Numbers):
    """Samples after the first four come when the processes were stopped for a while."""

    def __init__(self) -> None:
        super().__init__(12)
        self.at_work, self.was_stopped = RawValue("b", 0), RawValue("b", 0)

    def __getitem__(self, index: int) -> int:
        seen_s = time.monotonic()
        while index >= 4 and not self.was_stopped.value:
            self.at_work.value = 1
            time.sleep(0.01)
            before_s, seen_s = seen_s, time.monotonic()
            if seen_s - before_s > 8.0:
                self.was_stopped.value = 1
        return index


class Holding(Numbers):
    """Samples after the first four run compiled code that lets no other thread of Python run."""

    def __getitem__(self, index: int) -> int:
        if index >= 4:
            ctypes.PyDLL(None).sleep(60)
        return index


def iterate(dataset: Any, **options: Any) -> Any:
    """An iterator with two worker processes that has given its first batch."""
    iterator: Any = iter(DataLoader(dataset, 4, num_workers=2, **options))
    iterator._source._pool.grow(2)  # the first batch needs only one of them
    assert next(iterator).tolist() == [0, 1, 2, 3]
    return iterator


def say_at_work(iterator: Any) -> None:
    print(*(process.pid for process in iterator._source._pool.processes), "are at work", flush=True)


def stuck(kind: str) -> None:
    """Wait for workers that are stuck in a sample."""
    iterator = iterate({"sleep": slow(60), "compiled": Holding(12)}[kind])
    time.sleep(0.2)
    say_at_work(iterator)
    next(iterator)


def another_program(method: str) -> None:
    """Become another program while workers wait for work."""
    say_at_work(iterate(range(12), multiprocessing_context=method, persistent_workers=True))
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])


def stopped() -> None:
    """Wait for slow samples, with limits on the time that they may take."""
    dataset = UntilStopped()
    iterator = iterate(dataset, timeout=10.0, errors=ErrorPolicy(sample_timeout=10.0))
    while not dataset.at_work.value:
        time.sleep(0.001)
    print("at work", flush=True)
    assert [batch.tolist() for batch in iterator] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    print("complete")


def exits(workers: str) -> None:
    """End the interpreter while a daemon thread waits for batches."""
    begun = threading.Event()
    options = {"workers": workers} if workers == "thread" else {"multiprocessing_context": workers}

    def run() -> None:
        dataset = Sleepy(12, 0.05)
        for _ in DataLoader(dataset, 1, num_workers=2, **options):
            begun.set()

    threading.Thread(target=run, daemon=True).start()
    assert begun.wait(40)


def refused(limit: str) -> None:
    """Meet a limit at the start of workers, and go on without them."""
    before = len(os.listdir("/proc/self/fd"))
    if limit == "files":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + int(limit), 4096))
    try:
        list(DataLoader(range(12), 4, num_workers=2))
    except OSError as error:
        print(error)
    assert torch.cat(list(DataLoader(range(12), 4))).tolist() == list(range(12))


if __name__ == "__main__":
    faults = {"exec": another_program, **globals()}
    faults[sys.argv[1]](*sys.argv[2:])
