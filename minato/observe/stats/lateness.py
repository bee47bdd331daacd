"""How far the returned batches are from the sampler's order, and a random subset of the returned samples."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from minato._core import Histogram

__all__ = ["DeliveredSample", "InOrderLateness", "Lateness", "Reservoir"]

_KEPT = 4096
_PER_BATCH = 8


class DeliveredSample(NamedTuple):
    """A sample that was returned in a batch.

    Attributes:
        key: Its index in the dataset.
        lag: Batches by which it came later than in the sampler's order; negative: earlier.
        cost_ns: Its cost.
        nbytes: Its bytes in shared memory; 0 if unknown, as where all samples have the same layout.
    """

    key: int
    lag: int
    cost_ns: int
    nbytes: int


class Reservoir:
    """A uniform random subset of the returned samples, if batches have equal size (Vitter's algorithm R).

    Attributes:
        rows: The samples.
    """

    def __init__(self) -> None:
        self.rows: list[DeliveredSample] = []
        self._offered = 0
        self._random = random.Random(0)  # leaves the program's generators untouched

    def offer(
        self,
        samples: Callable[[], Sequence[tuple[int, int, int, int]]],
        lag_of: Callable[[int], int],
    ) -> None:
        """Keep some samples of a batch, or none.

        Args:
            samples: Returns ``(position, index, cost in ns, bytes)`` of each; called only if a sample is kept.
            lag_of: Returns the lag in batches of the sample at a position.
        """
        slots = self._slots()
        if not slots:
            return
        offered = samples()
        # Without repetition: a small batch must not weigh more than its samples.
        chosen = self._random.sample(offered, min(len(slots), len(offered)))
        for slot, (position, index, cost_ns, nbytes) in zip(slots, chosen, strict=False):
            row = DeliveredSample(index, lag_of(position), cost_ns, nbytes)
            if slot < len(self.rows):
                self.rows[slot] = row
            else:
                self.rows.append(row)

    def _slots(self) -> list[int]:
        """The rows that samples of the next batch replace."""
        taken = []
        for _ in range(_PER_BATCH):
            self._offered += 1
            slot = self._random.randrange(self._offered) if self._offered > _KEPT else _KEPT
            if slot < _KEPT or self._offered <= _KEPT:
                taken.append(slot)
        return taken


class Lateness:
    """The lags of one epoch.

    Attributes:
        lags: Number of samples by lag in batches; negative: earlier than in the sampler's order.
        latest: The largest lag in each returned batch, in batches, at least 0.
        slow_shares: The share of slow samples in each returned batch, from 0 to 1.
        late: Share of samples that are late, of each returned batch, in thousandths.
        reservoir: Keeps some of the samples, in orders in which they can be late.
    """

    def __init__(self) -> None:
        self._count_lags()
        self.slow_shares = array("f")
        self.late = Histogram()
        self.reservoir: Reservoir | None = None
        self._ends = array("q")  # position after the last sample of each batch of the sampler

    def _count_lags(self) -> None:
        self.lags: Counter[int] = Counter()
        self.latest = Histogram()

    def asked(self, count: int, number: int | None = None) -> None:
        """The sampler yielded a batch of ``count`` samples; each counts once. None: the next number."""
        if number is None or number >= len(self._ends):
            self._ends.append((self._ends[-1] if self._ends else 0) + count)

    def delivered(
        self,
        positions: list[int],
        start: int,
        num_slow: int,
        samples: Callable[[], Sequence[tuple[int, int, int, int]]] | None = None,
        number: int | None = None,
    ) -> None:
        """A batch is returned; each counts once.

        Args:
            number: Of the batch, in the order of their return; None: the next one.
            positions: Of its samples, negative for none.
            start: Position of the first sample of the epoch.
            num_slow: The number of slow samples in it.
            samples: Returns ``(position, index, cost in ns, bytes)`` of each; None: keep none of them.
        """
        if number is not None and number < len(self.slow_shares):
            return
        late = 0
        batch, ends = len(self.slow_shares), self._ends
        numbers = sorted(positions)
        at = first = bisect_left(numbers, 0)
        while at < len(numbers):
            home = bisect_right(ends, numbers[at] - start)
            stop = (
                bisect_left(numbers, ends[home] + start, at) if home < len(ends) else len(numbers)
            )
            if at == first:
                self.latest.record(max(batch - home, 0))
            self.lags[batch - home] += stop - at
            late += stop - at if batch > home else 0
            at = stop
        count = max(len(numbers) - first, 1)
        self.slow_shares.append(num_slow / count)
        if self.reservoir is not None and samples is not None:
            self.late.record(1000 * late // count)
            self.reservoir.offer(
                samples, lambda position: batch - bisect_right(ends, position - start)
            )


class InOrderLateness(Lateness):
    """The lags of an epoch whose batches come in the sampler's order, with its samples: none is late."""

    def __init__(self) -> None:
        super().__init__()
        self._samples = 0

    def _count_lags(self) -> None:
        pass

    def asked(self, count: int, number: int | None = None) -> None:
        """Do nothing: no sample is looked for in another batch."""

    def delivered(
        self,
        positions: list[int],
        start: int,
        num_slow: int,
        samples: Callable[[], Sequence[tuple[int, int, int, int]]] | None = None,
        number: int | None = None,
    ) -> None:
        """A batch is returned; each counts once (see :meth:`Lateness.delivered`)."""
        if number is None or number >= len(self.slow_shares):
            self._samples += len(positions)
            self.slow_shares.append(num_slow / len(positions))

    @property
    def lags(self) -> Counter[int]:  # type: ignore[override]
        """Number of samples by lag in batches: all have 0."""
        return Counter({0: self._samples} if self._samples else {})

    @property
    def latest(self) -> Histogram:  # type: ignore[override]
        """The largest lag in each returned batch: 0."""
        histogram, count = Histogram(), len(self.slow_shares)
        histogram.record_all(array("q", bytes(8 * count)), count)
        return histogram
