"""Gates: what does it cost to say that something happened, and how soon does another process know?"""

from __future__ import annotations

import atexit
import mmap
import os
import signal
from collections.abc import Callable
from types import ModuleType
from typing import Any

from bench.micro._twins import Operations, main

PATIENCE_S = 1.0


def partner(wait: ModuleType) -> Callable[[], None]:
    """Start a process that answers each notification; the function notifies it and waits for the answer."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    there, back = wait.Gate(memory, 0), wait.Gate(memory, 64)
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        seen = 0
        while os.getppid() == parent:
            if there.wait(seen, PATIENCE_S):
                seen += 1
                back.notify()
        os._exit(0)
    atexit.register(os.waitpid, pid, 0)
    atexit.register(os.kill, pid, signal.SIGKILL)

    def call() -> None:
        seen = back.events
        there.notify()
        while not back.wait(seen, PATIENCE_S):
            pass

    return call


def operations(wait: ModuleType) -> Operations:
    names: dict[str, Any] = {
        "gate": wait.Gate(bytearray(64), 0),
        "missed": wait.Gate(bytearray(b"\1" + bytes(63)), 0),
        "call": partner(wait),
    }
    return {
        "notify, nobody asleep": ("gate.notify()", names),
        "wait for an event that has been": ("missed.wait(0, 1.0)", names),
        "hand over to another process and back": ("call()", names),
    }


if __name__ == "__main__":
    main("wait", operations)
