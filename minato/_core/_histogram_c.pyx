"""Mergeable histograms of durations, with a known relative error, in shared memory."""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_AsLongLongAndOverflow
from libc.math cimport ceil
from libc.stdint cimport uint32_t, uint64_t, uintptr_t


cdef extern from "histogram.h" nogil:
    const uint64_t MN_HISTOGRAM_TOP
    const uint32_t MN_HISTOGRAM_BUCKETS
    ctypedef struct mn_histogram:
        uint64_t count
        uint64_t total
        uint64_t max
        uint64_t bucket[1]
    uint64_t mn_histogram_middle(uint32_t bucket)
    void mn_histogram_set(uint64_t *word, uint64_t value)
    uint64_t mn_histogram_get(const uint64_t *word)
    void mn_histogram_record(mn_histogram *h, uint64_t value)
    void mn_histogram_add(mn_histogram *to, const mn_histogram *source)
    Py_ssize_t sizeof_histogram "sizeof(mn_histogram)"


__all__ = ["HISTOGRAM_NBYTES", "Histogram"]

HISTOGRAM_NBYTES = sizeof_histogram
"""Bytes of one histogram: count, total and max, then 720 buckets from byte 64, all uint64."""


@cython.final
cdef class Histogram:
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

    cdef mn_histogram *h
    cdef Py_buffer view

    def __cinit__(self, buffer=None):
        if buffer is None:
            buffer = bytearray(HISTOGRAM_NBYTES)
        PyObject_GetBuffer(buffer, &self.view, PyBUF_WRITABLE)
        if self.view.len != sizeof_histogram:
            raise ValueError(f"a histogram needs {HISTOGRAM_NBYTES} bytes, this buffer has {self.view.len}")
        if <uintptr_t>self.view.buf % 8:
            raise ValueError("a histogram's memory must be aligned to 8 bytes")
        self.h = <mn_histogram *>self.view.buf

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    def record(self, value) -> None:
        """Count one duration (int, ns).

        Raises:
            ValueError: ``value`` is negative.
        """
        cdef int overflow = 0
        cdef long long number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow < 0 or (number < 0 and not overflow):
            raise ValueError(f"a duration cannot be negative: {value}")
        mn_histogram_record(self.h, MN_HISTOGRAM_TOP if overflow else <uint64_t>number)

    def record_all(self, values, Py_ssize_t count) -> int:
        """Count the first ``count`` values of int64 memory, none of them negative.

        Returns:
            The largest of them; 0 if there are none.

        Raises:
            ValueError: The memory holds fewer values.
        """
        cdef Py_buffer view
        cdef Py_ssize_t i
        cdef uint64_t value, largest = 0
        PyObject_GetBuffer(values, &view, 0)
        try:
            if count < 0 or view.len < 8 * count:
                raise ValueError(f"{view.len} bytes hold no {count} values")
            for i in range(count):
                value = (<uint64_t *>view.buf)[i]
                mn_histogram_record(self.h, value)
                largest = max(largest, value)
            return largest
        finally:
            PyBuffer_Release(&view)

    def merge(self, Histogram other not None) -> None:
        """Add the counts of ``other``."""
        mn_histogram_add(self.h, other.h)

    @property
    def count(self) -> int:
        """How many values were recorded."""
        return mn_histogram_get(&self.h.count)

    @property
    def total(self) -> int:
        """Sum of the values, in ns; exact except for values over the top."""
        return mn_histogram_get(&self.h.total)

    @property
    def max(self) -> int:
        """Largest value, in ns; 0 when empty. Exact, except in a result of :meth:`subtract`."""
        return mn_histogram_get(&self.h.max)

    @property
    def mean(self) -> float:
        """Total divided by count, in ns; 0.0 when empty."""
        cdef uint64_t count = mn_histogram_get(&self.h.count)
        return <double>mn_histogram_get(&self.h.total) / <double>count if count else 0.0

    def percentile(self, double q) -> int:
        """Return the smallest value, in ns, with at least the share ``q`` of all values up to it.

        Args:
            q: From 0 to 1: 0.5 is the median.

        Returns:
            The middle of that value's bucket, never more than :attr:`max`; 0 when empty.

        Raises:
            ValueError: ``q`` is not between 0 and 1.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q is a share between 0 and 1, not {q}")
        cdef uint32_t i
        cdef uint64_t count = 0, seen = 0, rank
        for i in range(MN_HISTOGRAM_BUCKETS):
            count += mn_histogram_get(&self.h.bucket[i])
        if count == 0:
            return 0
        rank = max(<uint64_t>ceil(q * <double>count), <uint64_t>1)
        if rank >= count:
            return mn_histogram_get(&self.h.max)
        for i in range(MN_HISTOGRAM_BUCKETS):
            seen += mn_histogram_get(&self.h.bucket[i])
            if seen >= rank:
                break
        return min(mn_histogram_middle(i), mn_histogram_get(&self.h.max))

    def clear(self) -> None:
        """Forget everything recorded."""
        cdef uint32_t i
        mn_histogram_set(&self.h.count, 0)
        for i in range(MN_HISTOGRAM_BUCKETS):
            mn_histogram_set(&self.h.bucket[i], 0)
        mn_histogram_set(&self.h.total, 0)
        mn_histogram_set(&self.h.max, 0)

    def snapshot(self) -> Histogram:
        """Return a copy in memory of its own."""
        cdef Histogram copy = Histogram()
        mn_histogram_add(copy.h, self.h)
        return copy

    def subtract(self, Histogram older not None) -> Histogram:
        """Return what was recorded since ``older``, an earlier snapshot of this histogram.

        The largest value of the window is known to its bucket only (1/32). When the histogram was
        cleared after the snapshot, the window is all it holds now.
        """
        cdef Histogram window = self.snapshot()
        cdef uint32_t i, last = 0
        if older.h.total > window.h.total:
            return window
        for i in range(MN_HISTOGRAM_BUCKETS):
            if older.h.bucket[i] > window.h.bucket[i]:
                return window
        window.h.count = 0
        for i in range(MN_HISTOGRAM_BUCKETS):
            window.h.bucket[i] -= older.h.bucket[i]
            window.h.count += window.h.bucket[i]
            if window.h.bucket[i]:
                last = i
        window.h.total -= older.h.total
        window.h.max = min(window.h.max, mn_histogram_middle(last))
        return window
