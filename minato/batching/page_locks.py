"""Slots whose pages stay in place, so that a device can read them by itself, and when it has."""

from __future__ import annotations

import mmap
import os
import warnings
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from minato._core.segment import Segment
from minato.errors import MinatoWarning

__all__ = ["Mark", "PageLocker", "PageLocks", "Slot"]

_GROWTH = 1.5
"""A slot that was locked for too short a batch is locked anew for one so many times longer, at least."""


class Slot(NamedTuple):
    """A range of the arena, [start, end) in bytes, that one batch uses at a time."""

    start: int
    end: int


class Mark(Protocol):
    """A point in what a device has been told to do (a CUDA event)."""

    def query(self) -> bool:
        """Whether the device has come so far."""

    def synchronize(self) -> None:
        """Wait until it has."""


class PageLocker(Protocol):
    """What locking needs of a device."""

    def lock(self, address: int, nbytes: int) -> None:
        """Keep pages where they are; raises OSError if that cannot be."""

    def unlock(self, address: int) -> None:
        """Let go of what was locked at this address."""

    def mark(self) -> Mark:
        """The point behind all that has been asked of the device up to now."""


class PageLocks:
    """Locks the slots of an arena, each when its first batch is delivered, and says when they are free again.

    A slot is locked as a whole as far as batches reach: what lies in two locked ranges cannot be copied at once. All
    is unlocked when the last view of the memory is gone.

    Args:
        locker: The device.
        segment: The arena's memory.
    """

    def __init__(self, locker: PageLocker, segment: Segment) -> None:
        self._locker = locker
        self._address = segment.address
        self._owner = os.getpid()
        self._locked: dict[int, int] = {}  # bytes, by the slot's start
        self._marks: dict[int, Mark] = {}  # of leased slots, by their start
        self._returned: deque[tuple[Mark, Slot, int]] = deque()
        self._works = True
        # The system does it when the process ends.
        segment.before_unmapping(
            _unlock_all, locker, segment.address, self._locked, self._returned, self._owner
        )

    def lock(self, slot: Slot, nbytes: int) -> None:
        """Lock the first bytes of a slot that nobody reads at present.

        Where that fails, one warning says so, and nothing is locked from then on.
        """
        locked = self._locked.get(slot.start, 0)
        if nbytes <= locked or not self._works:
            return
        self.unlock(slot)
        pages = -(-max(nbytes, int(_GROWTH * locked)) // mmap.PAGESIZE)
        nbytes = min(pages * mmap.PAGESIZE, slot.end - slot.start)
        try:
            self._locker.lock(self._address + slot.start, nbytes)
        except OSError as error:
            self._works = False
            warnings.warn(
                f"the memory of batches cannot be page-locked ({error}): as with torch, each batch is copied to "
                "page-locked memory on its way to the device",
                MinatoWarning,
                stacklevel=2,
            )
        else:
            self._locked[slot.start] = nbytes

    def unlock(self, slot: Slot) -> None:
        """Let go of a free slot, whose pages are given back or locked anew."""
        if self._locked.pop(slot.start, 0):
            self._locker.unlock(self._address + slot.start)

    def read_until(self, slot: Slot, mark: Mark) -> None:
        """Say that the device reads a leased slot until it passes this mark, and nobody else has it."""
        self._marks[slot.start] = mark

    def returned(self, slot: Slot, used_bytes: int) -> None:
        """Take a slot whose last view is gone; the device may still have to read it."""
        mark = self._marks.pop(slot.start, None)
        if self._owner == os.getpid():  # a forked child must not talk to the device
            self._returned.append((mark or self._locker.mark(), slot, used_bytes))

    def recycled(self) -> Iterator[tuple[Slot, int]]:
        """``(slot, used_bytes)`` of those that the device has read; each comes once."""
        for _ in range(len(self._returned)):
            mark, slot, used_bytes = self._returned.popleft()
            if mark.query():
                yield slot, used_bytes
            else:
                self._returned.append((mark, slot, used_bytes))


def _unlock_all(
    locker: PageLocker,
    address: int,
    locked: dict[int, int],
    returned: deque[tuple[Mark, Slot, int]],
    owner: int,
) -> None:
    """End of the memory: nobody has a view of it, but the device may still be reading."""
    if locked and owner == os.getpid():
        for mark in (*(mark for mark, _, _ in returned), locker.mark()):
            mark.synchronize()
        for start in locked:
            locker.unlock(address + start)
