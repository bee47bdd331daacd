"""A limit on the in-flight reads of all workers, in shared memory."""

from __future__ import annotations

from typing import Any

from minato._core.wait import SharedWords

__all__ = ["SharedReadLimit"]


class SharedReadLimit:
    """A limit that all workers share. Each worker may always have one read in flight; the rest is shared.

    Args:
        buffer: Writable memory that every party maps; zeros mean that no read is in flight.
        offset: Where the ``nbytes(workers)`` start; a multiple of 8.
        workers: Largest number of workers.
        most: Largest number of reads in flight in all of them; None: no limit.
    """

    def __init__(self, buffer: Any, offset: int, workers: int, most: int | None) -> None:
        self._in_flight = SharedWords(buffer, offset, workers)
        self._workers = range(workers)
        self.unlimited = most is None
        self._shared = 0 if most is None else max(most - workers, 0)

    @staticmethod
    def nbytes(workers: int) -> int:
        """Bytes for this number of workers: whole cache lines."""
        return -(-SharedWords.nbytes(workers) // 64) * 64

    def begin(self, number: int) -> None:
        """Reset the count of worker ``number``, which starts: the reads of a predecessor are lost."""
        self._in_flight.store(number, 0)

    def take(self, number: int, wanted: int) -> int:
        """Return how many of ``wanted`` reads worker ``number`` may start; they count as in flight."""
        in_flight = self._in_flight
        own = in_flight.load(number)
        # Store first, then read: of two workers that take at the same time, at least one sees what both have taken.
        in_flight.store(number, own + wanted)
        if self.unlimited:
            return wanted
        excess = sum(max(in_flight.load(one) - 1, 0) for one in self._workers) - self._shared
        back = min(max(excess, 0), wanted - (own == 0))
        if back:
            in_flight.store(number, own + wanted - back)
        return wanted - back

    def give_back(self, number: int, count: int = 1) -> None:
        """Count ``count`` reads of worker ``number`` as finished."""
        self._in_flight.store(number, self._in_flight.load(number) - count)
