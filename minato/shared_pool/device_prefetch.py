"""Copies the batches of a rank that shares its pool to the rank's device, ahead of use."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minato._core.segment import Segment
from minato.batching.arena import Slot
from minato.batching.pinned_slots import DeviceEvent, MemoryPinner, PinnedSlots
from minato.delivery.accelerator import Accelerator
from minato.delivery.device import copy_batch
from minato.sampling.epoch import Epoch
from minato.sampling.index_batches import IndexBatches
from minato.sampling.outgoing import Outgoing
from minato.shared_pool.descriptors import BatchHandle
from minato.shared_pool.source import RankSource

__all__ = ["DevicePrefetcher", "DeviceSource"]


class DevicePrefetcher:
    """Copies batches from the shared memory of the node to one rank's device.

    Each rank pins the pages of its own mapping. A batch stays held, so that no process reuses its slot, until the
    device has passed the event recorded after its copy.

    Args:
        accelerator: The device.
        ahead: Number of batches to prefetch.
    """

    def __init__(self, accelerator: Accelerator, ahead: int) -> None:
        self.accelerator = accelerator
        self.ahead = ahead
        self._locks: weakref.WeakKeyDictionary[Segment, PinnedSlots] = weakref.WeakKeyDictionary()
        self._held: deque[tuple[DeviceEvent, Any]] = deque()
        # When the process exits, the driver ends all copies.
        weakref.finalize(self, _finish_copies, self._held, os.getpid()).atexit = False

    def unlock(self, slots: Iterable[tuple[Segment, Slot]]) -> None:
        """Unpin pages that were returned to the system: other pages have replaced them."""
        for segment, slot in slots:
            if segment in self._locks:
                self._locks[segment].unlock(slot)

    def send(self, handle: BatchHandle) -> tuple[Any, DeviceEvent]:
        """Return a batch on the device, and the event recorded after its copy.

        Raises:
            Exception: The exception of a sample of the batch, or of the copy.
        """
        while self._held and self._held[0][0].query():
            self._held.popleft()
        batch = handle.open()
        if self.accelerator.pins_memory:
            locks = self._locks.get(handle.segment)
            if locks is None:
                locks = self._locks[handle.segment] = PinnedSlots(self.accelerator, handle.segment)
            locks.lock(handle.descriptor.slot, handle.descriptor.nbytes)
        return copy_batch(
            self.accelerator, batch, keep=lambda event: self._held.append((event, batch))
        )


def _finish_copies(held: deque[tuple[DeviceEvent, Any]], owner: int) -> None:
    """Wait for copies that are still running when the prefetcher is dropped."""
    while held and owner == os.getpid():
        mark, _ = held.popleft()
        mark.synchronize()


@dataclass
class _Sent:
    """A batch on the device or its exception, and the part of the epoch that it covers."""

    portion: Any
    batch: Any = None
    mark: DeviceEvent | None = None
    error: Exception | None = None


class DeviceSource:
    """The batches of another source, on the device (see :class:`minato.delivery.iterator.BatchSource`)."""

    def __init__(self, source: RankSource, prefetcher: DevicePrefetcher) -> None:
        self._source = source
        self._prefetcher = prefetcher
        self._sent: deque[_Sent] = deque()
        self._last: Outgoing | None = None

    def begin(self, epoch: Epoch, batches: IndexBatches) -> bool:
        """Start an epoch, and drop the prefetched batches of the last one."""
        self._last = None
        self._sent.clear()
        return self._source.begin(epoch, batches)

    def next(self) -> Outgoing:
        """Return the next batch: the same one until it is given. The current stream waits for its copy."""
        last = self._last
        if last is None or last.is_given:
            self._last = last = self._next()
        return last

    def _next(self) -> Outgoing:
        sent = self._sent.popleft() if self._sent else self._send(self._source.take())
        if sent.mark is not None:
            self._prefetcher.accelerator.wait_event(sent.mark)
        while len(self._sent) < self._prefetcher.ahead and self._source.has_next:
            self._sent.append(self._send(self._source.take()))
        self._source.part.handed(sent.portion)
        return Outgoing(sent.batch, sent.error)

    def _send(self, handle: BatchHandle) -> _Sent:
        self._prefetcher.unlock(self._source.given_back())
        try:
            return _Sent(handle.portion, *self._prefetcher.send(handle))
        except Exception as error:
            return _Sent(handle.portion, error=error)

    def pinned(self, duration_ns: int) -> None:
        """Do nothing: this source pins no copies."""

    def pin_slots(self, locker: MemoryPinner) -> None:
        """Do nothing: the prefetcher pins the pages."""

    def shut_down(self) -> None:
        """Leave the epoch."""
        self._source.shut_down()
