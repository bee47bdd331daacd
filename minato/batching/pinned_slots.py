"""Slots that are pinned for a device, and the events after which they are free."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from minato._core.segment import Segment
from minato.errors import warn

__all__ = ["DeviceEvent", "MemoryPinner", "PinnedSlots", "Slot"]

_GROWTH = 1.5
"""A slot that was pinned for a smaller batch is pinned again for at least this multiple of its pinned size."""


class Slot(NamedTuple):
    """A range of the arena, [start, end) in bytes, for one batch at a time."""

    start: int
    end: int


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


class _ReturnedSlot(NamedTuple):
    """A slot without a view, which the device may still read until an event."""

    event: DeviceEvent
    slot: Slot
    used_bytes: int


class PinnedSlots:
    """Pins the slots of an arena, and holds them back while the device reads them.

    The life of a slot: :meth:`lock` pins it when its batch is delivered. :meth:`in_use_until` names the event after the
    copies from it; without one, an event is recorded when the last view is gone. Then :meth:`returned` takes the slot,
    and :meth:`recycled` yields it once the device has passed the event. All slots are unpinned before the memory is
    unmapped, which waits for all events.

    Each slot is pinned as one range, as no copy can read two ranges at once.

    Args:
        pinner: Pins memory for the device.
        segment: The arena's memory.
    """

    def __init__(self, pinner: MemoryPinner, segment: Segment) -> None:
        self._pinner = pinner
        self._address = segment.address
        self._owner = os.getpid()
        self._pinned: dict[int, int] = {}  # bytes, by the slot's start
        self._events: dict[int, DeviceEvent] = {}  # of leased slots, by their start
        self._returned: deque[_ReturnedSlot] = deque()
        self._works = True
        # Not at the end of the process, where the system unpins.
        segment.before_unmapping(
            _unlock_all, pinner, segment.address, self._pinned, self._returned, self._owner
        )

    def lock(self, slot: Slot, nbytes: int) -> None:
        """Pin the first bytes of a slot that the device does not read.

        If that fails, it warns once, and no slot is pinned from then on.
        """
        pinned = self._pinned.get(slot.start, 0)
        if nbytes <= pinned or not self._works:
            return
        self.unlock(slot)
        pages = -(-max(nbytes, int(_GROWTH * pinned)) // mmap.PAGESIZE)
        nbytes = min(pages * mmap.PAGESIZE, slot.end - slot.start)
        try:
            self._pinner.lock(self._address + slot.start, nbytes)
        except OSError as error:
            self._works = False
            warn(
                f"the memory of batches cannot be pinned ({error}): as with torch, each batch is copied to "
                "pinned memory on its way to the device",
                stacklevel=2,
            )
        else:
            self._pinned[slot.start] = nbytes

    def unlock(self, slot: Slot) -> None:
        """Unpin a free slot, before its pages are returned to the system or pinned again."""
        if self._pinned.pop(slot.start, 0):
            self._pinner.unlock(self._address + slot.start)

    def in_use_until(self, slot: Slot, event: DeviceEvent) -> None:
        """Set the event until which the device reads a leased slot. The program must not copy from it."""
        self._events[slot.start] = event

    def returned(self, slot: Slot, used_bytes: int) -> None:
        """Take a slot whose last view is gone; the device may still read it."""
        event = self._events.pop(slot.start, None)
        if self._owner == os.getpid():  # a forked child must not use the device
            event = event or self._pinner.record_event()
            self._returned.append(_ReturnedSlot(event, slot, used_bytes))

    def recycled(self) -> Iterator[tuple[Slot, int]]:
        """Yield ``(slot, used_bytes)`` of slots that the device has read; each comes once."""
        for _ in range(len(self._returned)):
            returned = self._returned.popleft()
            if returned.event.query():
                yield returned.slot, returned.used_bytes
            else:
                self._returned.append(returned)


def _unlock_all(
    pinner: MemoryPinner,
    address: int,
    pinned: dict[int, int],
    returned: deque[_ReturnedSlot],
    owner: int,
) -> None:
    """Unpin all slots of a segment without views, once the device has read them."""
    if pinned and owner == os.getpid():
        for event in (*(each.event for each in returned), pinner.record_event()):
            event.synchronize()
        for start in pinned:
            pinner.unlock(address + start)
