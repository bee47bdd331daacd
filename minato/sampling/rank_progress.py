"""The batches of one rank, in an epoch that several ranks share."""

from __future__ import annotations

from collections.abc import Iterable

from minato.sampling.completed import BatchPart, Completed, Tally, merged

__all__ = ["RankProgress", "merged_ranks"]


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
