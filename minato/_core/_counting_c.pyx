"""Counts: of indices that were requested and have arrived, and of durations.

``_counting_py`` says which arguments each function takes, what it returns, and what it raises.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_AsUnsignedLongLongMask, PyLong_CheckExact
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from cpython.unicode cimport PyUnicode_CheckExact
from libc.math cimport ceil
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t


cdef extern from "seeding.h" nogil:
    uint64_t mn_avalanche(uint64_t z)
    uint64_t GOLDEN "MN_GOLDEN"


cdef extern from "histogram.h" nogil:
    const uint64_t MN_HISTOGRAM_TOP
    const uint32_t MN_HISTOGRAM_BUCKETS
    ctypedef struct mn_histogram:
        uint64_t count
        uint64_t total
        uint64_t max
        uint64_t bucket[1]
    uint64_t mn_histogram_middle(uint32_t bucket)
    uint64_t mn_histogram_get(const uint64_t *word)
    void mn_histogram_record(mn_histogram *h, uint64_t value)
    void mn_histogram_add(mn_histogram *to, const mn_histogram *source, uint32_t low, uint32_t high)
    Py_ssize_t sizeof_histogram "sizeof(mn_histogram)"
    Py_ssize_t offsetof_buckets "offsetof(mn_histogram, bucket)"


__all__ = ["HISTOGRAM_NBYTES", "Arrivals", "Calls", "Histogram", "Occurrences", "sum_of_hashes"]

HISTOGRAM_NBYTES = sizeof_histogram
"""Bytes of one histogram: count, total and max, then 720 buckets from byte 64, all uint64."""

cdef object SCRATCH = bytearray(HISTOGRAM_NBYTES)  # what a snapshot begins with


@cython.final
cdef class Histogram:
    """Counts of durations in log-linear buckets; histograms merge by addition."""

    cdef mn_histogram *h
    cdef Py_buffer view
    cdef uint32_t low, high  # the buckets that it has: all, or those of a snapshot
    cdef bint is_snapshot

    def __cinit__(self, buffer=None):
        if buffer is None:
            buffer = bytearray(HISTOGRAM_NBYTES)
        PyObject_GetBuffer(buffer, &self.view, PyBUF_WRITABLE)
        if self.view.len != sizeof_histogram:
            raise ValueError(f"a histogram needs {HISTOGRAM_NBYTES} bytes, this buffer has {self.view.len}")
        if <uintptr_t>self.view.buf % 8:
            raise ValueError("a histogram's memory must be aligned to 8 bytes")
        self.h = <mn_histogram *>self.view.buf
        self.high = MN_HISTOGRAM_BUCKETS

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    def record(self, value) -> None:
        """Count one duration (int, ns)."""
        cdef int overflow = 0
        cdef long long number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow < 0 or (number < 0 and not overflow):
            raise ValueError(f"a duration cannot be negative: {value}")
        self._add(MN_HISTOGRAM_TOP if overflow else <uint64_t>number)

    def record_all(self, values, Py_ssize_t count) -> int:
        """Count the first ``count`` values of int64 memory, none of them negative."""
        cdef Py_buffer view
        cdef Py_ssize_t i
        cdef uint64_t value, largest = 0
        PyObject_GetBuffer(values, &view, 0)
        try:
            if count < 0 or view.len < 8 * count:
                raise ValueError(f"{view.len} bytes hold no {count} values")
            for i in range(count):
                value = (<uint64_t *>view.buf)[i]
                self._add(value)
                largest = max(largest, value)
            return largest
        finally:
            PyBuffer_Release(&view)

    def merge(self, Histogram other not None) -> None:
        """Add the counts of ``other``."""
        self._check_writable()
        mn_histogram_add(self.h, other.h, other.low, other.high)

    cdef inline int _add(self, uint64_t value) except -1:
        self._check_writable()
        mn_histogram_record(self.h, value)
        return 0

    cdef inline int _check_writable(self) except -1:
        if self.is_snapshot:
            raise TypeError("a snapshot of a histogram is read-only")
        return 0

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
        """Return the smallest value, in ns, with at least the share ``q`` of all values up to it."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q is a share between 0 and 1, not {q}")
        cdef uint32_t i
        cdef uint64_t count = 0, seen = 0, rank
        for i in range(self.high - self.low):
            count += mn_histogram_get(&self.h.bucket[i])
        if count == 0:
            return 0
        rank = max(<uint64_t>ceil(q * <double>count), <uint64_t>1)
        if rank >= count:
            return mn_histogram_get(&self.h.max)
        for i in range(self.high - self.low):
            seen += mn_histogram_get(&self.h.bucket[i])
            if seen >= rank:
                break
        return min(mn_histogram_middle(self.low + i), mn_histogram_get(&self.h.max))

    def snapshot(self) -> Histogram:
        """Return a read-only copy, without the buckets below and above all values."""
        cdef uint32_t low = 0, high = self.high - self.low
        while high and not mn_histogram_get(&self.h.bucket[high - 1]):
            high -= 1
        while low < high and not mn_histogram_get(&self.h.bucket[low]):
            low += 1
        cdef Histogram copy = Histogram.__new__(Histogram, SCRATCH)
        memory = bytearray(offsetof_buckets + 8 * (high - low))
        PyBuffer_Release(&copy.view)
        PyObject_GetBuffer(memory, &copy.view, PyBUF_WRITABLE)
        copy.h = <mn_histogram *>copy.view.buf
        copy.low, copy.high, copy.is_snapshot = self.low + low, self.low + high, True
        cdef uint32_t i
        for i in range(low, high):
            copy.h.bucket[i - low] = mn_histogram_get(&self.h.bucket[i])
        copy.h.total = mn_histogram_get(&self.h.total)
        copy.h.max = mn_histogram_get(&self.h.max)
        copy.h.count = mn_histogram_get(&self.h.count)
        return copy

    def subtract(self, Histogram older not None) -> Histogram:
        """Return what was recorded since ``older``, an earlier snapshot of this histogram.

        The largest value of the window is known to its bucket only (1/32). Where ``older`` holds what
        this one does not, the window is all that this one holds.
        """
        cdef Histogram window = Histogram()
        cdef uint32_t i, last = 0
        window.merge(self)
        if older.h.total > window.h.total:
            return window
        for i in range(older.low, older.high):
            if older.h.bucket[i - older.low] > window.h.bucket[i]:
                return window
        for i in range(older.low, older.high):
            window.h.bucket[i] -= older.h.bucket[i - older.low]
        window.h.count = 0
        for i in range(MN_HISTOGRAM_BUCKETS):
            window.h.count += window.h.bucket[i]
            if window.h.bucket[i]:
                last = i
        window.h.total -= older.h.total
        window.h.max = min(window.h.max, mn_histogram_middle(last))
        return window


@cython.final
cdef class Calls:
    """The calls of ``next()`` in an epoch, in ns; one thread writes, others may read."""

    cdef readonly Histogram waits, steps
    cdef public int64_t began_ns, entered_ns, left_ns, wall_ns, due_ns, samples, nbytes
    cdef public bint is_wanted
    cdef readonly bint is_closed

    def __cinit__(self, int64_t now):
        self.waits, self.steps = Histogram(), Histogram()
        self.began_ns = self.entered_ns = self.left_ns = now

    def enter(self, int64_t now) -> None:
        """A call begins."""
        if self.is_closed:
            return
        self.entered_ns = now
        if mn_histogram_get(&self.waits.h.count):
            mn_histogram_record(self.steps.h, <uint64_t>max(now - self.left_ns, 0))

    def leave(self, int64_t now, int64_t samples, int64_t nbytes, bint looked=False) -> bool:
        """A call returns a batch."""
        if self.is_closed:
            return True
        if not looked and (self.is_wanted or now - self.began_ns >= self.due_ns):
            return False
        self.left_ns = now
        mn_histogram_record(self.waits.h, <uint64_t>max(now - self.entered_ns, 0))
        self.wall_ns = now - self.began_ns
        self.samples += samples
        self.nbytes += nbytes
        return True

    def close(self) -> None:
        """Note no more calls, and keep little memory."""
        self.is_closed = True
        self.waits, self.steps = self.waits.snapshot(), self.steps.snapshot()


cdef enum:
    FIRST_CAPACITY = 1024
    # States of a number
    SETTLED = 0
    WAITING = 1
    BLANK = 2  # the number of an empty batch


cdef uint64_t hash_of(index, hash_other) except? 0:
    cdef uint64_t number
    if PyLong_CheckExact(index):
        number = PyLong_AsUnsignedLongLongMask(index)
    else:
        number = PyLong_AsUnsignedLongLongMask(hash_other(index))
    return mn_avalanche(number + GOLDEN)


def sum_of_hashes(indices, hash_other) -> int:
    """The sum modulo 2**64 of the indices' hashes: the same for every order of the indices."""
    cdef uint64_t total = 0
    for index in indices:
        total += hash_of(index, hash_other)
    return total


cdef struct Tally:
    uint64_t count, total


@cython.final
cdef class Arrivals:
    """Tracks the indices of an epoch: each is requested once, and then arrives, is skipped, or is pending."""

    cdef object hash_other
    cdef set skipped_numbers
    cdef Tally asked_, delivered_, skipped_, dropped_
    # Rings of the numbers from prefix_ to end_.
    cdef uint64_t *hashes
    cdef uint8_t *states
    cdef int64_t mask, prefix_, end_
    cdef uint64_t strays_
    cdef int64_t asked_batches, batches_

    def __cinit__(self, hash_other, asked=(0, 0), delivered=(0, 0), skipped=(0, 0)):
        self.hash_other = hash_other
        self.skipped_numbers = set()
        self.asked_.count, self.asked_.total = asked
        self.delivered_.count, self.delivered_.total = delivered
        self.skipped_.count, self.skipped_.total = skipped
        self.mask = FIRST_CAPACITY - 1
        self.hashes = <uint64_t *>PyMem_Malloc(FIRST_CAPACITY * sizeof(uint64_t))
        self.states = <uint8_t *>PyMem_Malloc(FIRST_CAPACITY)
        if self.hashes is NULL or self.states is NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.hashes)
        PyMem_Free(self.states)

    @property
    @cython.critical_section
    def asked(self):
        """Tally of the requested indices."""
        return self.asked_.count, self.asked_.total

    @property
    @cython.critical_section
    def delivered(self):
        """Tally of the indices that arrived."""
        return self.delivered_.count, self.delivered_.total

    @property
    @cython.critical_section
    def delivered_batches(self):
        """Number of the batches in which they arrived."""
        return self.batches_

    @property
    @cython.critical_section
    def skipped(self):
        """Tally of the indices that were given up."""
        return self.skipped_.count, self.skipped_.total

    @property
    @cython.critical_section
    def dropped(self):
        """Tally of the dropped indices, which are not requested again."""
        return self.dropped_.count, self.dropped_.total

    @property
    @cython.critical_section
    def unexpected(self):
        """Number of arrivals that were not pending: never requested, or a repetition."""
        return self.strays_

    @property
    @cython.critical_section
    def prefix(self):
        """All numbers below have arrived or were skipped."""
        return self.prefix_

    @property
    @cython.critical_section
    def beyond(self):
        """The numbers above that have arrived or were skipped, ascending."""
        cdef int64_t number
        return [
            number
            for number in range(self.prefix_, self.end_)
            if self.states[number & self.mask] == SETTLED
        ]

    @cython.critical_section
    def ask(self, indices, int64_t batch=-1) -> None:
        """Number further indices; an empty batch takes a number too."""
        cdef Py_ssize_t known = 0, count = len(indices)
        cdef int64_t first, number, end = self.end_
        cdef uint64_t hashed, total = 0
        if 0 <= batch < self.asked_batches:
            return
        while end - self.prefix_ + (count or 1) > self.mask + 1:
            self._grow()
        # Beyond the end, where nobody looks: what ``hash_other`` raises leaves nothing half done.
        if type(indices) is range and count and indices[count - 1] - indices[0] == count - 1:
            first, indices = indices[0], ()
            for known in range(count):
                hashed = mn_avalanche(<uint64_t>(first + known) + GOLDEN)
                self.hashes[(end + known) & self.mask] = hashed
                total += hashed
            known = count
        for index in indices:
            if known == count:
                raise ValueError("a batch has more indices than its length says")
            hashed = hash_of(index, self.hash_other)
            self.hashes[(end + known) & self.mask] = hashed
            total += hashed
            known += 1
        for number in range(end, end + known):
            self.states[number & self.mask] = WAITING
        if known == 0:
            self.states[end & self.mask] = BLANK
        self.end_ = end + (known or 1)
        self.asked_.count += known
        self.asked_.total += total
        self.asked_batches = max(batch, self.asked_batches) + 1

    @cython.critical_section
    def deliver(self, positions not None, int64_t start, int64_t batch=-1) -> None:
        """Note that indices have arrived, those with the numbers ``position - start``."""
        cdef int64_t at
        if 0 <= batch < self.batches_:
            return
        if type(positions) is range:
            at = positions[0] if positions else 0
            for at in range(at, at + <int64_t>len(positions)):
                self._arrive(at - start)
        else:
            for position in <list?>positions:
                at = position
                if at >= 0:
                    self._arrive(at - start)
        self._advance()
        self.batches_ = max(batch, self.batches_) + 1

    @cython.critical_section
    def skip(self, list positions not None, int64_t start) -> None:
        """Mark indices that will not arrive, so that the epoch does not wait for them."""
        cdef int64_t number
        for position in positions:
            number = <int64_t>position - start
            if self._is_waiting(number):
                self._settle(number, &self.skipped_)
                self.skipped_numbers.add(number)
        self._advance()

    @cython.critical_section
    def drop(self, positions, int64_t start) -> None:
        """Mark indices that turned out not to exist."""
        cdef int64_t number
        for position in positions:
            number = <int64_t>position - start
            if self._is_waiting(number):
                self._settle(number, &self.dropped_)
        self._advance()

    cdef inline int _arrive(self, int64_t number) except -1:
        if self._is_waiting(number):
            self._settle(number, &self.delivered_)
        elif number not in self.skipped_numbers:
            self.strays_ += 1
        return 0

    cdef inline bint _is_waiting(self, int64_t number) noexcept:
        return self.prefix_ <= number < self.end_ and self.states[number & self.mask] != SETTLED

    cdef inline void _settle(self, int64_t number, Tally *tally) noexcept:
        cdef int64_t i = number & self.mask
        if self.states[i] == WAITING:
            tally.count += 1
            tally.total += self.hashes[i]
        self.states[i] = SETTLED

    cdef inline void _advance(self) noexcept:
        while self.prefix_ < self.end_ and self.states[self.prefix_ & self.mask] == SETTLED:
            self.prefix_ += 1

    cdef int _grow(self) except -1:
        cdef int64_t number, mask = 2 * self.mask + 1
        cdef uint64_t *hashes = <uint64_t *>PyMem_Malloc((mask + 1) * sizeof(uint64_t))
        cdef uint8_t *states = <uint8_t *>PyMem_Malloc(mask + 1)
        if hashes is NULL or states is NULL:
            PyMem_Free(hashes)
            PyMem_Free(states)
            raise MemoryError
        for number in range(self.prefix_, self.end_):
            hashes[number & mask] = self.hashes[number & self.mask]
            states[number & mask] = self.states[number & self.mask]
        PyMem_Free(self.hashes)
        PyMem_Free(self.states)
        self.hashes, self.states, self.mask = hashes, states, mask
        return 0


@cython.final
cdef class Occurrences:
    """Counts how often each index came."""

    cdef object hash_other
    cdef dict others
    cdef uint32_t *counts
    cdef int64_t length, number
    cdef list found

    def __cinit__(self, int64_t length, hash_other):
        self.hash_other = hash_other
        self.others = {}
        self.number = -1
        self.length = length
        self.counts = <uint32_t *>PyMem_Calloc(length + 1, sizeof(uint32_t))
        if self.counts is NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.counts)

    def count(self, indices, int64_t number) -> list | None:
        """How often each index of a batch came before, in the batch too; None if none did."""
        cdef list found = None
        cdef Py_ssize_t i = 0
        cdef uint64_t before
        if number == self.number:  # the last call was interrupted
            return self.found
        # What runs Python code comes first: the handler of a signal may raise there.
        cdef list hashed = [
            index if PyLong_CheckExact(index) or PyUnicode_CheckExact(index) else self.hash_other(index)
            for index in indices
        ]
        for index in hashed:
            before = self._count(index)
            if before and found is None:
                found = [0] * i
            if found is not None:
                found.append(before)
            i += 1
        self.number, self.found = number, found
        return found

    cdef int64_t _count(self, index) except -1:
        cdef int overflow = 0
        cdef int64_t number, before
        if PyLong_CheckExact(index):
            number = PyLong_AsLongLongAndOverflow(index, &overflow)
            if not overflow and 0 <= number < self.length:
                before = self.counts[number]
                self.counts[number] += 1
                return before
        before = self.others.get(index, 0)
        self.others[index] = before + 1
        return before
