"""Slots of shared memory in which batches are built, handed out and recycled."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from minato._core.limits import address_space_advice
from minato._core.segment import Segment
from minato.batching.pinned_slots import MemoryPinner, PinnedSlots, Slot

__all__ = ["Arena", "ArenaCache", "Slot"]

_RESERVE_BYTES = 1 << 42
"""Address space of a process's first arena, of 128 TiB in 47 bits. It takes no memory."""
_LEAST_RESERVE_BYTES = 1 << 28
_SHARING_SEGMENTS = 4
"""With so many living segments, two of each iterator, a further arena takes half of that, with twice as many a third,
and so on: those of a thousand iterators then take 50 TiB, which leaves as much to the rest of the program."""
_ROOMY_SLOTS = 128
"""So many slots share half of the arena before any batch was seen; later ones get what the batches suggest."""
_ROOMY_SHARE = 11
"""Slot k of these (from 0) gets the arena's size divided by this and by k + 1, for it is used while k other batches
are alive, and all of them share the machine's memory; 11 is twice the sum of 1 / (k + 1)."""
_LEAST_SLOT_BYTES = 1 << 21
_HEADROOM = 8
"""A later slot has room for a batch so many times the largest one seen."""
_SPARE_SLOTS = 4
"""So many free slots beyond the number in flight keep their pages."""
_FADING = 0.95
"""How the number that was in flight fades with each batch: at the end of an epoch it falls, and rises again."""


class _Lease(weakref.ref[Any]):
    """Of a slot, by the view of it that was handed out.

    Attributes:
        slot: The slot.
        used_bytes: How much of it was written.
    """

    slot: Slot
    used_bytes: int
    __slots__ = ("slot", "used_bytes")


class Arena:
    """Recycles slots, so that batches are written to pages that are already warm.

    A slot is free again when its batch is abandoned, or when the last tensor that views the delivered batch is
    garbage-collected. If the user keeps batches, new slots are made; nobody ever waits for one.

    Args:
        segment: Memory to carve up; by default a fresh sparse one.
        shared: Whether other processes shall write to it.

    Attributes:
        shared: Whether they do.
        owner: The process that may hand out its slots. A forked child that did so, too, would write to the same memory.
        locks: Keeps the pages of delivered slots in place for a device; None: nobody needs that.
        given_back: Free slots whose pages were given back, for other processes that may have them locked: whoever tells
            these takes them out. None: there are none.
    """

    def __init__(self, segment: Segment | None = None, shared: bool = True) -> None:
        self.segment = segment or Segment(_reserve_bytes(), _LEAST_RESERVE_BYTES, shared)
        self.shared = self.segment.descriptor >= 0
        self.owner = os.getpid()
        self._used = mmap.PAGESIZE  # no slot starts at offset 0, which means "nothing"
        self._largest = 0
        self._warm: deque[Slot] = deque()
        self._cold: deque[Slot] = deque()
        self._taken: set[Slot] = set()  # neither free nor leased
        self._leases: dict[int, _Lease] = {}  # by the slot's start
        self._ended: deque[_Lease] = deque()  # whose slots are to be freed
        self._needed = 0.0
        self.num_slots = 0
        self.locks: PinnedSlots | None = None
        self.given_back: list[Slot] | None = None

    @property
    def num_leased(self) -> int:
        """Slots whose batches are still alive in the user's hands."""
        return len(self._leases) - len(self._ended)

    def acquire(self) -> Slot:
        """Take a free slot, the most recently used one if there is a choice.

        Raises:
            MemoryError: The address space is used up.
        """
        self._settle()
        if self.locks is not None:
            for slot, used_bytes in self.locks.recycled():
                self._free(slot, used_bytes)
        free = self._warm or self._cold
        slot = free.pop() if free else self._carve()
        self._taken.add(slot)
        return slot

    def _carve(self) -> Slot:
        if self.num_slots < _ROOMY_SLOTS:
            wanted = self.segment.nbytes // (_ROOMY_SHARE * (self.num_slots + 1))
            nbytes = max(wanted // mmap.PAGESIZE * mmap.PAGESIZE, _LEAST_SLOT_BYTES)
        else:
            wanted = _HEADROOM * max(self._largest, _LEAST_SLOT_BYTES)
            nbytes = 1 << (wanted - 1).bit_length()
        start, end = self._used, self._used + nbytes
        if end > self.segment.nbytes:
            raise MemoryError(
                f"{self.num_slots} batches are alive and use up the {self.segment.nbytes} bytes of address space that "
                f"this iterator has: drop some{address_space_advice()}"
            )
        self._used = end
        self.num_slots += 1
        return Slot(start, end)

    def release(self, slot: Slot, used_bytes: int = 0) -> None:
        """Give a slot back that was not leased, unless all were taken back; ``used_bytes`` of it were written."""
        if slot in self._taken:
            self._taken.remove(slot)
            self._free(slot, used_bytes)

    def _free(self, slot: Slot, used_bytes: int) -> None:
        self._largest = max(self._largest, used_bytes)
        self._warm.append(slot)

    def reclaim_unleased(self) -> None:
        """Give all slots back that are neither free nor leased: nobody writes to them any more, or ever reads them."""
        for slot in list(self._taken):
            self.release(slot)

    def lease(self, slot: Slot, used_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A view of the slot, shape (bytes,), uint8; once it and all made from it are gone, the slot is free.

        With ``locks`` it is free when the device has read it, too.
        """
        view = self.segment.array[slot.start : slot.end]
        # Without Python code, as that is where the handler of a signal runs, and in the callback of a reference what it
        # raises would be lost.
        callback: Callable[[_Lease], object] = self._ended.append
        if self.locks is not None:
            self.locks.lock(slot, used_bytes)
            callback = self._returned
        lease = _Lease(view, callback)
        lease.slot, lease.used_bytes = slot, used_bytes
        self._taken.discard(slot)
        self._leases[slot.start] = lease
        return view

    def _returned(self, lease: _Lease) -> None:
        # At once: what the device has still to do, it has been told by now.
        if self._leases.pop(lease.slot.start, None) is not None and self.locks is not None:
            self.locks.returned(lease.slot, lease.used_bytes)

    def _settle(self) -> None:
        """Free the slots whose leases have ended."""
        while self._ended:
            lease = self._ended.popleft()
            if self.locks is not None:
                self._returned(lease)
            elif self._leases.pop(lease.slot.start, None) is not None:
                self._free(lease.slot, lease.used_bytes)

    def pin_slots(self, locker: MemoryPinner) -> None:
        """Lock the pages of slots from now on, if they are not locked already."""
        if self.locks is None:
            self.locks = PinnedSlots(locker, self.segment)

    def trim(self, in_flight: int) -> None:
        """Give pages back to the system: of half of the free slots that are more than were in flight of late.

        To be called once per batch, so that what a program held for a while is back a few batches after it let go.
        """
        self._settle()
        self._needed = max(in_flight, _FADING * self._needed)
        surplus = len(self._warm) - int(self._needed) - _SPARE_SLOTS
        written = -(-self._largest // mmap.PAGESIZE) * mmap.PAGESIZE
        for _ in range((surplus + 1) // 2):
            slot = self._warm.popleft()
            if self.locks is not None:
                self.locks.unlock(slot)  # else the device would go on reading the pages given back
            self.segment.discard(slot.start, min(slot.end, slot.start + written))
            self._cold.append(slot)
            if self.given_back is not None:
                self.given_back.append(slot)


def _reserve_bytes() -> int:
    """Address space of a new arena, a power of two."""
    nbytes = _RESERVE_BYTES * _SHARING_SEGMENTS // (_SHARING_SEGMENTS + Segment.num_living())
    return max(1 << (nbytes.bit_length() - 1), _LEAST_RESERVE_BYTES)


class ArenaCache(list[Arena]):
    """Arenas of iterators that are gone, whose pages are warm."""

    def take(self, shared: bool) -> Arena:
        """One of this process's own, or a new one.

        Args:
            shared: Whether worker processes write to it.
        """
        while self:
            arena = self.pop()
            if (arena.shared, arena.owner) == (shared, os.getpid()):
                return arena
        return Arena(shared=shared)
