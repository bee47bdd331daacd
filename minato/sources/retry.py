"""How reads are repeated after transient errors."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Retry"]


@dataclass(frozen=True)
class Retry:
    """How often, and for how long, a read that failed is repeated.

    The pauses double with each attempt, up to ``longest_s``. The second half of each pause is random, so that the
    processes do not all return to a restarted server at the same time.

    Attributes:
        attempts: Largest number of attempts; 1: no read is repeated.
        first_s: Upper limit of the first pause, in seconds.
        longest_s: Upper limit of any pause, in seconds.
        deadline_s: No attempt begins more than this many seconds after the first.
    """

    attempts: int = 8
    first_s: float = 0.05
    longest_s: float = 5.0
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts={self.attempts} is too small: give at least 1")

    def pauses(self) -> Iterator[float]:
        """The pause after each failure in seconds, as long as there is a further attempt."""
        started = time.monotonic()
        for failure in range(self.attempts - 1):
            bound_s = min(self.first_s * 2.0**failure, self.longest_s)
            # Not from a global generator: those are bound to the sample, which must not depend on a failure.
            pause_s = bound_s * (0.5 + 0.5 * _jitter.random())
            if time.monotonic() - started + pause_s > self.deadline_s:
                return
            yield pause_s


_jitter = random.Random()
