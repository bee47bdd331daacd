"""What several scripts use."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

KINDS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "processes": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "workers": "thread"},
}


def name_semaphores() -> None:
    """Other programs use ``/dev/shm`` meanwhile: names of ours hold the process id, as torch's do."""
    multiprocessing.current_process()._config["semprefix"] = f"/mp-{os.getpid()}"  # type: ignore[attr-defined]


def measure() -> dict[str, int]:
    """What this process has."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "children": len(psutil.Process().children(recursive=True)),
        "shared memory": sum(str(os.getpid()) in name for name in os.listdir("/dev/shm")),
    }


def settled(
    measure: Callable[[], dict[str, int]], is_settled: Callable[[dict[str, int]], bool]
) -> dict[str, int]:
    """What there is when something holds of it, or when all that ends has had the time to, on a busy machine."""
    deadline = time.monotonic() + 30.0
    while True:
        last = measure()
        if is_settled(last) or time.monotonic() > deadline:
            return last
        time.sleep(0.02)
