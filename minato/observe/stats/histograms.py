"""Figures of a histogram, and its form for a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from minato._core import HISTOGRAM_NBYTES, Histogram

__all__ = ["EMPTY", "Summary", "from_words", "merged", "share_above", "to_words"]

EMPTY: Final = Histogram()
"""An empty, read-only histogram: many that stay empty share it instead of six kilobytes each."""

_MOST = 1 << 62
"""Larger counts and sums are corrupt."""
_HALVINGS = 12
"""A share is found to 1 / 2**12."""


@dataclass(frozen=True)
class Summary:
    """Count, mean, percentiles and maximum, in the unit of what was recorded (ns, bytes, or a number).

    Mean and maximum are exact, percentiles are within 1/32.
    """

    count: int
    mean: float
    p50: int
    p75: int
    p90: int
    p99: int
    max: int

    @classmethod
    def of(cls, values: Histogram) -> Summary:
        """The present figures of a histogram."""
        p50, p75, p90, p99 = (values.percentile(q) for q in (0.5, 0.75, 0.9, 0.99))
        return cls(values.count, values.mean, p50, p75, p90, p99, values.max)

    def as_dict(self) -> dict[str, float]:
        """The same as a dictionary, for JSON."""
        return dataclasses.asdict(self)


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """The sum of several histograms."""
    whole = Histogram()
    for histogram in histograms:
        whole.merge(histogram)
    return whole


def share_above(values: Histogram, limit: int) -> float:
    """The share of recorded values that are larger than ``limit``, from 0 to 1, to about a four-thousandth.

    Values in the same bucket as the limit (1/32 of it) count as one with its middle.
    """
    if values.count == 0 or values.max <= limit:
        return 0.0
    below, above = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        if values.percentile(middle) > limit:
            above = middle
        else:
            below = middle
    # A quantile is a value that occurs, so even the smallest may be above the limit.
    return 1.0 if below == 0.0 else 1.0 - above


def to_words(values: Histogram) -> dict[str, int]:
    """The words of a histogram that are not zero, by their number as a string, for JSON."""
    memory = bytearray(HISTOGRAM_NBYTES)
    Histogram(memory).merge(values)
    return {str(i): word for i, word in enumerate(memoryview(memory).cast("Q")) if word}


def from_words(words: Mapping[str, int]) -> Histogram:
    """A histogram from the result of :func:`to_words`.

    Raises:
        ValueError, IndexError, TypeError: The words are corrupt.
    """
    memory = bytearray(HISTOGRAM_NBYTES)
    view = memoryview(memory).cast("Q")
    for i, word in words.items():
        view[int(i)] = word
    found = Histogram(memory)
    values = (found.count, found.total, found.max)
    if sum(view) != found.count + sum(values) or max(values) >= _MOST:
        raise ValueError("the counts of the buckets do not add up")
    whole = Histogram()
    whole.merge(found)
    return whole
