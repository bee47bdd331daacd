"""The complete part of an epoch, in all or for one rank: ranges of its samples, and the tally that proves them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["NOTHING", "BatchPart", "Completed", "RankProgress", "Tally", "merged", "merged_ranks"]

_MODULUS = 1 << 64

Ranges = tuple[tuple[int, int], ...]
"""Ranges ``[first, end)`` of ordinals. The n-th index that the sampler yields in an epoch has the ordinal n. An empty
batch takes one ordinal, too."""


class Tally(NamedTuple):
    """Number of indices, and the sum of their 64-bit hashes modulo 2**64.

    Equal sets of indices have equal tallies in any order. Different sets have equal tallies with a probability of
    2**-64.
    """

    samples: int
    hash: int

    @classmethod
    def of(cls, samples: int, hashes: int) -> Tally:
        """Return the tally of a number of indices, from the sum of their hashes."""
        return cls(samples, hashes % _MODULUS)

    def minus(self, other: Tally) -> Tally:
        """Return the tally without the indices of another one."""
        return Tally.of(self.samples - other.samples, self.hash - other.hash)


NOTHING = Tally(0, 0)


class BatchPart(NamedTuple):
    """The samples of one batch: ranges of their ordinals, their number, and the sum of their hashes."""

    ranges: list[tuple[int, int]]
    samples: int
    hashes: int


class Completed(NamedTuple):
    """The part of an epoch that was complete when a state was taken.

    Attributes:
        ranges: Ordinals ``[first, end)`` of the complete samples, ascending, with gaps between them.
        batches: Number of delivered batches.
        delivered: Tally of the delivered indices.
        skipped: Tally of the skipped indices.
    """

    ranges: Ranges = ()
    batches: int = 0
    delivered: Tally = NOTHING
    skipped: Tally = NOTHING

    @property
    def end(self) -> int:
        """The ordinal from which on nothing is complete."""
        return self.ranges[-1][1] if self.ranges else 0

    @property
    def expected(self) -> Tally:
        """Tally of all complete indices."""
        return Tally.of(*(sum(pair) for pair in zip(self.delivered, self.skipped, strict=True)))

    def extended(self, numbers: Iterable[tuple[int, int]]) -> Ranges:
        """Return the ranges with more of them, given as for :meth:`placed`."""
        return merged([*self.ranges, *self.placed(numbers)])

    def placed(self, numbers: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return ranges of ordinals, for ranges of numbers that count from 0 in the remaining samples only."""
        gaps = list(itertools.pairwise((0, *itertools.chain(*self.ranges))))[::2]
        gaps.append((self.end, 1 << 63))
        found = []
        waiting = deque(numbers)
        number = 0  # of the gap's first ordinal
        for start, stop in gaps:
            while waiting and waiting[0][0] < number + stop - start:
                first, end = waiting.popleft()
                inside = min(end, number + stop - start)
                found.append((start + first - number, start + inside - number))
                if inside < end:
                    waiting.appendleft((inside, end))
            number += stop - start
        return found


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges ``[first, end)`` in ascending order, those that touch joined."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(item for item in ranges if item[0] < item[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return tuple(found)


class RankProgress:
    """Counts the batches that one rank gets. The rank that runs the workers counts those of the whole epoch.

    Args:
        length: Number of batches that this rank gets in the whole epoch.
        before: Batches of earlier runs, where an epoch is resumed; None: the epoch begins.

    Attributes:
        before: The same.
        finished: Whether the rank got all its batches, and the end of the epoch.
    """

    def __init__(self, length: int, before: Completed | None = None) -> None:
        self.before = before
        self.finished = False
        self._length = length
        self._completed = before or Completed()
        self._ranges = list(self._completed.ranges)
        self._batches = self._completed.batches
        self._samples, self._hash = self._completed.delivered

    def handed(self, part: BatchPart) -> None:
        """Count a batch that the program gets."""
        ranges, samples, hashes = part  # a plain tuple from another process
        self._ranges += ranges
        self._batches += 1
        self._samples += samples
        self._hash += hashes

    def ended(self) -> None:
        """Note that the epoch has no other batch for this rank."""
        self.finished = self._batches == self._length

    def done(self) -> Completed:
        """Return what this rank got in the epoch, in this run and earlier ones."""
        tally = Tally.of(self._samples, self._hash)
        return Completed(merged(self._ranges), self._batches, tally)


def merged_ranks(parts: Iterable[Completed]) -> Completed:
    """Return what several ranks got together.

    Raises:
        ValueError: Two ranks got the same sample.
    """
    parts = list(parts)
    ranges = [pair for part in parts for pair in part.ranges]
    together = merged(ranges)
    if _count(together) != _count(ranges):
        raise ValueError(
            "the states that were loaded hold samples that two ranks have had, so that they are not of one run: load "
            "in each rank the state that it saved, all at the same step"
        )
    samples = sum(part.delivered.samples for part in parts)
    hashes = sum(part.delivered.hash for part in parts)
    return Completed(together, sum(part.batches for part in parts), Tally.of(samples, hashes))


def _count(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(end - first for first, end in ranges)
