"""Slots of shared memory: batches are built in them, view them, and leave them to later ones; pinned for a device."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from minato._core import now_ns
from minato._core.limits import address_space_advice
from minato._core.segment import Segment
from minato._fork_safety import Loans, check_owner, this_process
from minato.errors import warn

_RESERVE_BYTES = 1 << 42
"""Address space of the first arena of a process, which has 128 TiB. Address space takes no memory."""
_LEAST_RESERVE_BYTES = 1 << 28
_SHARING_SEGMENTS = 4
"""With this number of living segments, two for each iterator, a further arena takes half of that, with twice the number
a third, and so on. The arenas of a thousand iterators take 50 TiB, and leave as much to the rest of the program."""
_SHARE = 13
"""Slot k (from 0) gets the arena's size divided by this and by k + 1: it is used while k other batches are alive, and
all share the machine's memory. Of 4 TiB, 160,000 slots get more than the least size, and there is room for all."""
_LEAST_SLOT_BYTES = 1 << 21
_HEADROOM = 2  # the least size of a slot, in multiples of the largest batch seen
_SPARE_SLOTS = 4  # free slots that keep their pages, beyond the number in flight
_KEPT_BYTES = 1 << 22
"""Free slots that take less than this together keep their pages: to give them back costs more than they do."""
_FADING = 0.999
"""Decay of the number in flight with each batch. It falls at the end of an epoch and rises again at once: pages that go
back in between cost more than the batches (a page fault for each 4 KiB, and pinning)."""

_GROWTH = 1.5
"""A slot that was pinned for a smaller batch is pinned again for at least this multiple of its pinned size."""


class Slot(NamedTuple):
    """A range of the arena, [start, end) in bytes, for one batch at a time."""

    start: int
    end: int


class _Lease(weakref.ref[Any]):
    """A weak reference to the view of a leased slot."""

    slot: Slot
    __slots__ = ("slot",)


@dataclass
class DeviceTimes:
    """What the training process has spent on a device, in ns: pinning slots, and queueing copies from them."""

    pinning_ns: int = 0
    queueing_ns: int = 0


class Arena:
    """Recycles slots, so that batches are written to pages that are already in memory.

    The life of a slot: :meth:`acquire` takes a free one for a batch. :meth:`lease` makes the view that the tensors of
    the delivered batch share; when the last of them is garbage-collected, the slot is free again. :meth:`release` frees
    the slot of a batch that is not delivered. With ``pinned_slots``, a slot is free after the device has read it, too.
    A program that keeps batches makes the arena grow: no batch waits for a slot. A slot that the program holds when it
    forks is not recycled as long as the child lives.

    It divides a ``segment``, by default a new sparse one, to which other processes write if it is ``shared``.

    Attributes:
        owner: The process that acquires slots. A forked child that did so too would write to the same memory.
        pinned_slots: Pins delivered slots for a device; None without one.
        given_back: Free slots whose pages went back to the system, for processes that may have pinned them. The shared
            pool takes them out. None: no other process maps the arena.
    """

    def __init__(self, segment: Segment | None = None, shared: bool = True) -> None:
        self.segment = segment or Segment(_reserve_bytes(), _LEAST_RESERVE_BYTES, shared)
        self.shared = self.segment.descriptor >= 0
        self.owner = os.getpid()
        self._used = mmap.PAGESIZE  # offset 0 means "none" in the ledger
        self._largest = 0
        self._warm: deque[Slot] = deque()
        self._cold: deque[Slot] = deque()
        self._taken: set[Slot] = set()  # neither free nor leased
        self._leases: dict[int, _Lease] = {}  # by the slot's start
        self._ended: deque[_Lease] = deque()  # their slots are not free yet
        self._loans = Loans(self._leases if self.shared else {})
        self._needed = 0.0
        self.num_slots = 0
        self.pinned_slots: PinnedSlots | None = None
        self.device_times = DeviceTimes()
        self.given_back: list[Slot] | None = None

    @property
    def num_leased(self) -> int:
        """Number of slots that tensors of the program or of its forked children view."""
        self._loans.settle()
        return len(self._leases) - len(self._ended)

    def acquire(self) -> Slot:
        """Take a free slot, the most recently used one; MemoryError: the address space is used up.

        RuntimeError: this is a forked child, whose parent acquires the same.
        """
        if self.shared and self.owner != this_process.pid:
            check_owner(self.owner)
        if self._ended or not self._warm:
            self._settle()
        if self.pinned_slots is not None:
            self._warm.extend(self.pinned_slots.recycled())
        free = self._warm or self._cold
        slot = free.pop() if free else self._carve()
        self._taken.add(slot)
        return slot

    def _carve(self) -> Slot:
        share = self.segment.nbytes // (_SHARE * (self.num_slots + 1))
        wanted = max(share, _HEADROOM * self._largest, _LEAST_SLOT_BYTES)
        nbytes = wanted // mmap.PAGESIZE * mmap.PAGESIZE
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
        """Free an acquired slot, of which ``used_bytes`` were written, unless it is leased or free already."""
        if slot in self._taken:
            self._taken.remove(slot)
            if slot.start not in self._leases:
                self._largest = max(self._largest, used_bytes)
                self._warm.append(slot)

    def reclaim_unleased(self) -> None:
        """Free all slots that are neither free nor leased, when no process writes to or reads them any more."""
        for slot in list(self._taken):
            self.release(slot)

    def view(self, slot: Slot) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a view of the slot for ``lease``, shape (bytes,), uint8."""
        return self.segment.array[slot.start : slot.end]

    def lease(
        self, slot: Slot, used_bytes: int, view: np.ndarray | None = None
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a view of the slot, shape (bytes,), uint8. The slot is free when it and all views of it are gone.

        With ``pinned_slots``, the slot is pinned first, and free only when the device has read it, too. While a given
        ``view`` lives, further calls with it change nothing.
        """
        view = self.view(slot) if view is None else view
        if slot.start not in self._leases:
            # A callback without Python code: a signal handler could run in that, and its exception would be lost.
            callback: Callable[[_Lease], object] = self._ended.append
            if self.pinned_slots is not None:
                self.pinned_slots.lock(slot, used_bytes)
                callback = self._returned
            lease = _Lease(view, callback)
            lease.slot = slot
            self._leases[slot.start] = lease
            self._largest = max(self._largest, used_bytes)
        self._taken.discard(slot)
        return view

    def _returned(self, lease: _Lease) -> None:
        # At once, while the work that reads the slot is already queued on the device.
        if self._ends(lease) and self.pinned_slots is not None:
            self.pinned_slots.returned(lease.slot)

    def _ends(self, lease: _Lease) -> bool:
        """Forget a lease; False if it is none: ``lease`` was interrupted, and called again."""
        if not hasattr(lease, "slot") or self._leases.get(lease.slot.start) is not lease:
            return False
        del self._leases[lease.slot.start]
        return True

    def _settle(self) -> None:
        self._loans.settle()
        while self._ended:
            lease = self._ended.popleft()
            if self.pinned_slots is not None:
                self._returned(lease)
            elif self._ends(lease):
                self._warm.append(lease.slot)

    def pin_slots(self, pinner: MemoryPinner) -> None:
        """Pin slots from now on, if they are not pinned already."""
        if self.pinned_slots is None:
            self.pinned_slots = PinnedSlots(pinner, self.segment, self.device_times)

    def trim(self, in_flight: int) -> None:
        """Return pages to the system, once per batch: of half of the free slots beyond the recent number in flight."""
        self._settle()
        self._needed = max(in_flight, _FADING * self._needed)
        surplus = len(self._warm) - int(self._needed) - _SPARE_SLOTS
        written = -(-self._largest // mmap.PAGESIZE) * mmap.PAGESIZE
        if len(self._warm) * written <= _KEPT_BYTES:
            return
        for _ in range((surplus + 1) // 2):
            slot = self._warm.popleft()
            if self.pinned_slots is not None:
                self.pinned_slots.unlock(slot)  # else the device keeps the pages
            self.segment.discard(slot.start, min(slot.end, slot.start + written))
            self._cold.append(slot)
            if self.given_back is not None:
                self.given_back.append(slot)


def _reserve_bytes() -> int:
    """Address space of a new arena, a power of two."""
    nbytes = _RESERVE_BYTES * _SHARING_SEGMENTS // (_SHARING_SEGMENTS + Segment.num_living())
    return max(1 << (nbytes.bit_length() - 1), _LEAST_RESERVE_BYTES)


class ArenaCache(list[Arena]):
    """Arenas of earlier iterators, whose pages are in memory."""

    def take(self, shared: bool) -> Arena:
        """Return an arena of this process, or a new one; ``shared``: worker processes write to it."""
        while self:
            arena = self.pop()
            if (arena.shared, arena.owner) == (shared, os.getpid()):
                return arena
        return Arena(shared=shared)


# ---- for a device ----


class DeviceEvent(Protocol):
    """A point in the queue of a device, such as a CUDA event."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""


class MemoryPinner(Protocol):
    """Pins host memory for a device."""

    def lock(self, address: int, nbytes: int) -> None:
        """Pin pages; raises OSError if the system refuses."""

    def unlock(self, address: int) -> None:
        """Unpin the pages that were pinned at this address."""

    def record_event(self) -> DeviceEvent:
        """Return an event after all work that the device has been given so far."""


class PinnedSlots:
    """Pins the slots of an arena, and holds them back while the device reads them.

    The life of a slot: :meth:`lock` pins it when its batch is delivered. :meth:`in_use_until` names the event after the
    copies from it; without one, an event is recorded when the last view is gone. Then :meth:`returned` takes the slot,
    and :meth:`recycled` yields it once the device has passed the event. All slots are unpinned before the memory is
    unmapped, which waits for all events.

    Each slot is pinned as one range, as no copy can read two ranges at once.
    """

    def __init__(
        self, pinner: MemoryPinner, segment: Segment, times: DeviceTimes | None = None
    ) -> None:
        self._pinner = pinner
        self._times = times or DeviceTimes()
        self._address = address = segment.address
        self._owner = owner = os.getpid()
        self._pinned = pinned = dict[int, int]()  # bytes, by the slot's start
        self._events: dict[int, DeviceEvent] = {}  # of leased slots, by their start
        # Without a view; the device may still read them until the event.
        self._returned = returned = deque[tuple[DeviceEvent, Slot]]()
        self._works = True

        def unlock_all() -> None:  # must not refer to this object
            if pinned and owner == os.getpid():
                for event in (*(event for event, _ in returned), pinner.record_event()):
                    event.synchronize()
                for start in pinned:
                    pinner.unlock(address + start)

        # Not at the end of the process, where the system unpins.
        segment.before_unmapping(unlock_all)

    def lock(self, slot: Slot, nbytes: int) -> None:
        """Pin the first bytes of a slot that the device does not read; after a failure it warns, and pins none."""
        pinned = self._pinned.get(slot.start, 0)
        if nbytes <= pinned or not self._works:
            return
        began_ns = now_ns()
        self.unlock(slot)
        pages = -(-max(nbytes, int(_GROWTH * pinned)) // mmap.PAGESIZE)
        nbytes = min(pages * mmap.PAGESIZE, slot.end - slot.start)
        try:
            self._pinner.lock(self._address + slot.start, nbytes)
        except OSError as error:
            self._works = False
            warn(
                f"the memory of batches cannot be pinned ({error}): as with torch, each batch is copied to "
                "pinned memory on its way to the device"
            )
        else:
            self._pinned[slot.start] = nbytes
        self._times.pinning_ns += now_ns() - began_ns

    def unlock(self, slot: Slot) -> None:
        """Unpin a free slot, before its pages are returned to the system or pinned again."""
        if self._pinned.pop(slot.start, 0):
            self._pinner.unlock(self._address + slot.start)

    def in_use_until(self, slot: Slot, event: DeviceEvent) -> None:
        """Set the event until which the device reads a leased slot. The program must not copy from it."""
        self._events[slot.start] = event

    def returned(self, slot: Slot) -> None:
        """Take a slot whose last view is gone; the device may still read it."""
        event = self._events.pop(slot.start, None)
        if self._owner == os.getpid():  # a forked child must not use the device
            self._returned.append((event or self._pinner.record_event(), slot))

    def recycled(self) -> Iterator[Slot]:
        """Yield the slots that the device has read; each comes once."""
        for _ in range(len(self._returned)):
            event, slot = self._returned.popleft()
            if event.query():
                yield slot
            else:
                self._returned.append((event, slot))
