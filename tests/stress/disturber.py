"""What happens to the workers of a loader from outside in a chaos run."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import threading
import time
from collections import Counter
from typing import Any

from tests.stress.scenario import watch

PEACE = 5
"""No kill for so many times as long as the last replacement took: else a slow start leaves no time to work."""
LEAST_PEACE_S = 0.2
"""The same in seconds: else a slow sample may run whenever a worker is killed."""
PATIENCE_S = 5.0
"""How long a replacement is waited for: the consumer may have no need of it."""


class Disturber:
    """Kills and stops workers of an iterator, and measures how soon others stand in for those it killed.

    It kills only when a batch has been delivered since the last time: a sample on which three workers died would
    rightly be given up.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.figures: Counter[str] = Counter()
        self.recoveries_s: list[float] = []
        self._pool: Any = None
        self._may_kill = threading.Event()
        self._over = threading.Event()
        self._peace_until = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def watch(self, iterator: Any) -> None:
        """Disturb the workers of this iterator, which has delivered a batch or has not begun."""
        self._pool = iterator._source._pool
        self._may_kill.set()
        watch()

    def rest(self) -> None:
        """Disturb nobody."""
        self._pool = None
        faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self.draw.random() * 0.03):
            pool = self._pool
            processes = list(getattr(pool, "processes", ()))
            number = self.draw.randrange(len(processes)) if processes else None
            pid = None if number is None else processes[number].pid
            if pid is None:
                continue
            if self.draw.random() < 0.3:
                self._stall(pid)
            elif self._may_kill.is_set() and time.perf_counter() > self._peace_until:
                self._may_kill.clear()
                self._kill(pool, number, pid)

    def _stall(self, pid: int) -> None:
        if signalled(pid, signal.SIGSTOP):
            self.figures["workers stopped for a while"] += 1
            time.sleep(self.draw.random() * 0.05)
            signalled(pid, signal.SIGCONT)

    def _kill(self, pool: Any, number: int, pid: int) -> None:
        if not signalled(pid, signal.SIGKILL):
            return
        self.figures["workers killed"] += 1
        begin = time.perf_counter()
        while (took_s := time.perf_counter() - begin) < PATIENCE_S and self._pool is pool:
            if pool.processes[number].pid not in (pid, None):
                self.recoveries_s.append(took_s)
                self._peace_until = begin + max(PEACE * took_s, LEAST_PEACE_S)
                return
            time.sleep(0.0005)


def signalled(pid: int, number: int) -> bool:
    """Send a signal to a worker that may have ended already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
