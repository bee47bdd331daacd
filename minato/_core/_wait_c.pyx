"""Sleeping until another process says that something has changed (compiled)."""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from libc.limits cimport INT_MAX

from minato._core.atomics cimport mn_gate, mn_gate_events, mn_gate_notify, mn_gate_wait

__all__ = ["GATE_NBYTES", "Gate"]

GATE_NBYTES = sizeof(mn_gate)


@cython.final
cdef class Gate:
    """An event counter in shared memory that processes and threads can sleep on.

    Read ``events``, test your condition, then ``wait(seen)``: an event between the reading and the sleep is
    never missed. The memory must be zero at first and stay mapped for as long as the gate lives.

    Args:
        buffer: Writable memory that every party maps.
        offset: Where the gate's ``GATE_NBYTES`` start; a multiple of 8.
    """

    cdef Py_buffer view
    cdef mn_gate *gate

    def __cinit__(self, buffer, Py_ssize_t offset):
        PyObject_GetBuffer(buffer, &self.view, PyBUF_WRITABLE)
        if offset < 0 or offset % 8 or offset + <Py_ssize_t>sizeof(mn_gate) > self.view.len:
            PyBuffer_Release(&self.view)
            raise ValueError(f"offset {offset} is no place for a gate in {self.view.len} bytes")
        self.gate = <mn_gate *>(<char *>self.view.buf + offset)

    def __dealloc__(self):
        if self.gate != NULL:
            PyBuffer_Release(&self.view)

    @property
    def events(self):
        """How many events there have been, modulo 2**32."""
        return mn_gate_events(self.gate)

    @property
    def sleepers(self):
        """How many are registered as asleep; only the compiled twin registers them."""
        return self.gate.sleepers

    def notify(self, int sleepers=INT_MAX):
        """Count one event and wake up to ``sleepers`` sleepers."""
        mn_gate_notify(self.gate, sleepers)

    def wait(self, seen, double timeout_s):
        """Sleep until there has been an event since ``seen``.

        Returns:
            True if there was one; False after ``timeout_s`` seconds or a signal. The caller tests its condition
            and whether its peers live, and waits again.
        """
        cdef unsigned int count = seen
        cdef long long timeout_ns = <long long>(timeout_s * 1e9)
        cdef bint changed
        with nogil:
            changed = mn_gate_wait(self.gate, count, timeout_ns)
        return changed
