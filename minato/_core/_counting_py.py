"""Counts: of indices that were requested and have arrived, and of durations."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import index as as_integer
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np

from minato._core._seeding_py import _GOLDEN, _MASK, _avalanche

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HISTOGRAM_NBYTES", "Arrivals", "Calls", "Histogram", "Occurrences", "sum_of_hashes"]

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

    Only one thread of one process may record to a histogram or merge into it. Others may read the
    same memory through a ``Histogram`` of their own; what they see may lack the latest values.

    Raises:
        ValueError: The buffer has another size or alignment.
        BufferError: The buffer is read-only.
    """

    __slots__ = ("_buckets", "_is_snapshot", "_low", "_words")

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
        self._buckets, self._low, self._is_snapshot = array[_FIRST_BUCKET:], 0, False

    def record(self, value: int) -> None:
        """Count one duration (int, ns).

        Raises:
            ValueError: ``value`` is negative.
            TypeError: The histogram is a snapshot.
        """
        value = min(as_integer(value), _TOP)
        if value < 0:
            raise ValueError(f"a duration cannot be negative: {value}")
        self._check_writable()
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
        self._check_writable()
        mine, theirs = self._words, other._words
        self._buckets[other._low :][: len(other._buckets)] += other._buckets
        mine[_TOTAL] = (mine[_TOTAL] + theirs[_TOTAL]) & _WORD_MASK
        mine[_MAX] = max(mine[_MAX], theirs[_MAX])
        mine[_COUNT] += theirs[_COUNT]

    def _check_writable(self) -> None:
        if self._is_snapshot:
            raise TypeError("a snapshot of a histogram is read-only")

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
        count = int(reached[-1]) if len(reached) else 0
        if count == 0:
            return 0
        rank = max(math.ceil(q * float(count)), 1)
        if rank >= count:
            return self.max
        return min(_middle(self._low + int(np.searchsorted(reached, rank))), self.max)

    def snapshot(self) -> Histogram:
        """Return a read-only copy, without the buckets below and above all values."""
        used = np.flatnonzero(self._buckets)
        low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        copy = Histogram()
        copy._low, copy._is_snapshot = self._low + low, True
        copy._buckets = self._buckets[low:high].copy()
        copy._words = memoryview(self._words[:_FIRST_BUCKET].tobytes()).cast("Q")
        return copy

    def subtract(self, older: Histogram) -> Histogram:
        """Return what was recorded since ``older``, an earlier snapshot of this histogram.

        The largest value of the window is known to its bucket only (1/32). Where ``older`` holds what
        this one does not, the window is all that this one holds.
        """
        if not isinstance(older, Histogram):
            raise TypeError(f"a Histogram is required, not {type(older).__name__}")
        window = Histogram()
        window.merge(self)
        buckets = window._buckets[older._low :][: len(older._buckets)]
        if older.total > window.total or bool(np.any(older._buckets > buckets)):
            return window
        buckets -= older._buckets
        held = np.flatnonzero(window._buckets)
        window._words[_COUNT] = int(window._buckets.sum())
        window._words[_TOTAL] -= older.total
        window._words[_MAX] = min(window.max, _middle(int(held[-1])) if len(held) else 0)
        return window


@final
class Calls:
    """The calls of ``next()`` in an epoch, in ns; one thread writes, others may read.

    Attributes:
        waits: Time in each call that returned a batch.
        steps: Time between two of them.
        began_ns: When the epoch began.
        entered_ns, left_ns: When the last call began, and when the last one ended.
        wall_ns: Time from the start to the last return.
        due_ns: From this time after the start on, ``leave`` asks for a look at the loader.
        is_wanted: ``leave`` asks for one anyway.
        is_closed: Further calls are not noted.
        samples, nbytes: Of the batches that were returned.
    """

    __slots__ = (
        *("began_ns", "due_ns", "entered_ns", "is_closed", "is_wanted", "left_ns", "nbytes"),
        *("samples", "steps", "waits", "wall_ns"),
    )

    def __init__(self, now: int) -> None:
        self.waits, self.steps = Histogram(), Histogram()
        self.began_ns = self.entered_ns = self.left_ns = now
        self.wall_ns = self.due_ns = self.samples = self.nbytes = 0
        self.is_wanted = self.is_closed = False

    def enter(self, now: int) -> None:
        """A call begins."""
        if self.is_closed:
            return
        self.entered_ns = now
        if self.waits.count:
            self.steps.record(max(now - self.left_ns, 0))

    def leave(self, now: int, samples: int, nbytes: int, looked: bool = False) -> bool:
        """A call returns a batch.

        Returns:
            False: it notes nothing, since a look at the loader is due; it is called again after that, with ``looked``.
        """
        if self.is_closed:
            return True
        if not looked and (self.is_wanted or now - self.began_ns >= self.due_ns):
            return False
        self.left_ns = now
        self.waits.record(max(now - self.entered_ns, 0))
        self.wall_ns = now - self.began_ns
        self.samples += samples
        self.nbytes += nbytes
        return True

    def close(self) -> None:
        """Note no more calls, and keep little memory."""
        self.is_closed = True
        self.waits, self.steps = self.waits.snapshot(), self.steps.snapshot()


def _hash(index: object, hash_other: Callable[[object], int]) -> int:
    number = index if type(index) is int else hash_other(index)
    return _avalanche((number & _MASK) + _GOLDEN)


def sum_of_hashes(indices: Iterable[object], hash_other: Callable[[object], int]) -> int:
    """The sum modulo 2**64 of the indices' hashes: the same for every order of the indices.

    Args:
        hash_other: Returns an integer, modulo 2**64, for an index that is not an integer.
    """
    return sum(_hash(index, hash_other) for index in indices) & _MASK


@final
class Arrivals:
    """Tracks the indices of an epoch: each is requested once, and then arrives, is skipped, or is pending.

    Indices are numbered from 0 in the order of requests. A tally of indices is ``(count, sum of their hashes modulo
    2**64)``: equal tallies mean equal sets of indices, in any order. Memory is taken only for the indices from the
    first that is waited for.

    Args:
        hash_other: Returns an integer, modulo 2**64, for an index that is not an integer.
        asked, delivered, skipped: Tallies to start from.
    """

    def __init__(
        self,
        hash_other: Callable[[object], int],
        asked: tuple[int, int] = (0, 0),
        delivered: tuple[int, int] = (0, 0),
        skipped: tuple[int, int] = (0, 0),
    ) -> None:
        self._hash_other = hash_other
        self._tallies = [asked, delivered, skipped, (0, 0)]
        self._waiting: dict[int, int | None] = {}
        self._arrived: set[int] = set()
        self._skipped_numbers: set[int] = set()
        self._prefix = 0
        self._end = 0
        self._strays = 0
        self._asked_batches = self._delivered_batches = 0

    @property
    def asked(self) -> tuple[int, int]:
        """Tally of the requested indices."""
        return self._tallies[0]

    @property
    def delivered(self) -> tuple[int, int]:
        """Tally of the indices that arrived."""
        return self._tallies[1]

    @property
    def delivered_batches(self) -> int:
        """Number of the batches in which they arrived."""
        return self._delivered_batches

    @property
    def skipped(self) -> tuple[int, int]:
        """Tally of the indices that were given up."""
        return self._tallies[2]

    @property
    def dropped(self) -> tuple[int, int]:
        """Tally of the dropped indices, which are not requested again."""
        return self._tallies[3]

    @property
    def unexpected(self) -> int:
        """Number of arrivals that were not pending: never requested, or a repetition."""
        return self._strays

    @property
    def prefix(self) -> int:
        """All numbers below have arrived or were skipped."""
        return self._prefix

    @property
    def beyond(self) -> list[int]:
        """The numbers above that have arrived or were skipped, ascending."""
        return sorted(self._arrived)

    def ask(self, indices: Sequence[object], batch: int = -1) -> None:
        """Number further indices; an empty batch takes a number too.

        Args:
            batch: Number of the batch; one that was asked for before stays as it is. -1: the next number.
        """
        if 0 <= batch < self._asked_batches:
            return
        # First: what ``hash_other`` raises leaves nothing half done.
        hashes = [_hash(index, self._hash_other) for index in indices]
        for hashed in hashes:
            self._waiting[self._end] = hashed
            self._end += 1
            self._add(0, hashed)
        if not hashes:
            self._waiting[self._end] = None
            self._end += 1
        self._asked_batches = max(batch, self._asked_batches) + 1

    def deliver(self, positions: list[int] | range, start: int, batch: int = -1) -> None:
        """Note that indices have arrived, those with the numbers ``position - start``.

        An index that was skipped before may still have its place in a batch: it stays skipped. Negative positions are
        those of nothing.

        Args:
            positions: A list, or a range with step 1.
            batch: Number of the batch, in the order of arrival; one that has arrived before changes nothing. -1: the
                next number.
        """
        if 0 <= batch < self._delivered_batches:
            return
        for position in positions:
            number = position - start
            if position < 0:
                continue
            if number in self._waiting:
                self._settle(number, 1)
            elif number not in self._skipped_numbers:
                self._strays += 1
        self._advance()
        self._delivered_batches = max(batch, self._delivered_batches) + 1

    def skip(self, positions: list[int], start: int) -> None:
        """Mark indices that will not arrive, so that the epoch does not wait for them."""
        for position in positions:
            if position - start in self._waiting:
                self._settle(position - start, 2)
                self._skipped_numbers.add(position - start)
        self._advance()

    def drop(self, positions: Sequence[int], start: int) -> None:
        """Mark indices that turned out not to exist."""
        for position in positions:
            if position - start in self._waiting:
                self._settle(position - start, 3)
        self._advance()

    def _add(self, which: int, hashed: int) -> None:
        count, total = self._tallies[which]
        # Both at once: another thread may look.
        self._tallies[which] = count + 1, (total + hashed) & _MASK

    def _settle(self, number: int, which: int) -> None:
        hashed = self._waiting.pop(number)
        self._arrived.add(number)
        if hashed is not None:
            self._add(which, hashed)

    def _advance(self) -> None:
        while self._prefix in self._arrived:
            self._arrived.remove(self._prefix)
            self._prefix += 1


@final
class Occurrences:
    """Counts how often each index came.

    Indices below ``length`` take 4 bytes each, all others a dictionary's entry for each different one.

    Args:
        length: Number of indices, from 0 on; 0: unknown.
        hash_other: Returns an integer for an index that is neither an integer nor a string.
    """

    def __init__(self, length: int, hash_other: Callable[[object], int]) -> None:
        self._hash_other = hash_other
        self._counts = array("I", bytes(4 * length))
        self._others: dict[Any, int] = {}
        self._number = -1
        self._found: list[int] | None = None
        self._new: dict[Any, int] = {}  # counts after the last batch

    def count(self, indices: Sequence[object], number: int) -> list[int] | None:
        """How often each index of a batch came before, in the batch too; None if none did.

        The same batch may be asked for again, as the handler of a signal may raise at any line.

        Args:
            number: That of the batch.
        """
        if number == self._number:
            return self._found
        counts, others, length = self._counts, self._others, len(self._counts)
        for index, count in self._new.items():
            if type(index) is int and 0 <= index < length:
                counts[index] = count
            else:
                others[index] = count
        new: dict[Any, int] = {}
        found = []
        for index in indices:
            if type(index) not in (int, str):
                index = self._hash_other(index)
            before = new.get(index)
            if before is None:
                is_counted = type(index) is int and 0 <= index < length
                before = counts[cast(int, index)] if is_counted else others.get(index, 0)
            new[index] = before + 1
            found.append(before)
        kept = found if any(found) else None
        vars(self).update(_number=number, _found=kept, _new=new)  # at once
        return kept
