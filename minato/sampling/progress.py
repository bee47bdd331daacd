"""What was requested, delivered and skipped of an epoch, what is left of it, and the proof that nothing is lost."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from minato._core import Arrivals, now_ns, sum_of_hashes
from minato._support.hashes import index_hash
from minato._support.items import item_of
from minato.errors import CoverageError, Postponed, not_the_end, warn
from minato.observe.lateness import InOrderLateness, Lateness
from minato.sampling.readers import EpochReaders, merged
from minato.sampling.replay import OrderRecord
from minato.sampling.samplers import Batch, Recurring, unmarked

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

    def plus(self, other: Tally) -> Tally:
        """Return the tally with the indices of another one."""
        return Tally(self.samples + other.samples, (self.hash + other.hash) % _MODULUS)

    def minus(self, other: Tally) -> Tally:
        """Return the tally without the indices of another one."""
        return Tally(self.samples - other.samples, (self.hash - other.hash) % _MODULUS)

    @classmethod
    def of(cls, batch: object) -> Tally:
        """Return the tally of the indices of a batch."""
        indices, _ = unmarked(batch)
        return cls(len(indices), sum_of_hashes(indices, index_hash))


NOTHING = Tally(0, 0)


def total(tallies: Iterable[tuple[int, int]]) -> Tally:
    """Return the sum of tallies."""
    return functools.reduce(Tally.plus, (Tally(*each) for each in tallies), NOTHING)


class BatchPart(NamedTuple):
    """The samples of one batch: ranges of their ordinals, their number, and the sum of their hashes."""

    ranges: list[tuple[int, int]]
    samples: int
    hashes: int


class Completed(NamedTuple):
    """The part of an epoch that was complete when a state was taken."""

    # Ordinals ``[first, end)`` of the complete samples, ascending, with gaps between them.
    ranges: Ranges = ()
    batches: int = 0  # number of delivered batches
    delivered: Tally = NOTHING
    skipped: Tally = NOTHING
    earlier: Tally = NOTHING  # tally of what another number of ranks completed before

    @property
    def end(self) -> int:
        """The ordinal from which on nothing is complete."""
        return self.ranges[-1][1] if self.ranges else 0

    @property
    def expected(self) -> Tally:
        """Tally of all complete indices."""
        return self.delivered.plus(self.skipped)

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


_NONE_COMPLETE = Completed()


class Outgoing:
    """A batch on its way from ``next()`` to the training loop, or the error of one.

    The handler of a signal may raise at any moment of ``next()``. Until ``next()`` has returned, the batch stays here,
    and the next call gives it again. So it is recorded later: by the next call, or when somebody asks.

    Attributes:
        is_pinned: Whether the batch, or its error, is that of the copy to pinned memory.
        is_given: Whether the training loop has it.
        is_noted: Whether the engine's observers know of it.
        num_samples, nbytes: What they count.
        records: Functions that record the batch. Each may be called again, without effect.
    """

    batch: Any = None
    error: BaseException | None = None
    is_given = is_pinned = is_noted = False
    num_samples = nbytes = 0
    records: Sequence[Callable[[], object]] = ()

    def __init__(self, batch: object = None, error: BaseException | None = None) -> None:
        self.batch, self.error = batch, error

    @classmethod
    def of_error(cls, error: Exception) -> Outgoing:
        """What is given in place of a batch that cannot be made or opened."""
        return cls(error=not_the_end("what the batch is made of", error))

    def give(self) -> Any:
        """Return the batch, or raise its error, where no signal is handled: not in the main thread."""
        batch, error = self.batch, self.error
        self.batch, self.error, self.is_given = None, None, True
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return batch


class _Recorder:
    last: Outgoing | None = None
    """The last batch on its way to the training loop, until it is recorded."""

    def settle(self) -> None:
        """Record the last batch, if the training loop has it."""
        last = self.last
        if last is not None and last.is_given:
            for record in last.records:
                record()
            if self.last is last:  # else the loop has gone on: another thread may look
                self.last = None


class Coverage(NamedTuple):
    """Tallies of the indices that the sampler yielded in one epoch, or of the items of an iterable dataset.

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

    def __repr__(self) -> str:
        parts = (
            f"{each.samples} {name}" for name, each in zip(self._fields[1:], self[1:], strict=True)
        )
        return f"<Coverage of epoch {self.epoch}: {', '.join(parts)}>"


class Progress(_Recorder):
    """Follows the indices of one epoch from the sampler to the delivered batches.

    Args:
        done: The part that an earlier run completed.

    Attributes:
        is_padding: Whether the last batch stands for one that this rank lacks.
        held_by: What keeps samples or batches that the engine gave: the epoch does not end with the last of them.
        length: Returns the number of batches that remain when the epoch begins; None if it is unknown.
        part: Batches of this rank, which a state holds if several ranks share the epoch; None otherwise.
        earlier: Tallies of what other ranks delivered and skipped before, if this rank counts it.
        began_ns: When ``iter()`` began.
        sampling_ns: Time in the sampler.
    """

    def __init__(self, epoch: int, done: Completed | None = None) -> None:
        self.epoch = epoch
        self.finished = self.is_padding = False
        self.held_by: set[str] = set()
        self.record: OrderRecord | None = None
        self.length: Callable[[], int | None] = lambda: None
        self.part: RankProgress | None = None
        self.readers: EpochReaders | None = None
        self.earlier = NOTHING, NOTHING
        self.began_ns, self.sampling_ns = now_ns(), 0
        self._is_in_order = False
        self._lateness: Lateness | None = None  # until a batch is asked for that may be late
        self._slow_shares: dict[int, float] = {}
        self._before = before = done or _NONE_COMPLETE
        self._last_batch: tuple[list[int] | range, int] = [], 0
        self._reported = before.delivered
        if before is _NONE_COMPLETE:
            self._arrivals = Arrivals(index_hash)
        else:
            self._arrivals = Arrivals(index_hash, before.expected, before.delivered, before.skipped)

    @property
    def batches(self) -> int:
        """Number of delivered batches of this run."""
        return self._arrivals.delivered_batches

    def come_in_order(self) -> None:
        """Note that batches come in the sampler's order, with its samples: none is late."""
        self._is_in_order, self._lateness = True, None

    def _watched(self) -> Lateness | None:
        """The lags so far; None if there can be none."""
        if self._lateness is None and not self._is_in_order:
            self._lateness = Lateness()
        return self._lateness

    @property
    def lateness(self) -> Lateness:
        """Distance of the batches so far from the sampler's order, and the slow samples in each."""
        if (watched := self._watched()) is not None:
            return watched
        samples = self._arrivals.delivered[0] - self._before.delivered.samples
        return InOrderLateness(samples, self.batches, dict(self._slow_shares))

    def requested(self, batches: Sequence[Batch], first: int, took_ns: int = 0) -> None:
        """Note batches of indices that the sampler yields.

        Args:
            first: Number of the first of them, from 0 on in this run; a second note of a batch changes nothing.
            took_ns: Time in the sampler since the last note.
        """
        self.sampling_ns += took_ns
        record, ask, lateness = self.record, self._arrivals.ask, self._watched()
        for number, indices in enumerate(batches, first):
            occurrences = None
            if type(indices) is Recurring:
                indices, occurrences = indices.indices, indices.occurrences
            if record is not None:
                record.requested(indices, occurrences, number)
            ask(indices, number)
            if lateness is not None:
                lateness.asked(len(indices) or 1, number)

    def returns(
        self, positions: list[int] | range, start: int, num_slow: int = 0, ahead: int = 0
    ) -> Callable[[], None]:
        """Note the batch that ``next()`` is about to return; returns a function that notes it as delivered, once.

        Args:
            positions: Of its samples, in the order in which batches were drawn; negative without a sample.
            start: Position of the first sample of the epoch.
            ahead: Number of batches that are returned before it.
        """
        number = self._arrivals.delivered_batches + ahead
        if self.record is not None:
            self.record.delivered([position - start for position in positions], number)
        if self._is_in_order and not num_slow and self.part is None:
            return functools.partial(self._arrivals.deliver, positions, start, number)
        return functools.partial(self.delivered, positions, start, number, num_slow)

    def together(
        self, batches: Iterable[Sequence[Callable[[], object]]]
    ) -> list[Callable[[], object]]:
        """Return the records of several batches, what :meth:`returns` gave among them, as those of one."""
        others: list[Callable[[], object]] = []
        positions, first, num_slow = list[int](), 0, 0
        delivers = self.delivered, self._arrivals.deliver
        for records in batches:
            for record in records:
                if isinstance(record, functools.partial) and record.func in delivers:
                    own, first, _, *slow = record.args
                    positions += own
                    num_slow += sum(slow)
                else:
                    others.append(record)
        return [*others, self.returns(positions, first, num_slow)]

    def delivered(
        self,
        positions: list[int] | range,
        start: int,
        number: int | None = None,
        num_slow: int = 0,
    ) -> None:
        """Note a delivered batch: the next one, or that of a number in this run, which counts once."""
        if number is None:
            number = self.batches
        if self._lateness is not None:
            self._lateness.delivered(positions, start, num_slow, number)
        elif num_slow and number >= self.batches:
            self._slow_shares[number] = num_slow / max(sum(each >= 0 for each in positions), 1)
        self._arrivals.deliver(positions, start, number)
        if self.part is not None:
            self._last_batch = positions, start

    def latest(self) -> BatchPart:
        """Return the samples of the last delivered batch of a shared epoch. Called once after each batch."""
        self.settle()
        positions, start = self._last_batch
        numbers = [position - start for position in positions if position >= 0]
        first, end = min(numbers, default=0), max(numbers, default=-1) + 1
        if end - first == len(numbers):  # the usual case
            ranges: Ranges = ((first, end),)
        else:
            ranges = (*merged((number, number + 1) for number in numbers),)
        before, self._reported = self._reported, Tally(*self._arrivals.delivered)
        return BatchPart(self._before.placed(ranges), *self._reported.minus(before))

    def skipped(self, positions: list[int], start: int) -> None:
        """Note skipped samples. Called before the batch that they belong to is delivered."""
        readers = self.readers
        if readers is not None and positions:
            missing = {number + start for number in readers.missing([p - start for p in positions])}
            self.drop(sorted(missing), start)
            positions = [position for position in positions if position not in missing]
        self._arrivals.skip(positions, start)

    def missing(self, keys: Sequence[int]) -> int:
        """How many of the last items of one reader do not exist, because it has ended before."""
        readers = self.readers
        if readers is None or not keys:
            return 0
        end = readers.board.end(item_of(keys[0]).reader)
        if end is None or item_of(keys[-1]).ordinal < end:
            return 0
        return sum(item_of(key).ordinal >= end for key in keys)

    def drop(self, positions: Sequence[int], start: int) -> None:
        """Note that items do not exist."""
        self._arrivals.drop(positions, start)

    def drop_rest(self, first: int) -> None:
        """Note that no item exists of those that were asked for, from one on; what comes before may be held back."""
        asked = self._arrivals.asked[0] - self._before.expected.samples
        self._arrivals.drop(range(first, asked), 0)

    def finish(self) -> None:
        """Note the end of the epoch.

        Raises:
            CoverageError: Samples were lost or repeated.
        """
        if self.finished or self.held_by:
            return
        self.settle()
        arrivals = self._arrivals
        missing = [
            asked - delivered - skipped - dropped
            for asked, delivered, skipped, dropped in zip(
                arrivals.asked, arrivals.delivered, arrivals.skipped, arrivals.dropped, strict=True
            )
        ]
        if missing[0] or missing[1] % _MODULUS or arrivals.unexpected:
            coverage = self.coverage()
            raise CoverageError(
                f"epoch {self.epoch} has ended, and the delivered samples are not those that the sampler requested: "
                f"requested {coverage.requested.samples} samples, delivered {coverage.delivered.samples}, skipped "
                f"{coverage.skipped.samples}, repeated {self._arrivals.unexpected}, and the hash of what is missing is "
                f"{coverage.outstanding.hash:#018x}. This is a fault of minato: please report it."
            )
        if self.record is not None:
            self.record.finish()
        self.finished = True
        self.tell(is_over=True)

    def cut(self) -> None:
        """Note the end of the epoch in all ranks, before this one has delivered everything."""
        self.settle()
        self.finished = True

    def tell(self, *, is_over: bool = False) -> None:
        """Warn of what the user should know of the readers, each once."""
        readers = self.readers
        while readers is not None and (news := readers.news(is_over)) is not None:
            warn(news)

    def drawn(self) -> Tally:
        """Return the tally of the indices that were requested in this run."""
        return Tally(*self._arrivals.asked).minus(self._before.expected)

    def prefix(self) -> int:
        """Return the number of the first sample of this run that is not done."""
        return self._arrivals.prefix

    def beyond(self) -> list[int]:
        """Return the numbers of the samples above ``prefix`` that are done."""
        return self._arrivals.beyond

    def has_advanced(self) -> bool:
        """Whether a batch was returned in this run, or none was left to return."""
        self.settle()
        return self.batches > 0 or self.finished or self.length() == 0

    def num_samples(self) -> tuple[int, int, int]:
        """Return the numbers of requested, delivered and outstanding samples so far."""
        self.settle()
        arrivals = self._arrivals
        requested, delivered = arrivals.asked[0] - arrivals.dropped[0], arrivals.delivered[0]
        return requested, delivered, requested - delivered - arrivals.skipped[0]

    def coverage(self) -> Coverage:
        """Return the tallies of the epoch so far."""
        self.settle()
        arrivals = self._arrivals
        requested = Tally(*arrivals.asked).minus(Tally(*arrivals.dropped))
        delivered, skipped = Tally(*arrivals.delivered), Tally(*arrivals.skipped)
        outstanding = requested.minus(delivered).minus(skipped)
        requested = total([requested, *self.earlier])
        delivered, skipped = map(Tally.plus, (delivered, skipped), self.earlier)
        return Coverage(self.epoch, requested, delivered, skipped, outstanding)

    def done(self) -> Completed:
        """Return the complete part of the epoch, of this run and earlier ones."""
        self.settle()
        arrivals = self._arrivals
        ranges: Ranges = ()
        if self.readers is None:
            numbers = [(0, arrivals.prefix), *((number, number + 1) for number in arrivals.beyond)]
            ranges = (*merged([*self._before.ranges, *self._before.placed(numbers)]),)
        return Completed(
            ranges,
            self._before.batches + self.batches,
            Tally(*arrivals.delivered),
            Tally(*arrivals.skipped),
        )


class RankProgress(_Recorder):
    """Counts the batches that one rank gets. The rank that runs the workers counts those of the whole epoch.

    Attributes:
        length: Number of batches that this rank gets in the whole epoch.
        before: Batches of earlier runs, where an epoch is resumed; None: the epoch begins.
        finished: Whether the rank got all its batches, and the end of the epoch.
    """

    def __init__(self, length: int, before: Completed | None = None) -> None:
        self.before = before
        self.length = length
        self.finished = False
        done = before or Completed()
        self._ranges = list(done.ranges)
        # Changed at once, whatever a signal's handler raises; ranges beyond the number are not counted.
        self._got = len(self._ranges), done.batches, done.delivered

    def has_advanced(self) -> bool:
        """Whether the rank got a batch in this run, or none was left for it."""
        begun = 0 if self.before is None else self.before.batches
        return self.batches > begun or self.batches == self.length

    @property
    def batches(self) -> int:
        """Number of batches that the rank got in the epoch."""
        self.settle()
        return self._got[1]

    def handed(self, part: BatchPart, number: int | None = None) -> None:
        """Count a batch that the program gets: the next one, or that of a number in the epoch, which counts once."""
        count, batches, total = self._got
        if number is None or number == batches:
            ranges, *tally = part  # a plain tuple from another process
            self._ranges[count:] = ranges
            self._got = len(self._ranges), batches + 1, total.plus(Tally(*tally))

    def ended(self) -> None:
        """Note that the epoch has no other batch for this rank."""
        self.finished = self.batches == self.length

    def done(self) -> Completed:
        """Return what this rank got in the epoch, in this run and earlier ones."""
        self.settle()
        count, batches, tally = self._got
        return Completed((*merged(self._ranges[:count]),), batches, tally)


def merged_ranks(parts: Iterable[Completed]) -> Completed:
    """Return what several ranks got together; ValueError: two got the same sample, or go on after different states."""
    parts = list(parts)
    earlier = {part.earlier for part in parts}
    if len(earlier) > 1:
        raise ValueError(
            "the states that were loaded go on after different states of other ranks: load one merged state in all "
            "ranks, or in each the state that it saved"
        )
    ranges = [pair for part in parts for pair in part.ranges]
    together = (*merged(ranges),)
    if _count(together) != _count(ranges):
        raise ValueError(
            "the states that were loaded hold samples that two ranks have had, so that they are not of one run: load "
            "in each rank the state that it saved, all at the same step"
        )
    tally = total(part.delivered for part in parts)
    batches = sum(part.batches for part in parts)
    return Completed(together, batches, tally, earlier=next(iter(earlier), NOTHING))


def _count(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(end - first for first, end in ranges)


def remaining_batches(
    batches: Iterator[Batch], done: Completed, mixes: bool, drop_last: bool = False
) -> Iterator[Any] | None:
    """Return the remaining batches of an epoch, out of all that its sampler yields.

    Args:
        batches: All batches of indices; in place of one that has none, its error.
        mixes: Samples may take places in other batches than their own. Then the remaining indices are divided into new
            batches, of the sizes of those not delivered. Otherwise whole batches remain.
        drop_last: Whether to drop a new batch that is too small because of skipped samples.

    Returns:
        None: The sampler does not yield the indices of the complete part, or not in the same batches.
    """
    sizes: list[int] = []
    whole: list[Any] = []
    left: deque[_Counted] = deque()
    ranges, ordinal, tally = deque(done.ranges), 0, NOTHING
    while ordinal < done.end or (mixes and len(sizes) < done.batches):
        indices = next(batches, None)
        if indices is None:
            return None
        if isinstance(indices, Postponed):
            continue
        complete, others = _split(indices, ordinal, ranges)
        tally = tally.plus(Tally.of(complete))
        if others is not None:
            if complete and not mixes:  # they were divided into other batches then
                return None
            whole.append(indices)
            left.extend(others)
        sizes.append(len(indices))
        ordinal += len(indices) or 1
    if tally != done.expected:
        return None
    if not mixes:
        return itertools.chain(whole, batches)
    # Where ranks share an epoch, its short batches may be complete while full ones remain.
    surplus = sum(sizes[: done.batches]) - tally.samples
    shapes = deque(sizes[done.batches :])
    return _rebatched(batches, left, shapes, drop_last, max(sizes, default=0), surplus)


_Counted = tuple[Any, int]  # an index, and how often it came before in its epoch


def _counted(batch: object) -> Iterator[_Counted]:
    indices, occurrences = unmarked(batch)
    return zip(indices, itertools.repeat(0) if occurrences is None else occurrences, strict=False)


def _split(
    indices: Batch, ordinal: int, ranges: deque[tuple[int, int]]
) -> tuple[Any, list[_Counted] | None]:
    """Split a batch into complete and remaining indices, None if all are complete; drops ranges before it."""
    while ranges and ranges[0][1] <= ordinal:
        ranges.popleft()
    start, end = ranges[0] if ranges else (ordinal, ordinal)
    if start <= ordinal and ordinal + (len(indices) or 1) <= end:
        return indices, None
    complete: list[Any] = []
    left: list[_Counted] = []
    for at, counted in enumerate(_counted(indices), ordinal):
        while ranges and ranges[0][1] <= at:
            ranges.popleft()
        if ranges and ranges[0][0] <= at:
            complete.append(counted[0])
        else:
            left.append(counted)
    return complete, left


def _rebatched(
    batches: Iterator[Batch],
    indices: deque[_Counted],
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
            yield _batch([indices.popleft() for _ in range(sizes.popleft() + more)])
        drawn = next(batches, None)
        if drawn is None:
            break
        indices.extend(_counted(drawn))
        sizes.append(len(drawn))
    if indices and not drop_last:
        yield _batch(indices)


def _batch(indices: Collection[_Counted]) -> Any:
    return Recurring.of(*map(list, zip(*indices, strict=True))) if indices else []
