"""Which samples are slow, and how far the returned batches are from the sampler's order."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from typing import NamedTuple

from minato._core import Histogram


class ThresholdDecision(NamedTuple):
    """A slow threshold at one time."""

    threshold_ns: int  # service time above which a sample is slow; 0: none is
    percentile: float  # the percentile in force, 0 with a fixed threshold
    # Share of the latest samples that cost more than the threshold they ran under.
    slow_share: float
    phase: str  # ``warm-up``, ``uniform`` (costs differ too little), ``following`` or ``fixed``


class Lateness:
    """The lags of one epoch.

    Attributes:
        lags: Number of samples by lag in batches; negative: earlier than in the sampler's order.
        latest: The largest lag in each returned batch, in batches, at least 0.
        slow_shares: The share of slow samples in each returned batch, from 0 to 1.
    """

    def __init__(self) -> None:
        self.lags: Counter[int] = Counter()
        self.latest = Histogram()
        self.slow_shares = array("f")
        self._ends = array("q")  # position after the last sample of each batch of the sampler

    def asked(self, count: int, number: int) -> None:
        """The sampler yielded a batch of ``count`` samples; each batch counts once, by its number."""
        if number >= len(self._ends):
            self._ends.append((self._ends[-1] if self._ends else 0) + count)

    def delivered(
        self, positions: list[int] | range, start: int, num_slow: int, number: int
    ) -> None:
        """A batch is returned; each counts once, by its number in the order of their return.

        ``positions`` are those of its samples, negative for none, and ``start`` that of the first sample of the epoch.
        """
        batch, ends = len(self.slow_shares), self._ends
        if number < batch:
            return
        numbers = sorted(positions)
        at = first = bisect_left(numbers, 0)
        while at < len(numbers):
            home, stop = bisect_right(ends, numbers[at] - start), len(numbers)
            if home < len(ends):
                stop = bisect_left(numbers, ends[home] + start, at)
            if at == first:
                self.latest.record(max(batch - home, 0))
            self.lags[batch - home] += stop - at
            at = stop
        count = max(len(numbers) - first, 1)
        self.slow_shares.append(num_slow / count)


class InOrderLateness(Lateness):
    """The lags of an epoch whose batches come in the sampler's order, with its samples: none is late.

    ``slow`` is the share of slow samples in the batches that have some.
    """

    def __init__(self, samples: int, batches: int, slow: dict[int, float]) -> None:
        self._samples, self._batches, self._slow = samples, batches, slow

    @property
    def slow_shares(self) -> array[float]:  # type: ignore[override]
        """The share of slow samples in each returned batch, from 0 to 1."""
        shares = array("f", bytes(4 * self._batches))
        for batch, share in self._slow.items():
            shares[batch] = share
        return shares

    @property
    def lags(self) -> Counter[int]:  # type: ignore[override]
        """Number of samples by lag in batches: all have 0."""
        return Counter({0: self._samples} if self._samples else {})

    @property
    def latest(self) -> Histogram:  # type: ignore[override]
        """The largest lag in each returned batch: 0."""
        histogram = Histogram()
        histogram.record_all(array("q", bytes(8 * self._batches)), self._batches)
        return histogram
