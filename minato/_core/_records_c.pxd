"""The memory of a ledger, as its compiled parts see it."""

from libc.stdint cimport uint32_t

from minato._core.layout cimport mn_batch, mn_worker
from minato._core.ledger cimport mn_ledger


cdef class Records:
    cdef Py_buffer view
    cdef mn_ledger ledger
    cdef mn_batch *batch_at(self, uint32_t index) except NULL
    cdef mn_worker *worker_at(self, uint32_t worker) except NULL
