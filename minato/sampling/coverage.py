"""Which samples of an epoch are delivered, which remain, and the proof that none is lost or repeated."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from minato._core import Arrivals, sum_of_hashes
from minato.errors import CoverageError
from minato.observe.stats.lateness import Lateness
from minato.sampling.completed import NOTHING, BatchPart, Completed, RankProgress, Tally, merged
from minato.sampling.occurrences import hash_of, indices_of, marked
from minato.sampling.outgoing import Outgoing
from minato.sampling.replay import OrderRecord

__all__ = ["Coverage", "Progress", "remaining_batches"]


class Coverage(NamedTuple):
    """Tallies of the indices that the sampler yielded in one epoch; of batches for an iterable dataset.

    Attributes:
        epoch: Number of the epoch.
        requested: Indices that were drawn from the sampler so far.
        delivered: Indices in batches that ``next()`` returned, or for which it raised.
        skipped: Indices that the error policy skipped.
        outstanding: All others: still in flight, or dropped with an iterator.
    """

    epoch: int
    requested: Tally
    delivered: Tally
    skipped: Tally
    outstanding: Tally

    @property
    def complete(self) -> bool:
        """Whether every requested index was delivered or skipped once."""
        return self.outstanding == NOTHING


class Progress:
    """Follows the indices of one epoch from the sampler to the delivered batches.

    Args:
        epoch: Number of the epoch.
        done: The part that an earlier run completed.
    """

    def __init__(self, epoch: int, done: Completed | None = None) -> None:
        self.epoch = epoch
        self.finished = False
        """Whether the epoch has ended."""
        self.batches = 0
        """Number of batches delivered in this run."""
        self.last: Outgoing | None = None
        """The last batch, until it is recorded."""
        self.lateness = Lateness()
        """Distance of the batches from the sampler's order, and the slow samples in each."""
        self.record: OrderRecord | None = None
        """Records the order of the batches; None without ``record_order``."""
        self.length: Callable[[], int | None] = lambda: None
        """Returns the number of batches that remain when the epoch begins; None if it is unknown."""
        self.part: RankProgress | None = None
        """Batches of this rank, which a state holds if several ranks share the epoch; None otherwise."""
        self._before = done or Completed()
        self._last_batch: tuple[list[int], int] = [], 0
        self._requested = 0  # batches
        self._reported = self._before.delivered
        self._arrivals = Arrivals(
            hash_of, self._before.expected, self._before.delivered, self._before.skipped
        )

    def settle(self) -> None:
        """Record the last batch, if the training loop has it."""
        last = self.last
        if last is not None and last.is_given:
            for record in last.records:
                record()
            self.last = None

    def requested(self, indices: Any, number: int | None = None) -> None:
        """Note a batch of indices that the sampler yields.

        Args:
            number: Of the batch, from 0 on in this run; a second note of it changes nothing. None: the next one.
        """
        number = self._requested if number is None else number
        if self.record is not None:
            self.record.requested(indices, number)
        self._arrivals.ask(indices_of(indices), number)
        self.lateness.asked(len(indices) or 1, number)
        self._requested = max(number + 1, self._requested)

    def returns(
        self,
        positions: list[int],
        start: int,
        num_slow: int = 0,
    ) -> Callable[[], None]:
        """Note the batch that ``next()`` is about to return.

        Args:
            positions: Positions of its samples, in the order in which batches were drawn; negative without a sample.
            start: Position of the first sample of the epoch.
            num_slow: Number of slow samples in the batch.

        Returns:
            A function that notes it as delivered. A second call changes nothing.
        """
        number = self.batches
        self.lateness.delivered(positions, start, num_slow, number)
        if self.record is not None:
            self.record.delivered([position - start for position in positions], number)
        return functools.partial(self.delivered, positions, start, number)

    def delivered(self, positions: list[int], start: int, number: int | None = None) -> None:
        """Note a delivered batch.

        Args:
            number: Of the batch, from 0 on in this run; a second note of it changes nothing. None: the next one.
        """
        number = self.batches if number is None else number
        self._arrivals.deliver(positions, start, number)
        self.batches = max(number + 1, self.batches)
        if self.part is not None:
            self._last_batch = positions, start

    def latest(self) -> BatchPart:
        """Return the samples of the last delivered batch of a shared epoch. Called once after each batch."""
        self.settle()
        positions, start = self._last_batch
        first, count = min(positions, default=-1), len(positions)
        numbers: Iterable[tuple[int, int]]
        consecutive = list(range(first, first + count))  # the usual case
        if first >= 0 and positions == consecutive:
            numbers = [(first - start, first - start + count)]
        else:
            found = (position - start for position in positions if position >= 0)
            numbers = merged((number, number + 1) for number in found)
        before, self._reported = self._reported, Tally(*self._arrivals.delivered)
        return BatchPart(self._before.placed(numbers), *self._reported.minus(before))

    def skipped(self, positions: list[int], start: int) -> None:
        """Note skipped samples. Called before the batch that they belong to is delivered."""
        self._arrivals.skip(positions, start)

    def finish(self, dropped: bool = False) -> None:
        """Note the end of the epoch.

        Args:
            dropped: Batches that are not delivered do not exist: the streams of an iterable dataset have ended.

        Raises:
            CoverageError: Samples were lost or repeated.
        """
        if self.finished:
            return
        self.settle()
        if dropped:
            self._arrivals.drop()
        coverage = self.coverage()
        if not coverage.complete or self._arrivals.unexpected:
            raise CoverageError(
                f"epoch {self.epoch} has ended, and the delivered samples are not those that the sampler requested: "
                f"requested {coverage.requested.samples} samples, delivered {coverage.delivered.samples}, skipped "
                f"{coverage.skipped.samples}, repeated {self._arrivals.unexpected}, and the hash of what is missing is "
                f"{coverage.outstanding.hash:#018x}. This is a fault of minato: please report it."
            )
        if self.record is not None:
            self.record.finish()
        self.finished = True

    def has_drawn(self, batches: Sequence[Any]) -> bool:
        """Return whether these batches have the indices that were requested in this run."""
        total = sum(sum_of_hashes(indices, hash_of) for indices in batches)
        requested = Tally(*self._arrivals.asked).minus(self._before.expected)
        return Tally.of(sum(map(len, batches)), total) == requested

    def coverage(self) -> Coverage:
        """Return the tallies of the epoch so far."""
        self.settle()
        arrivals = self._arrivals
        requested, delivered, skipped, dropped = (
            Tally(*pair)
            for pair in (arrivals.asked, arrivals.delivered, arrivals.skipped, arrivals.dropped)
        )
        requested = requested.minus(dropped)
        outstanding = requested.minus(delivered).minus(skipped)
        return Coverage(self.epoch, requested, delivered, skipped, outstanding)

    def done(self) -> Completed:
        """Return the complete part of the epoch, of this run and earlier ones."""
        self.settle()
        arrivals = self._arrivals
        numbers = [(0, arrivals.prefix), *((number, number + 1) for number in arrivals.beyond)]
        return Completed(
            self._before.extended(numbers),
            self._before.batches + self.batches,
            Tally(*arrivals.delivered),
            Tally(*arrivals.skipped),
        )


def remaining_batches(
    batches: Iterator[Any], done: Completed, mixes: bool, drop_last: bool = False
) -> Iterator[Any]:
    """Return the remaining batches of an epoch, out of all that its sampler yields.

    Args:
        batches: All batches of indices.
        done: The complete part of the epoch.
        mixes: Samples may take places in other batches than their own. Then the remaining indices are divided into new
            batches, of the sizes of those not delivered. Otherwise whole batches remain.
        drop_last: Whether to drop a new batch that is too small because of skipped samples.

    Raises:
        ValueError: The sampler does not yield the indices of the complete part.
    """
    whole_batches: list[Any] = []
    keys_left: deque[Any] = deque()
    sizes: deque[int] = deque()
    ranges = deque(done.ranges)
    count = total = number = ordinal = first_indices = largest = 0
    while ordinal < done.end or (mixes and number < done.batches):
        indices = next(batches, None)
        if indices is None:
            raise ValueError(_ANOTHER_ORDER)
        finished, left, whole = _split(indices, ordinal, ranges)
        count += len(finished)
        total += sum_of_hashes(finished, hash_of)
        keys_left.extend(left)
        largest = max(largest, len(indices))
        if number < done.batches:
            first_indices += len(indices)
        else:
            sizes.append(len(indices))
        if not whole:
            whole_batches.append(indices)
        ordinal += len(indices) or 1
        number += 1
    if Tally.of(count, total) != done.expected:
        raise ValueError(_ANOTHER_ORDER)
    if mixes:
        # Where ranks share an epoch, its short batches may be complete while full ones remain.
        return _rebatched(batches, keys_left, sizes, drop_last, largest, first_indices - count)
    return itertools.chain(whole_batches, batches)


_ANOTHER_ORDER = (
    "the sampler yields other indices than when the state was taken, so the remaining ones are unknown: "
    "use seed=, give the sampler a generator, or give it state_dict() and load_state_dict()"
)


def _split(
    indices: Any, ordinal: int, ranges: deque[tuple[int, int]]
) -> tuple[Sequence[Any], list[Any], bool]:
    """Split a batch into complete and remaining indices, and whether all are complete; drops ranges before it."""
    while ranges and ranges[0][1] <= ordinal:
        ranges.popleft()
    start, end = ranges[0] if ranges else (ordinal, ordinal)
    if start <= ordinal and ordinal + (len(indices) or 1) <= end:
        return indices, [], True
    finished: list[Any] = []
    left: list[Any] = []
    for at, index in enumerate(indices, ordinal):
        while ranges and ranges[0][1] <= at:
            ranges.popleft()
        (finished if ranges and ranges[0][0] <= at else left).append(index)
    return finished, left, False


def _rebatched(
    batches: Iterator[Any],
    indices: deque[Any],
    sizes: deque[int],
    drop_last: bool,
    largest: int,
    surplus: int,
) -> Iterator[Any]:
    """Yield batches of the given sizes from remaining and further indices; ``surplus`` fills up small ones."""
    while True:
        while sizes:
            more = min(largest - sizes[0], surplus) if surplus > 0 else 0
            if len(indices) < sizes[0] + more:
                break
            surplus -= more
            yield marked([indices.popleft() for _ in range(sizes.popleft() + more)])
        drawn = next(batches, None)
        if drawn is None:
            break
        indices.extend(drawn)
        sizes.append(len(drawn))
    if indices and not drop_last:
        yield marked(list(indices))
