"""Words that processes share, and sleeping until another process says that something has changed (compiled).

``_wait_py`` says which arguments each function takes, what it returns, and what it raises.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from libc.limits cimport INT_MAX
from libc.stdint cimport int64_t, uint64_t

from minato._core.atomics cimport (
    mn_event_count,
    mn_event_count_read,
    mn_event_count_notify,
    mn_event_count_wait,
    mn_load_relaxed_u32,
    mn_load_seq_cst_u64,
    mn_store_seq_cst_u64,
    mn_u64,
)

__all__ = ["EVENT_COUNT_NBYTES", "EventCount", "SharedWords"]

EVENT_COUNT_NBYTES = sizeof(mn_event_count)


@cython.final
cdef class EventCount:
    """An event counter in shared memory that processes and threads can sleep on."""

    cdef Py_buffer view
    cdef mn_event_count *event_count

    def __cinit__(self, buffer, Py_ssize_t offset):
        PyObject_GetBuffer(buffer, &self.view, PyBUF_WRITABLE)
        if offset < 0 or offset % 8 or offset + <Py_ssize_t>sizeof(mn_event_count) > self.view.len:
            PyBuffer_Release(&self.view)
            raise ValueError(f"offset {offset} is no place for an event count in {self.view.len} bytes")
        self.event_count = <mn_event_count *>(<char *>self.view.buf + offset)

    def __dealloc__(self):
        if self.event_count != NULL:
            PyBuffer_Release(&self.view)

    @property
    def events(self):
        """How many events there have been, modulo 2**32."""
        return mn_event_count_read(self.event_count)

    @property
    def sleepers(self):
        """Number of registered sleepers; only the compiled backend registers them."""
        return mn_load_relaxed_u32(&self.event_count.sleepers)

    def notify(self, int sleepers=INT_MAX):
        """Count one event and wake up to ``sleepers`` sleepers."""
        mn_event_count_notify(self.event_count, sleepers)

    def wait(self, seen, double timeout_s):
        """Sleep until there has been an event since ``seen``."""
        cdef unsigned int count = seen
        cdef long long timeout_ns = <long long>(timeout_s * 1e9)
        cdef bint changed
        with nogil:
            changed = mn_event_count_wait(self.event_count, count, timeout_ns)
        return changed


@cython.final
cdef class SharedWords:
    """Signed 64-bit words in shared memory, whose loads and stores all processes see in one order."""

    cdef Py_buffer view
    cdef mn_u64 *words
    cdef Py_ssize_t count

    @staticmethod
    def nbytes(count):
        """Bytes of ``count`` words and of eight more, which the pure backend uses."""
        return 8 * (count + 1)

    def __cinit__(self, buffer, Py_ssize_t offset, Py_ssize_t count):
        PyObject_GetBuffer(buffer, &self.view, PyBUF_WRITABLE)
        if count < 0 or offset < 0 or offset % 8 or offset + 8 * (count + 1) > self.view.len:
            PyBuffer_Release(&self.view)
            raise ValueError(f"{count} words at offset {offset} do not fit {self.view.len} bytes")
        self.words = <mn_u64 *>(<char *>self.view.buf + offset) + 1
        self.count = count

    def __dealloc__(self):
        if self.words != NULL:
            PyBuffer_Release(&self.view)

    def load(self, Py_ssize_t index):
        """The word at ``index``."""
        if not 0 <= index < self.count:
            raise IndexError(f"word {index} is not one of {self.count}")
        return <int64_t>mn_load_seq_cst_u64(&self.words[index])

    def store(self, Py_ssize_t index, int64_t value):
        """Store a word, of which the caller is the one writer."""
        if not 0 <= index < self.count:
            raise IndexError(f"word {index} is not one of {self.count}")
        mn_store_seq_cst_u64(&self.words[index], <uint64_t>value)
