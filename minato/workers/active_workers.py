"""How many of the workers shall work, in memory that they share; the others sleep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minato._core.wait import EventCount, SharedWords

__all__ = ["ActiveWorkers"]

_WORDS_NBYTES = SharedWords.nbytes(1)
_PATIENCE_S = 1.0
"""How long a worker sleeps at most before it looks whether its parent lives."""


class ActiveWorkers:
    """Workers with a number below ``wanted`` work, the others stand by.

    Processes that stand by were started before the program had threads or used a GPU, when starting them was safe.
    They sleep on a gate of their own: on the one that working ones sleep on, they would take wake-ups from these.

    Args:
        buffer: Writable memory that every party maps; zeros mean that nobody is wanted.
        offset: Where the roster's ``NBYTES`` start; a multiple of 8.
        work: The gate on which working workers sleep.
    """

    NBYTES = 64

    def __init__(self, buffer: Any, offset: int, work: EventCount) -> None:
        self._words = SharedWords(buffer, offset, 1)
        self._gate = EventCount(buffer, offset + _WORDS_NBYTES)
        self._work = work

    @property
    def wanted(self) -> int:
        """How many shall work."""
        return self._words.load(0)

    def want(self, count: int) -> None:
        """Have so many work from now on; those that are too many finish what they have in hand."""
        self._words.store(0, count)
        self._gate.notify()
        self._work.notify()  # who sleeps there and is no longer wanted would take wake-ups from those who are

    def dismiss(self) -> None:
        """Wake whoever stands by, because the loader ends."""
        self._gate.notify()

    def rests(self, number: int) -> bool:
        """Whether this worker is not wanted now."""
        return number >= self._words.load(0)

    def stand_by(
        self, number: int, over: Callable[[], bool], parent_lives: Callable[[], bool]
    ) -> bool:
        """Sleep until this worker is wanted.

        Returns:
            False if it shall leave: the loader ends, or its process is gone.
        """
        while True:
            seen = self._gate.events
            if not self.rests(number):
                return True
            if over():
                return False
            if not self._gate.wait(seen, _PATIENCE_S) and not parent_lives():
                return False
