"""How many reads all workers have under way together, in memory that they share."""

from __future__ import annotations

from typing import Any

from minato._core.wait import SharedWords

__all__ = ["SharedReadLimit"]


class SharedReadLimit:
    """A limit that workers share. Each may always have one read under way; they take turns with the others.

    Args:
        buffer: Writable memory that every party maps; zeros mean that nothing is under way.
        offset: Where the ``nbytes(workers)`` start; a multiple of 8.
        workers: How many there can be.
        most: Reads under way in all of them together; None: no limit.
    """

    def __init__(self, buffer: Any, offset: int, workers: int, most: int | None) -> None:
        self._underway = SharedWords(buffer, offset, workers)
        self._workers = range(workers)
        self.unlimited = most is None
        self._shared = 0 if most is None else max(most - workers, 0)

    @staticmethod
    def nbytes(workers: int) -> int:
        """Bytes for so many workers: whole cache lines."""
        return -(-SharedWords.nbytes(workers) // 64) * 64

    def begin(self, number: int) -> None:
        """Say that worker ``number`` begins: what one of this number had under way is not any more."""
        self._underway.store(number, 0)

    def take(self, number: int, wanted: int) -> int:
        """How many of the wanted reads worker ``number`` may begin; they count as under way."""
        underway = self._underway
        own = underway.load(number)
        # Taken first, and only then looked at: of two workers that take at once, one sees what both have taken.
        underway.store(number, own + wanted)
        if self.unlimited:
            return wanted
        excess = sum(max(underway.load(one) - 1, 0) for one in self._workers) - self._shared
        back = min(max(excess, 0), wanted - (own == 0))
        if back:
            underway.store(number, own + wanted - back)
        return wanted - back

    def give_back(self, number: int, count: int = 1) -> None:
        """Say that so many reads of worker ``number`` are no longer under way."""
        self._underway.store(number, self._underway.load(number) - count)
