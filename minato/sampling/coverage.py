"""How far a pass has come: which of its keys are done, and the proof that none is lost or repeated."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index as as_integer
from typing import TYPE_CHECKING, Any, NamedTuple

from minato._core.arrivals import Arrivals, sum_of_hashes
from minato.errors import CoverageError
from minato.observe.stats.reordering import Lateness
from minato.sampling.occurrences import Again, keys_of
from minato.sampling.replay import OrderRecord

if TYPE_CHECKING:
    from minato.sampling.rank_progress import Part

__all__ = ["Coverage", "Done", "Portion", "Progress", "Tally", "merged", "number_of", "rest_of"]

_MODULUS = 1 << 64

Portion = tuple[list[tuple[int, int]], int, int]
"""Of one batch: the ordinals of its keys as ranges, how many they are, and the sum of their hashes."""


class Tally(NamedTuple):
    """How many keys, and the sum of their 64-bit hashes modulo 2**64.

    Two sets of keys have the same tally if they are the same, in whatever order; if they are not, with a chance of one
    in 2**64.
    """

    samples: int
    hash: int

    @classmethod
    def of(cls, samples: int, hashes: int) -> Tally:
        """Of so many keys, by the sum of their hashes."""
        return cls(samples, hashes % _MODULUS)


_NOTHING = Tally(0, 0)


@dataclass(frozen=True)
class Coverage:
    """What has become of the keys that the sampler gave in one pass; of an iterable dataset's batches.

    Attributes:
        epoch: Number of the pass.
        asked: What was drawn from the sampler so far.
        delivered: What lay in the batches that ``next()`` has returned or raised for.
        skipped: What was given up by the error policy.
        outstanding: What is neither: still under way, or dropped with an iterator that was abandoned.
    """

    epoch: int
    asked: Tally
    delivered: Tally
    skipped: Tally
    outstanding: Tally

    @property
    def complete(self) -> bool:
        """Whether all that was asked for has been delivered or skipped, each key once."""
        return self.outstanding == _NOTHING


@dataclass(frozen=True)
class Done:
    """The part of a pass that is over, as it was when a state was taken.

    Attributes:
        ranges: Ordinals ``[first, end)`` of the keys that are done, ascending and apart. The n-th key that the sampler
            gives in a pass has the ordinal n, and so has an empty batch in its turn.
        batches: How many batches were delivered.
        delivered: Tally of the delivered keys.
        skipped: Tally of the skipped keys.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    batches: int = 0
    delivered: Tally = _NOTHING
    skipped: Tally = _NOTHING

    @property
    def end(self) -> int:
        """The ordinal from which on nothing is done."""
        return self.ranges[-1][1] if self.ranges else 0

    @property
    def expected(self) -> Tally:
        """Tally of all keys that are done."""
        return Tally.of(*(sum(pair) for pair in zip(self.delivered, self.skipped, strict=True)))

    def extended(self, numbers: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """The ranges with more of them: ``[first, end)`` of the ordinals that are left, numbered from 0."""
        return merged([*self.ranges, *self.placed(numbers)])

    def placed(self, numbers: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The ordinals themselves of what is numbered so, as ranges."""
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


def merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges ``[first, end)`` in ascending order, those that touch made one."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(item for item in ranges if item[0] < item[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return tuple(found)


class Progress:
    """Follows one pass from the sampler's keys to what is delivered.

    Args:
        epoch: Number of the pass.
        done: What an earlier run has done of it.
    """

    def __init__(self, epoch: int, done: Done | None = None) -> None:
        self.epoch = epoch
        self.finished = False
        """Whether the pass has come to its end."""
        self.batches = 0
        """Batches delivered in this run."""
        self.lateness = Lateness()
        """How far the batches are from the sampler's order, and how many slow samples each holds."""
        self.record: OrderRecord | None = None
        """Where the order of the batches is written down."""
        self.length: Callable[[], int | None] = lambda: None
        """Tells how many batches are left of the pass when it begins; None if nobody knows."""
        self.part: Part | None = None
        """What this rank has had of it, where it is shared by several: that is what a state is about."""
        self._before = done or Done()
        self._latest: tuple[list[int], int] = [], 0
        self._told = self._before.delivered
        self._arrivals = Arrivals(
            number_of, self._before.expected, self._before.delivered, self._before.skipped
        )

    def asked(self, keys: Any) -> Any:
        """Note the next batch that the sampler gives; returns it."""
        if self.record is not None:
            self.record.asked(keys)
        self._arrivals.ask(keys_of(keys))
        self.lateness.asked(len(keys) or 1)
        return keys

    def delivered(
        self,
        positions: list[int],
        start: int,
        num_slow: int = 0,
        samples: Callable[[], Sequence[tuple[int, int, int, int]]] | None = None,
    ) -> None:
        """Note a batch that the consumer got.

        Args:
            positions: Of the samples that lay in it, negative for none; they follow one another as the batches were
                drawn.
            start: Position of the first sample of the pass.
            num_slow: How many of them were slow.
            samples: Gives ``(position, key, cost in ns, bytes)`` of them; None: nobody may ask.
        """
        self._arrivals.deliver(positions, start)
        self.lateness.delivered(positions, start, num_slow, samples)
        self.batches += 1
        if self.part is not None:
            self._latest = positions, start
        if self.record is not None:
            self.record.delivered([position - start for position in positions])

    def latest(self) -> Portion:
        """What lay in the batch that was delivered last, of a shared pass; to be asked after each of them."""
        positions, start = self._latest
        first, count = min(positions, default=-1), len(positions)
        numbers: Iterable[tuple[int, int]]
        in_a_row = list(range(first, first + count))  # as they nearly always are
        if first >= 0 and positions == in_a_row:
            numbers = [(first - start, first - start + count)]
        else:
            found = (position - start for position in positions if position >= 0)
            numbers = merged((number, number + 1) for number in found)
        before, self._told = self._told, Tally(*self._arrivals.delivered)
        return self._before.placed(numbers), *_less(self._told, before)

    def skipped(self, positions: list[int], start: int) -> None:
        """Note samples that were given up; those that lie in a batch are to be named before it is delivered."""
        self._arrivals.skip(positions, start)

    def finish(self, dropped: bool = False) -> None:
        """Note that the pass is over.

        Args:
            dropped: What is not delivered by now was not there: the streams of an iterable dataset have ended.

        Raises:
            CoverageError: Keys were lost or repeated.
        """
        if self.finished:
            return
        if dropped:
            self._arrivals.drop()
        coverage = self.coverage()
        if not coverage.complete or self._arrivals.unexpected:
            raise CoverageError(
                f"epoch {self.epoch} has ended, and what was delivered is not what the sampler asked for: asked for "
                f"{coverage.asked.samples} samples, delivered {coverage.delivered.samples}, skipped "
                f"{coverage.skipped.samples}, repeated {self._arrivals.unexpected}, and the hash of what is missing is "
                f"{coverage.outstanding.hash:#018x}. This is a fault of minato: please report it."
            )
        self.finished = True
        if self.record is not None:
            self.record.finish()

    def coverage(self) -> Coverage:
        """What has become of the keys so far."""
        arrivals = self._arrivals
        asked, delivered, skipped, dropped = (
            Tally(*pair)
            for pair in (arrivals.asked, arrivals.delivered, arrivals.skipped, arrivals.dropped)
        )
        asked = _less(asked, dropped)
        return Coverage(
            self.epoch, asked, delivered, skipped, _less(_less(asked, delivered), skipped)
        )

    def done(self) -> Done:
        """All that is done of the pass, in this run and before."""
        arrivals = self._arrivals
        numbers = [(0, arrivals.prefix), *((number, number + 1) for number in arrivals.beyond)]
        return Done(
            self._before.extended(numbers),
            self._before.batches + self.batches,
            Tally(*arrivals.delivered),
            Tally(*arrivals.skipped),
        )


def _less(one: Tally, other: Tally) -> Tally:
    return Tally(one.samples - other.samples, (one.hash - other.hash) % _MODULUS)


def rest_of(
    batches: Iterator[Any], done: Done, mixes: bool, drop_last: bool = False
) -> Iterator[Any]:
    """The batches that are left of a pass, from all that its sampler gives.

    Args:
        mixes: Samples take places in other batches than their own. Then the keys that are left are cut anew, to the
            sizes of the batches that were not delivered; otherwise whole batches are left.
        drop_last: Whether a batch cut anew is dropped if keys are missing, because some were skipped.

    Raises:
        ValueError: The sampler does not give the keys that are done.
    """
    whole_batches: list[Any] = []
    keys_left: deque[Any] = deque()
    sizes: deque[int] = deque()
    ranges = deque(done.ranges)
    count = total = number = ordinal = first_keys = largest = 0
    while ordinal < done.end or (mixes and number < done.batches):
        keys = next(batches, None)
        if keys is None:
            raise ValueError(_ANOTHER_ORDER)
        finished, left, whole = _parted(keys, ordinal, ranges)
        count += len(finished)
        total += sum_of_hashes(finished, number_of)
        keys_left.extend(left)
        largest = max(largest, len(keys))
        if number < done.batches:
            first_keys += len(keys)
        else:
            sizes.append(len(keys))
        if not whole:
            whole_batches.append(keys)
        ordinal += len(keys) or 1
        number += 1
    if (count, total % _MODULUS) != done.expected:
        raise ValueError(_ANOTHER_ORDER)
    if mixes:
        # Of batches that several ranks share, short ones may be done while full ones are left.
        return _cut_anew(batches, keys_left, sizes, drop_last, largest, first_keys - count)
    return itertools.chain(whole_batches, batches)


_ANOTHER_ORDER = (
    "the sampler gives other keys than when the state was taken, so that nobody knows which are left: "
    "use seed=, give the sampler a generator, or give it state_dict() and load_state_dict()"
)


def _parted(
    keys: Any, ordinal: int, ranges: deque[tuple[int, int]]
) -> tuple[Sequence[Any], list[Any], bool]:
    """Keys of a batch that are done and that are not, and whether all is done; drops ranges that lie behind."""
    while ranges and ranges[0][1] <= ordinal:
        ranges.popleft()
    start, end = ranges[0] if ranges else (ordinal, ordinal)
    if start <= ordinal and ordinal + (len(keys) or 1) <= end:
        return keys, [], True
    finished: list[Any] = []
    left: list[Any] = []
    for at, key in enumerate(keys, ordinal):
        while ranges and ranges[0][1] <= at:
            ranges.popleft()
        (finished if ranges and ranges[0][0] <= at else left).append(key)
    return finished, left, False


def _cut_anew(
    batches: Iterator[Any],
    keys: deque[Any],
    sizes: deque[int],
    drop_last: bool,
    largest: int,
    surplus: int,
) -> Iterator[list[Any]]:
    while True:
        while sizes:
            more = min(largest - sizes[0], surplus) if surplus > 0 else 0
            if len(keys) < sizes[0] + more:
                break
            surplus -= more
            yield [keys.popleft() for _ in range(sizes.popleft() + more)]
        drawn = next(batches, None)
        if drawn is None:
            break
        keys.extend(drawn)
        sizes.append(len(drawn))
    if keys and not drop_last:
        yield list(keys)


def number_of(key: Any) -> int:
    """An integer that stands for a key that is none: equal ones for equal keys, in any process."""
    if type(key) is Again:
        key = key.key
    try:
        return as_integer(key)  # numpy's, and tensors of one integer
    except TypeError:
        pass
    if isinstance(key, str):
        data = key.encode("utf-8", "surrogatepass")
    elif isinstance(key, (tuple, list)):
        data = b",".join(b"%d" % number_of(part) for part in key)
    else:
        try:
            data = pickle.dumps(key, 5)
        except Exception:  # such a key is counted, and no more
            return 0
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
