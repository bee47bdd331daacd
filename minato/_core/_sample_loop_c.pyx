"""Running samples one after the other, and the transforms of one of them, while the lease says which.

``_sample_loop_py`` says which arguments each function takes, what it returns, and what it raises.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT64_MAX, int64_t, uint64_t

from minato._core.atomics cimport (
    mn_load_acquire_u64,
    mn_load_relaxed_u64,
    mn_store_relaxed_u64,
    mn_store_release_u64,
    mn_u64,
)
from minato._core.clock_gettime cimport mn_now_ns, mn_ticks

from minato._core.codes import LeaseState

__all__ = ["LEASE_NBYTES", "Lease", "run_samples", "run_steps"]

cdef enum:
    TOGETHER = 16  # samples that are timed together
    CHEAP_NS = 2000  # where they cost less
    LONG_TICKS = 65536  # 15 to 65 µs: such a sample is timed by itself

LEASE_NBYTES = 24
"""Bytes of a lease: position + 1 (0: no sample), the time it was begun, and its step, all 64 bits wide."""


@cython.final
cdef class Lease:
    """What one worker runs, in shared memory: supervision reads it, also after the worker's death."""

    cdef Py_buffer view
    cdef mn_u64 *words  # position + 1, started_ns, step

    def __cinit__(self, buffer=None, Py_ssize_t offset=0):
        PyObject_GetBuffer(bytearray(24) if buffer is None else buffer, &self.view, PyBUF_WRITABLE)
        if offset < 0 or offset % 8 or offset + 24 > self.view.len:
            PyBuffer_Release(&self.view)
            raise ValueError(f"offset {offset} is no place for a lease in {self.view.len} bytes")
        self.words = <mn_u64 *>(<char *>self.view.buf + offset)

    def __dealloc__(self):
        if self.words != NULL:
            PyBuffer_Release(&self.view)

    @property
    def position(self):
        """Position of the sample that runs; None: none does."""
        cdef uint64_t word = mn_load_acquire_u64(&self.words[0])
        return word - 1 if word else None

    @property
    def started_ns(self):
        """When the sample, or what else the worker is on, was begun; on ``now_ns``."""
        return <int64_t>mn_load_relaxed_u64(&self.words[1])

    @property
    def step(self):
        """Index of the transform that runs; -1: the dataset itself; below: READING, or what ``enter`` says."""
        return <int64_t>mn_load_relaxed_u64(&self.words[2])

    @step.setter
    def step(self, int64_t value):
        mn_store_relaxed_u64(&self.words[2], <uint64_t>value)

    def state(self):
        """The three words as a ``LeaseState``."""
        return LeaseState(self.position, self.started_ns, self.step)

    def begin(self, uint64_t position, int64_t started_ns, int64_t step=-1):
        """Say that the worker runs the sample at this position."""
        begin(self.words, position + 1, started_ns, step)

    def enter(self, int64_t step, int64_t started_ns):
        """Say that the worker runs no sample."""
        begin(self.words, 0, started_ns, step)


cdef inline void begin(mn_u64 *words, uint64_t word, int64_t started_ns, int64_t step) noexcept:
    mn_store_relaxed_u64(&words[1], <uint64_t>started_ns)
    mn_store_relaxed_u64(&words[2], <uint64_t>step)
    mn_store_release_u64(&words[0], word)


cdef mn_u64 *int64_words(object buffer, Py_buffer *view, Py_ssize_t words, str name) except? NULL:
    PyObject_GetBuffer(buffer, view, PyBUF_WRITABLE)
    if view.len < 8 * words:
        PyBuffer_Release(view)
        raise ValueError(f"{name} needs {8 * words} bytes, this buffer has {view.len}")
    return <mn_u64 *>view.buf


cdef inline int64_t share(
    mn_u64 *laps, Py_ssize_t first, Py_ssize_t last, int64_t taken, int64_t most
) noexcept:
    """Divide a time among samples, the others getting no more than ``most`` before the last one; returns their part."""
    cdef int64_t part = min(taken // (last - first + 1), most)
    while first < last:
        mn_store_relaxed_u64(&laps[first], part)
        taken -= part
        first += 1
    mn_store_relaxed_u64(&laps[last], taken)
    return part


def run_samples(
    fetch,
    list keys not None,
    int64_t position,
    Lease lease not None,
    durations,
    bind,
    epoch,
    catches,
) -> tuple[list, object]:
    """Call ``fetch(key)`` for each key, until one raises."""
    cdef Py_buffer view
    cdef mn_u64 *laps
    cdef int64_t now, started = mn_now_ns(), mean = 0
    cdef uint64_t ticks = 0, before = 0
    cdef Py_ssize_t i = 0, first = 0, together = 1, count = len(keys)
    cdef list samples = []
    laps = int64_words(durations, &view, count, "durations")
    try:
        for i in range(count):
            begin(lease.words, position + i + 1, started, -1)
            if bind is not None:
                bind(epoch, keys[i])
            samples.append(fetch(keys[i]))
            # The clock waits for all accesses to memory, which the processor would make for several samples at once.
            ticks, before = mn_ticks(), ticks
            if ticks - before < LONG_TICKS:
                if i + 1 < min(first + together, count):
                    continue
                mean = INT64_MAX
            now = mn_now_ns()
            mean = share(laps, first, i, now - started, mean)
            together = TOGETHER if mean < CHEAP_NS else 1
            first, started = i + 1, now
        return samples, None
    except catches as error:
        share(laps, first, i, mn_now_ns() - started, mean)
        return samples, error
    finally:
        PyBuffer_Release(&view)


def run_steps(
    tuple steps not None,
    value,
    Py_ssize_t index,
    int64_t deadline_ns,
    laps=None,
    Lease lease=None,
) -> tuple[object, int]:
    """Apply ``steps[index:]`` to ``value``, stopping after a step that ends past the deadline."""
    cdef Py_ssize_t length = len(steps)
    cdef Py_buffer view
    if not 0 <= index <= length:
        raise IndexError(f"index must be between 0 and {length}, not {index}")
    if laps is None:
        return apply(steps, value, index, deadline_ns, NULL, lease)
    int64_words(laps, &view, length, "laps")
    try:
        return apply(steps, value, index, deadline_ns, <mn_u64 *>view.buf, lease)
    finally:
        PyBuffer_Release(&view)


cdef tuple apply(
    tuple steps, object value, Py_ssize_t index, int64_t deadline_ns, mn_u64 *laps, Lease lease
):
    cdef Py_ssize_t length = len(steps)
    cdef int64_t now_ns = 0, before_ns = 0
    if laps is not NULL:
        before_ns = mn_now_ns()
    while index < length:
        if lease is not None:
            mn_store_relaxed_u64(&lease.words[2], index)
        value = steps[index](value)
        if deadline_ns > 0 or laps is not NULL:
            now_ns = mn_now_ns()
        if laps is not NULL:
            mn_store_relaxed_u64(&laps[index], now_ns - before_ns)
            before_ns = now_ns
        index += 1
        if 0 < deadline_ns <= now_ns:
            break
    if lease is not None:
        mn_store_relaxed_u64(&lease.words[2], index)
    return value, index
