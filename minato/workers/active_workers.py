"""The number of active workers, in shared memory; inactive workers sleep."""

from __future__ import annotations

from collections.abc import Callable

from minato._core import EventCount, SharedWords

__all__ = ["ActiveWorkers"]

_WORDS_NBYTES = SharedWords.nbytes(1)
_PATIENCE_S = 1.0
"""The longest sleep of an inactive worker between two checks that its parent is alive."""


class ActiveWorkers:
    """Workers with a number below ``count`` are active, the others sleep.

    Inactive processes start before the program has threads or uses a GPU, when a fork is safe. They sleep on an event
    count of their own: on the one of the active workers they would consume its wake-ups.

    Args:
        buffer: Writable memory that every party maps; zeros mean that no worker is active.
        offset: Where its ``NBYTES`` start; a multiple of 8.
        work: The event count on which active workers sleep.
    """

    NBYTES = 64

    def __init__(self, buffer: object, offset: int, work: EventCount) -> None:
        self._words = SharedWords(buffer, offset, 1)
        self._events = EventCount(buffer, offset + _WORDS_NBYTES)
        self._work = work

    @property
    def count(self) -> int:
        """Number of active workers."""
        return self._words.load(0)

    def set_count(self, count: int) -> None:
        """Set the number of active workers; a worker that becomes inactive first completes what it has claimed."""
        self._words.store(0, count)
        self._events.notify()
        self._work.notify()  # an inactive worker that sleeps there would consume wake-ups of active ones

    def wake_inactive(self) -> None:
        """Wake the inactive workers, because the loader shuts down."""
        self._events.notify()

    def is_active(self, number: int) -> bool:
        """Whether worker ``number`` is active now."""
        return number < self._words.load(0)

    def wait_until_active(
        self, number: int, over: Callable[[], bool], parent_lives: Callable[[], bool]
    ) -> bool:
        """Sleep until worker ``number`` is active.

        Returns:
            False if the worker must exit: ``over()`` holds, or its parent process has ended.
        """
        while True:
            seen = self._events.events
            if self.is_active(number):
                return True
            if over():
                return False
            if not self._events.wait(seen, _PATIENCE_S) and not parent_lives():
                return False
