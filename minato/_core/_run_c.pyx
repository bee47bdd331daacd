"""Running the samples of a claimed run one after the other."""

from cpython.buffer cimport PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint64_t

from minato._core.atomics cimport mn_store_relaxed_u64, mn_store_release_u64, mn_u64
from minato._core.clock_gettime cimport mn_now_ns

__all__ = ["run_samples"]


def run_samples(
    fetch,
    list keys not None,
    int64_t position,
    lease,
    durations,
    bind,
    epoch,
    catches,
) -> tuple[list, object]:
    """Call ``fetch(key)`` for each key, until one raises.

    Args:
        keys: The samples' keys; a list.
        position: Position of the first; the others follow it.
        lease: Writable int64 memory of three words; they always hold the position + 1 of the sample that is running,
            when it started (ns on ``now_ns``) and -1 for the dataset. A watchdog reads them.
        durations: Writable int64 memory of ``len(keys)`` words at least; receives each sample's time in ns.
        bind: Called with ``(epoch, key)`` before each sample; None for nothing.
        catches: What a sample may raise; anything else propagates.

    Returns:
        The samples, and what the first one after them raised, or None.
    """
    cdef Py_buffer lease_view, duration_view
    cdef mn_u64 *words
    cdef int64_t *laps
    cdef int64_t now, started = mn_now_ns()
    cdef Py_ssize_t i, count = len(keys)
    cdef list samples = []
    PyObject_GetBuffer(lease, &lease_view, PyBUF_WRITABLE)
    try:
        PyObject_GetBuffer(durations, &duration_view, PyBUF_WRITABLE)
    except BaseException:
        PyBuffer_Release(&lease_view)
        raise
    try:
        if lease_view.len < 24 or duration_view.len < 8 * count:
            raise ValueError("lease takes three words and durations one for each key")
        words = <mn_u64 *>lease_view.buf
        laps = <int64_t *>duration_view.buf
        for i in range(count):
            mn_store_relaxed_u64(&words[1], started)
            mn_store_relaxed_u64(&words[2], <uint64_t>-1)
            mn_store_release_u64(&words[0], position + i + 1)
            try:
                if bind is not None:
                    bind(epoch, keys[i])
                samples.append(fetch(keys[i]))
            except catches as error:
                laps[i] = mn_now_ns() - started
                return samples, error
            now = mn_now_ns()
            laps[i] = now - started
            started = now
        return samples, None
    finally:
        PyBuffer_Release(&lease_view)
        PyBuffer_Release(&duration_view)
