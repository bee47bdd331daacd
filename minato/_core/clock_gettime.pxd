"""C clocks for other compiled modules: ``from minato._core.clock_gettime cimport mn_now_ns``."""

from libc.stdint cimport int64_t


cdef extern from "clock.h" nogil:
    int64_t mn_now_ns()
    int64_t mn_thread_cpu_ns()
    bint mn_expired(int64_t start_ns, int64_t timeout_ns)
