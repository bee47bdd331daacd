"""The training loop waits for batches: for the pool of workers, and how long; a stop of the process is no waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from minato._core import now_ns

__all__ = ["STOPPED_S", "ConsumerWait", "Pool", "waited_s"]

STOPPED_S = 1.0
"""What comes later than this after its time shows that the whole process was stopped, by SIGSTOP or Ctrl-Z."""


def waited_s(wait: Callable[[float], object], limit_s: float) -> float:
    """Call ``wait(limit_s)``; returns how many of these seconds it waited, 0 if the process was stopped meanwhile."""
    start_s = time.monotonic()
    wait(limit_s)
    passed_s = time.monotonic() - start_s
    return 0.0 if passed_s > limit_s + STOPPED_S else min(passed_s, limit_s)


class Pool(Protocol):
    """The workers, as the dispatcher sees them."""

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep, or work, until the count of ready events exceeds ``seen`` or the time is over."""

    def check(self) -> None:
        """Raise if a worker died and is not replaced."""


@dataclass
class ConsumerWait:
    """How long the training loop waits, and how many batches are ready for it.

    Attributes:
        waited_ns: Total time of its waits for batches, without the present one.
        waiting_since_ns: Start of the present wait, 0 if there is none.
        delivered: Batches that it got.
        watched: Whether ``ready`` and ``ending`` are kept up to date.
        ready: Batches that were ready at the last call of ``next()``.
        ending: Whether nothing is left to open, so that workers soon idle.
    """

    waited_ns: int = 0
    waiting_since_ns: int = 0
    delivered: int = 0
    watched: bool = False
    ready: int = 0
    ending: bool = False

    def begin_wait(self) -> None:
        """Start the clock of a wait."""
        self.waiting_since_ns = now_ns()

    def end_wait(self) -> None:
        """Stop the clock, and add the wait to the total."""
        self.waited_ns = self.waited_until(now_ns())
        self.waiting_since_ns = 0

    def waited_until(self, now: int) -> int:
        """Total time in ns until ``now``, the present wait included."""
        return self.waited_ns + (now - self.waiting_since_ns if self.waiting_since_ns else 0)
