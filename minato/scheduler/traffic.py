"""How many reads all workers have under way together, in memory that they share."""

from __future__ import annotations

from typing import Any

import numpy as np

from minato._core.wait import Gate

__all__ = ["Traffic"]

_FENCE_NBYTES = 64


class Traffic:
    """A limit that workers share. Each may always have one read under way; they take turns with the others.

    Args:
        buffer: Writable memory that every party maps; zeros mean that nothing is under way.
        offset: Where the ``nbytes(workers)`` start; a multiple of 64.
        workers: How many there can be.
        most: Reads under way in all of them together; None: no limit.
    """

    def __init__(self, buffer: Any, offset: int, workers: int, most: int | None) -> None:
        self._fence = Gate(buffer, offset)
        start = offset + _FENCE_NBYTES
        words = memoryview(buffer).cast("B")[start : start + 8 * workers]
        self._underway = np.frombuffer(words, np.int64)
        self.unlimited = most is None
        self._shared = 0 if most is None else max(most - workers, 0)

    @staticmethod
    def nbytes(workers: int) -> int:
        """Bytes for so many workers."""
        return _FENCE_NBYTES + -(-workers // 8) * 64

    def begin(self, number: int) -> None:
        """Say that worker ``number`` begins: what one of this number had under way is not any more."""
        self._underway[number] = 0

    def take(self, number: int, wanted: int) -> int:
        """How many of the wanted reads worker ``number`` may begin; they count as under way."""
        underway = self._underway
        own_one = not underway[number]
        underway[number] += wanted
        if self.unlimited:
            return wanted
        # Taken first, and only then looked at: of two workers that take at once, one sees what both have taken. The
        # event is counted by an atomic instruction, which orders the two.
        self._fence.notify(0)
        excess = int(np.maximum(underway - 1, 0).sum()) - self._shared
        back = min(max(excess, 0), wanted - own_one)
        underway[number] -= back
        return wanted - back

    def give_back(self, number: int, count: int = 1) -> None:
        """Say that so many reads of worker ``number`` are no longer under way."""
        self._underway[number] -= count
