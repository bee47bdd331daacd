"""Which of the sampler's indices have arrived, and how often each was requested."""

cimport cython
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_AsUnsignedLongLongMask, PyLong_CheckExact
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from cpython.unicode cimport PyUnicode_CheckExact
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "seeding.h" nogil:
    uint64_t mn_avalanche(uint64_t z)
    uint64_t GOLDEN "MN_GOLDEN"


__all__ = ["Arrivals", "Occurrences", "sum_of_hashes"]

cdef enum:
    FIRST_CAPACITY = 1024
    # States of a number
    SETTLED = 0
    WAITING = 1
    BLANK = 2  # the number of an empty batch


cdef uint64_t hash_of(index, hash_other) except? 0:
    cdef uint64_t number = PyLong_AsUnsignedLongLongMask(
        index if PyLong_CheckExact(index) else hash_other(index)
    )
    return mn_avalanche(number + GOLDEN)


def sum_of_hashes(indices, hash_other) -> int:
    """The sum modulo 2**64 of the indices' hashes: the same for every order of the indices.

    Args:
        hash_other: Returns an integer, modulo 2**64, for an index that is not an integer.
    """
    cdef uint64_t total = 0
    for index in indices:
        total += hash_of(index, hash_other)
    return total


cdef struct Tally:
    uint64_t count, total


@cython.final
cdef class Arrivals:
    """Tracks the indices of an epoch: each is requested once, and then arrives, is skipped, or is pending.

    Indices are numbered from 0 in the order of requests. A tally of indices is ``(count, sum of their hashes modulo
    2**64)``: equal tallies mean equal sets of indices, in any order. Memory is taken only for the indices from the
    first that is waited for.

    Args:
        hash_other: Returns an integer, modulo 2**64, for an index that is not an integer.
        asked, delivered, skipped: Tallies to start from.
    """

    cdef object hash_other
    cdef set skipped_numbers
    cdef Tally asked_, delivered_, skipped_, dropped_
    # Rings of the numbers from prefix_ to end_.
    cdef uint64_t *hashes
    cdef uint8_t *states
    cdef int64_t mask, prefix_, end_
    cdef uint64_t strays_
    cdef int64_t asked_batches, delivered_batches

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
        """Number further indices; an empty batch takes a number too.

        Args:
            batch: Number of the batch; one that was asked for before stays as it is. -1: the next number.
        """
        cdef Py_ssize_t i, known = 0, count = len(indices)
        cdef uint64_t *hashes
        if 0 <= batch < self.asked_batches:
            return
        hashes = <uint64_t *>PyMem_Malloc((count + 1) * sizeof(uint64_t))
        if hashes is NULL:
            raise MemoryError
        try:
            # First: what ``hash_other`` raises leaves nothing half done.
            for index in indices:
                if known == count:
                    raise ValueError("a batch has more indices than its length says")
                hashes[known] = hash_of(index, self.hash_other)
                known += 1
            while self.end_ - self.prefix_ + known > self.mask:
                self._grow()
            for i in range(known):
                self._append(WAITING, hashes[i])
                self.asked_.count += 1
                self.asked_.total += hashes[i]
            if known == 0:
                self._append(BLANK, 0)
        finally:
            PyMem_Free(hashes)
        self.asked_batches = max(batch, self.asked_batches) + 1

    @cython.critical_section
    def deliver(self, list positions not None, int64_t start, int64_t batch=-1) -> None:
        """Note that indices have arrived, those with the numbers ``position - start``.

        An index that was skipped before may still have its place in a batch: it stays skipped. Negative positions are
        those of nothing.

        Args:
            batch: Number of the batch, in the order of arrival; one that has arrived before changes nothing. -1: the
                next number.
        """
        cdef int64_t number, at
        if 0 <= batch < self.delivered_batches:
            return
        for position in positions:
            at = position
            if at < 0:
                continue
            number = at - start
            if self._is_waiting(number):
                self._settle(number, &self.delivered_)
            elif number not in self.skipped_numbers:
                self.strays_ += 1
        self._advance()
        self.delivered_batches = max(batch, self.delivered_batches) + 1

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
    def drop(self) -> None:
        """Wait for nothing more."""
        cdef int64_t number
        for number in range(self.prefix_, self.end_):
            if self._is_waiting(number):
                self._settle(number, &self.dropped_)
        self._advance()

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

    cdef inline int _append(self, uint8_t state, uint64_t hashed) except -1:
        if self.end_ - self.prefix_ > self.mask:
            self._grow()
        self.states[self.end_ & self.mask] = state
        self.hashes[self.end_ & self.mask] = hashed
        self.end_ += 1
        return 0

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
    """Counts how often each index came.

    Indices below ``length`` take 4 bytes each, all others a dictionary's entry for each different one.

    Args:
        length: Number of indices, from 0 on; 0: unknown.
        hash_other: Returns an integer for an index that is neither an integer nor a string.
    """

    cdef object hash_other
    cdef dict others
    cdef uint32_t *counts
    cdef int64_t length

    def __cinit__(self, int64_t length, hash_other):
        self.hash_other = hash_other
        self.others = {}
        self.length = length
        self.counts = <uint32_t *>PyMem_Calloc(length + 1, sizeof(uint32_t))
        if self.counts is NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.counts)

    def count(self, indices) -> list | None:
        """How often each of these indices came before, in this call too; None if none did."""
        cdef list found = None
        cdef Py_ssize_t i = 0
        cdef uint64_t before
        for index in indices:
            before = self._count(index)
            if before and found is None:
                found = [0] * i
            if found is not None:
                found.append(before)
            i += 1
        return found

    cdef int64_t _count(self, index) except -1:
        cdef int overflow = 0
        cdef int64_t number, before
        if not PyLong_CheckExact(index) and not PyUnicode_CheckExact(index):
            index = self.hash_other(index)
        if PyLong_CheckExact(index):
            number = PyLong_AsLongLongAndOverflow(index, &overflow)
            if not overflow and 0 <= number < self.length:
                before = self.counts[number]
                self.counts[number] += 1
                return before
        before = self.others.get(index, 0)
        self.others[index] = before + 1
        return before
