"""Running the transforms of one sample, with a stop between two of them when time is up."""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t
from libc.string cimport memset

from minato._core.atomics cimport mn_store_relaxed_u64, mn_u64
from minato._core.clock_gettime cimport mn_now_ns


__all__ = ["run_steps"]


def run_steps(
    tuple steps not None,
    value,
    Py_ssize_t index,
    int64_t deadline_ns,
    laps=None,
    cursor=None,
) -> tuple[object, int]:
    """Apply ``steps[index:]`` to ``value``, stopping after a step that ends past the deadline.

    At least one step runs if one is left. A step that ran is never run again: the returned index
    is that of the next one. A sample whose last step ends late is complete.

    Args:
        steps: The transforms, each a callable of one argument.
        value: The sample, or the partial result of an earlier call.
        index: The first step to apply, 0 to ``len(steps)``.
        deadline_ns: On the clock of :func:`minato._core.now_ns`; 0 or less for none.
        laps: Writable int64 memory of ``len(steps)`` words; word *i* receives the duration of
            step *i* in ns once it has run.
        cursor: Writable int64 memory of one word or more; its first word always holds the index
            of the step being run (after an exception: of the one that raised), at the end the
            returned index.

    Returns:
        The value, and the index of the next step: ``len(steps)`` when the sample is complete.

    Raises:
        IndexError: ``index`` is out of range.
        ValueError: ``laps`` or ``cursor`` is too small.
        Exception: Whatever a step raises, unchanged.
    """
    cdef Py_ssize_t length = len(steps)
    cdef Py_buffer lap_view, cursor_view
    cdef mn_u64 *lap_words = NULL
    cdef mn_u64 *cursor_word = NULL
    if not 0 <= index <= length:
        raise IndexError(f"index must be between 0 and {length}, not {index}")
    if laps is None and cursor is None:
        return apply(steps, value, index, deadline_ns, NULL, NULL)
    # Releasing a view that was never acquired is allowed if it is all zero.
    memset(&lap_view, 0, sizeof(Py_buffer))
    memset(&cursor_view, 0, sizeof(Py_buffer))
    try:
        if laps is not None:
            lap_words = int64_words(laps, &lap_view, length, "laps")
        if cursor is not None:
            cursor_word = int64_words(cursor, &cursor_view, 1, "cursor")
        return apply(steps, value, index, deadline_ns, lap_words, cursor_word)
    finally:
        PyBuffer_Release(&lap_view)
        PyBuffer_Release(&cursor_view)


cdef mn_u64 *int64_words(object buffer, Py_buffer *view, Py_ssize_t words, str name) except? NULL:
    PyObject_GetBuffer(buffer, view, PyBUF_WRITABLE)
    if view.len < 8 * words:
        raise ValueError(f"{name} needs {8 * words} bytes, this buffer has {view.len}")
    return <mn_u64 *>view.buf


cdef tuple apply(
    tuple steps,
    object value,
    Py_ssize_t index,
    int64_t deadline_ns,
    mn_u64 *lap_words,
    mn_u64 *cursor_word,  # a watchdog in another process reads it
):
    cdef Py_ssize_t length = len(steps)
    cdef int64_t now_ns = 0, before_ns = 0
    if lap_words is not NULL:
        before_ns = mn_now_ns()
    while index < length:
        if cursor_word is not NULL:
            mn_store_relaxed_u64(cursor_word, index)
        value = steps[index](value)
        if deadline_ns > 0 or lap_words is not NULL:
            now_ns = mn_now_ns()
        if lap_words is not NULL:
            mn_store_relaxed_u64(lap_words + index, now_ns - before_ns)
            before_ns = now_ns
        index += 1
        if 0 < deadline_ns <= now_ns:
            break
    if cursor_word is not NULL:
        mn_store_relaxed_u64(cursor_word, index)
    return value, index
