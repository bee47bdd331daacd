"""What one rank has had of a pass that several ranks share."""

from __future__ import annotations

from collections.abc import Iterable

from minato.sampling.coverage import Completed, Portion, Tally, merged

__all__ = ["RankProgress", "merged_ranks"]


class RankProgress:
    """Counts what one rank is handed; the pass itself is followed where it is dealt out.

    Args:
        length: Batches that this rank gets of the whole pass.
        before: What earlier runs have handed it of a pass that is resumed; None: it begins at the beginning.

    Attributes:
        before: The same.
        finished: Whether it has had all, and has seen the end.
    """

    def __init__(self, length: int, before: Completed | None = None) -> None:
        self.before = before
        self.finished = False
        self._length = length
        self._done = before or Completed()
        self._ranges = list(self._done.ranges)
        self._batches = self._done.batches
        self._samples, self._hash = self._done.delivered

    def handed(self, portion: Portion) -> None:
        """Note a batch that the program gets."""
        ranges, samples, hashes = portion
        self._ranges += ranges
        self._batches += 1
        self._samples += samples
        self._hash += hashes

    def ended(self) -> None:
        """Note that there is no other batch for this rank."""
        self.finished = self._batches == self._length

    def done(self) -> Completed:
        """All that it has had of the pass, in this run and before."""
        tally = Tally.of(self._samples, self._hash)
        return Completed(merged(self._ranges), self._batches, tally)


def merged_ranks(parts: Iterable[Completed]) -> Completed:
    """What several ranks have had together.

    Raises:
        ValueError: Two of them have had the same.
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
