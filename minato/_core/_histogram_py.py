"""Mergeable histograms of durations, with a known relative error, in shared memory."""

from __future__ import annotations

import math
from operator import index as as_integer
from typing import TYPE_CHECKING, final

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HISTOGRAM_NBYTES", "Histogram"]

_TOP = 2**48 - 1
_BUCKETS = 720
_COUNT, _TOTAL, _MAX, _FIRST_BUCKET = 0, 1, 2, 8
_WORD_MASK = 2**64 - 1

HISTOGRAM_NBYTES = 8 * (_FIRST_BUCKET + _BUCKETS)
"""Bytes of one histogram: count, total and max, then 720 buckets from byte 64, all uint64."""


def _bucket(value: int) -> int:
    if value < 32:
        return value
    shift = value.bit_length() - 5
    return shift * 16 + (value >> shift)


def _middle(bucket: int) -> int:
    if bucket < 32:
        return bucket
    shift = bucket // 16 - 1
    return ((bucket - shift * 16) << shift) + ((1 << shift) - 1) // 2


@final
class Histogram:
    """Counts of durations in log-linear buckets; histograms merge by addition.

    Values below 32 are exact. Above, a reported percentile differs from the exact one by at most
    1/32 of it (3.2 %). Values over 2**48 - 1 (78 hours in ns) count as 2**48 - 1.

    Args:
        buffer: Writable, contiguous memory of :data:`HISTOGRAM_NBYTES` bytes, aligned to 8, which the
            histogram adopts as it is (zeros are an empty one) and keeps alive. ``None`` gives it
            memory of its own.

    Only one thread of one process may record, merge into or clear a histogram. Others may read the
    same memory through a ``Histogram`` of their own; what they see may lack the latest values.

    Raises:
        ValueError: The buffer has another size or alignment.
        BufferError: The buffer is read-only.
    """

    __slots__ = ("_buckets", "_words")

    def __init__(self, buffer: Buffer | None = None) -> None:
        view = memoryview(bytearray(HISTOGRAM_NBYTES) if buffer is None else buffer)
        if view.readonly:
            raise BufferError("Object is not writable.")
        if view.nbytes != HISTOGRAM_NBYTES:
            raise ValueError(
                f"a histogram needs {HISTOGRAM_NBYTES} bytes, this buffer has {view.nbytes}"
            )
        array = np.frombuffer(view, dtype=np.uint64)
        if not array.flags.aligned:
            raise ValueError("a histogram's memory must be aligned to 8 bytes")
        self._words = view.cast("B").cast("Q")
        self._buckets = array[_FIRST_BUCKET:]

    def record(self, value: int) -> None:
        """Count one duration (int, ns).

        Raises:
            ValueError: ``value`` is negative.
        """
        value = min(as_integer(value), _TOP)
        if value < 0:
            raise ValueError(f"a duration cannot be negative: {value}")
        words = self._words
        words[_FIRST_BUCKET + _bucket(value)] += 1
        words[_TOTAL] = (words[_TOTAL] + value) & _WORD_MASK
        if value > words[_MAX]:
            words[_MAX] = value
        words[_COUNT] += 1

    def record_all(self, values: Buffer, count: int) -> int:
        """Count the first ``count`` values of int64 memory, none of them negative.

        Returns:
            The largest of them; 0 if there are none.

        Raises:
            ValueError: The memory holds fewer values.
        """
        memory = memoryview(values).cast("B")
        if count < 0 or memory.nbytes < 8 * count:
            raise ValueError(f"{memory.nbytes} bytes hold no {count} values")
        largest = 0
        for value in memory[: 8 * count].cast("q"):
            self.record(value)
            largest = max(largest, value)
        return largest

    def merge(self, other: Histogram) -> None:
        """Add the counts of ``other``."""
        if not isinstance(other, Histogram):
            raise TypeError(f"a Histogram is required, not {type(other).__name__}")
        mine, theirs = self._words, other._words
        self._buckets += other._buckets
        mine[_TOTAL] = (mine[_TOTAL] + theirs[_TOTAL]) & _WORD_MASK
        mine[_MAX] = max(mine[_MAX], theirs[_MAX])
        mine[_COUNT] += theirs[_COUNT]

    @property
    def count(self) -> int:
        """How many values were recorded."""
        return self._words[_COUNT]

    @property
    def total(self) -> int:
        """Sum of the values, in ns; exact except for values over the top."""
        return self._words[_TOTAL]

    @property
    def max(self) -> int:
        """Largest value, in ns; 0 when empty. Exact, except in a result of :meth:`subtract`."""
        return self._words[_MAX]

    @property
    def mean(self) -> float:
        """Total divided by count, in ns; 0.0 when empty."""
        count = self._words[_COUNT]
        return float(self._words[_TOTAL]) / float(count) if count else 0.0

    def percentile(self, q: float) -> int:
        """Return the smallest value, in ns, with at least the share ``q`` of all values up to it.

        Args:
            q: From 0 to 1: 0.5 is the median.

        Returns:
            The middle of that value's bucket, never more than :attr:`max`; 0 when empty.

        Raises:
            ValueError: ``q`` is not between 0 and 1.
        """
        q = float(q)
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q is a share between 0 and 1, not {q}")
        reached = np.cumsum(self._buckets)
        count = int(reached[-1])
        if count == 0:
            return 0
        rank = max(math.ceil(q * float(count)), 1)
        if rank >= count:
            return self.max
        return min(_middle(int(np.searchsorted(reached, rank))), self.max)

    def clear(self) -> None:
        """Forget everything recorded."""
        self._words[_COUNT] = 0
        self._buckets[:] = 0
        self._words[_TOTAL] = 0
        self._words[_MAX] = 0

    def snapshot(self) -> Histogram:
        """Return a copy in memory of its own."""
        copy = Histogram()
        copy.merge(self)
        return copy

    def subtract(self, older: Histogram) -> Histogram:
        """Return what was recorded since ``older``, an earlier snapshot of this histogram.

        The largest value of the window is known to its bucket only (1/32). When the histogram was
        cleared after the snapshot, the window is all it holds now.
        """
        if not isinstance(older, Histogram):
            raise TypeError(f"a Histogram is required, not {type(older).__name__}")
        window = self.snapshot()
        if older.total > window.total or bool(np.any(older._buckets > window._buckets)):
            return window
        window._buckets -= older._buckets
        held = np.flatnonzero(window._buckets)
        window._words[_COUNT] = int(window._buckets.sum())
        window._words[_TOTAL] -= older.total
        window._words[_MAX] = min(window.max, _middle(int(held[-1])) if len(held) else 0)
        return window
