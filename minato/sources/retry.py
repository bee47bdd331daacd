"""Trying again what may have failed for a moment only."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Retry"]


@dataclass(frozen=True)
class Retry:
    """How often, and for how long, a read that failed is tried again.

    The pauses double from one try to the next, up to ``longest_s``, and each is a random part of that: so a server that
    comes back is not met by everybody at once.

    Attributes:
        attempts: Tries altogether; 1: none is repeated.
        first_s: The first pause at most.
        longest_s: Any pause at most.
        deadline_s: No try begins later than so long after the first.
    """

    attempts: int = 8
    first_s: float = 0.05
    longest_s: float = 5.0
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts={self.attempts} is too small: give at least 1")

    def pauses(self) -> Iterator[float]:
        """The pause after each failure in turn; it ends when there is to be no further try."""
        started = time.monotonic()
        for failure in range(self.attempts - 1):
            bound_s = min(self.first_s * 2.0**failure, self.longest_s)
            # Its own generator: the global ones are bound to the sample, which must not depend on a failure.
            pause_s = bound_s * (0.5 + 0.5 * _jitter.random())
            if time.monotonic() - started + pause_s > self.deadline_s:
                return
            yield pause_s


_jitter = random.Random()
