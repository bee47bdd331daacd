"""The clock for other compiled modules: ``from minato._core.clock_gettime cimport mn_now_ns``."""

from libc.stdint cimport int64_t, uint64_t


cdef extern from "clock.h" nogil:
    int64_t mn_now_ns()
    uint64_t mn_ticks()
