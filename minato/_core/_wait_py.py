"""Words that processes share, and sleeping until another process says that something has changed (pure Python)."""

from __future__ import annotations

import ctypes
import os
import time

import numpy as np

from minato._core.limits import FUTEX_NUMBER
from minato._core.segment import Memory

__all__ = ["EVENT_COUNT_NBYTES", "EventCount", "SharedWords"]

EVENT_COUNT_NBYTES = 8

_FUTEX_WAIT, _FUTEX_WAKE_OP = 0, 5
_ADD_ONE = 1 << 28 | 1 << 12 | 0xFFF
"""FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, -1): add 1 to the word."""
_FALLBACK_SLEEP_S = 0.0005
_syscall = ctypes.CDLL(None, use_errno=True).syscall if FUTEX_NUMBER is not None else None


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class EventCount:
    """An event counter in shared memory that processes and threads can sleep on.

    Read ``events``, test your condition, then ``wait(seen)``: an event between the reading and the sleep is
    never missed. The memory must be zero at first and stay mapped for as long as the event count lives.

    Args:
        buffer: Writable memory that every party maps.
        offset: Where its ``EVENT_COUNT_NBYTES`` start; a multiple of 8.
    """

    # Python has no atomic addition. A word that is read, raised and written back can fall to a number that it had
    # before, and a thread that saw that number then sleeps through an event; so the kernel adds. Sleepers are not
    # registered here: each event pays the system call.

    def __init__(self, buffer: Memory, offset: int) -> None:
        view = memoryview(buffer)
        if view.readonly:
            raise BufferError("an event count needs memory that can be written")
        size = view.nbytes
        if offset < 0 or offset % 8 or offset + EVENT_COUNT_NBYTES > size:
            raise ValueError(f"offset {offset} is no place for an event count in {size} bytes")
        self._words = np.frombuffer(buffer, np.uint32, 2, offset)
        self._address = self._words.ctypes.data

    @property
    def events(self) -> int:
        """How many events there have been, modulo 2**32."""
        return int(self._words[0])

    @property
    def sleepers(self) -> int:
        """Number of registered sleepers; only the compiled backend registers them."""
        return int(self._words[1])

    def notify(self, sleepers: int = 2**31 - 1) -> None:
        """Count one event and wake up to ``sleepers`` sleepers."""
        if _syscall is None:
            self._words[0] = int.from_bytes(os.urandom(4), "little")  # surely another number
            return
        word = ctypes.c_void_p(self._address)
        if _syscall(FUTEX_NUMBER, word, _FUTEX_WAKE_OP, sleepers, None, word, _ADD_ONE) < 0:
            raise OSError(ctypes.get_errno(), "the kernel did not count an event")

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Sleep until there has been an event since ``seen``.

        Returns:
            True if there was one; False after ``timeout_s`` seconds or a signal. The caller tests its condition
            and whether its peers live, and waits again.
        """
        if self.events != seen:
            return True
        if _syscall is not None:
            whole = int(timeout_s)
            limit = _Timespec(whole, int((timeout_s - whole) * 1e9))
            _syscall(
                FUTEX_NUMBER,
                ctypes.c_void_p(self._address),
                _FUTEX_WAIT,
                ctypes.c_uint32(seen),
                ctypes.byref(limit),
                None,
                0,
            )
        else:
            deadline = time.monotonic() + timeout_s
            while self.events == seen and time.monotonic() < deadline:
                time.sleep(_FALLBACK_SLEEP_S)
        return self.events != seen


class SharedWords:
    """Signed 64-bit words in shared memory, whose loads and stores all processes see in one order.

    So of two processes that each store a word and then load the other's, at least one sees what the other stored. Each
    word has one writer; there is no atomic addition.

    Args:
        buffer: Writable memory that every party maps.
        offset: Where the ``nbytes(count)`` start; a multiple of 8. Zeros there are words of zero.
        count: How many words.
    """

    # Python cannot order a store before a load. The kernel can: it adds to the word that is not handed out.

    @staticmethod
    def nbytes(count: int) -> int:
        """Bytes of ``count`` words and of eight more, which the pure backend uses."""
        return 8 * (count + 1)

    def __init__(self, buffer: Memory, offset: int, count: int) -> None:
        size = memoryview(buffer).nbytes
        if count < 0 or offset < 0 or offset % 8 or offset + 8 * (count + 1) > size:
            raise ValueError(f"{count} words at offset {offset} do not fit {size} bytes")
        self._fence = EventCount(buffer, offset)
        start = offset + EVENT_COUNT_NBYTES
        self._words = memoryview(buffer).cast("B")[start : start + 8 * count].cast("q")

    def load(self, index: int) -> int:
        """The word at ``index``."""
        self._check(index)
        return self._words[index]

    def store(self, index: int, value: int) -> None:
        """Store a word, of which the caller is the one writer."""
        self._check(index)
        self._words[index] = value
        self._fence.notify(0)

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self._words):
            raise IndexError(f"word {index} is not one of {len(self._words)}")
