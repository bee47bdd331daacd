"""The memory of a ledger, as its compiled parts see it."""

from libc.stdint cimport uint64_t

from minato._core.layout cimport mn_batch, mn_header, mn_position, mn_worker


cdef class Records:
    cdef Py_buffer view
    cdef mn_header *header
    cdef mn_worker *workers
    cdef mn_batch *batches
    cdef mn_position *positions
    cdef uint64_t mask  # position & mask: its record


cdef inline uint64_t worker_bits(uint64_t worker) noexcept nogil:
    return worker << 48


cdef inline uint64_t worker_of(uint64_t ticket) noexcept nogil:
    return (ticket >> 48) & 0x3FFF
