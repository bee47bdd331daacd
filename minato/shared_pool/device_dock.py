"""Batches of a rank that shares its pool, on their way to that rank's own device."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from minato._core.segment import Segment
from minato.batching.arena import Slot
from minato.batching.page_locks import Mark, PageLocker, PageLocks
from minato.delivery.device import leaves_moved
from minato.delivery.device_copy import Accelerator
from minato.sampling.epoch import Epoch
from minato.shared_pool.descriptors import Shipment
from minato.shared_pool.source import RankSource

__all__ = ["Dock", "DockedSource"]


class Dock:
    """Sends batches from the memory of all ranks of the node to the device of one, and holds them until they are there.

    Each rank locks the pages of its own mapping of that memory. A batch that is held is not told to be dropped, so that
    nobody writes to its slot, whichever process that is; it is let go when the device has passed the event behind its
    copy.

    Args:
        accelerator: The device.
        ahead: How many batches are sent before their turn.
    """

    def __init__(self, accelerator: Accelerator, ahead: int) -> None:
        self.accelerator = accelerator
        self.ahead = ahead
        self._locks: weakref.WeakKeyDictionary[Segment, PageLocks] = weakref.WeakKeyDictionary()
        self._held: deque[tuple[Mark, Any]] = deque()
        # At the end of the process the device stops reading by itself.
        weakref.finalize(self, _let_go, self._held, os.getpid()).atexit = False

    def unlock(self, slots: Iterable[tuple[Segment, Slot]]) -> None:
        """Let go of pages that are of no use: others have taken their place in the same memory."""
        for segment, slot in slots:
            if segment in self._locks:
                self._locks[segment].unlock(slot)

    def send(self, shipment: Shipment) -> tuple[Any, Mark]:
        """A batch on the device, and the mark behind its copy.

        Raises:
            Exception: What the batch's samples raised, or its copying.
        """
        while self._held and self._held[0][0].query():
            self._held.popleft()
        batch = shipment.open()
        if self.accelerator.locks_pages:
            locks = self._locks.get(shipment.segment)
            if locks is None:
                locks = self._locks[shipment.segment] = PageLocks(
                    self.accelerator, shipment.segment
                )
            locks.lock(shipment.parcel.slot, shipment.parcel.nbytes)
        with self.accelerator.copying():
            try:
                sent = leaves_moved(batch, self.accelerator.copy)
            finally:
                mark = self.accelerator.mark()
                self._held.append((mark, batch))
        return sent, mark


def _let_go(held: deque[tuple[Mark, Any]], owner: int) -> None:
    """End of the dock: the device may still be reading."""
    while held and owner == os.getpid():
        mark, _ = held.popleft()
        mark.synchronize()


@dataclass
class _Sent:
    """A batch on the device, or what came of the attempt instead; and what is in it, for the account of this rank."""

    portion: Any
    batch: Any = None
    mark: Mark | None = None
    error: Exception | None = None


class DockedSource:
    """Gives the batches of another source on the device (see :class:`minato.delivery.iterator.BatchSource`)."""

    def __init__(self, source: RankSource, dock: Dock) -> None:
        self._source = source
        self._dock = dock
        self._sent: deque[_Sent] = deque()

    def begin(self, epoch: Epoch, batches: Iterator[list[Any]]) -> bool:
        """Start an epoch; batches of the last one that were sent ahead are dropped."""
        self._sent.clear()
        return self._source.begin(epoch, batches)

    def next(self) -> Any:
        """The next batch; what the program asks of the device from now on waits for its copy."""
        sent = self._sent.popleft() if self._sent else self._send(self._source.take())
        if sent.mark is not None:
            self._dock.accelerator.wait(sent.mark)
        while len(self._sent) < self._dock.ahead and self._source.has_next:
            self._sent.append(self._send(self._source.take()))
        self._source.part.handed(sent.portion)
        if sent.error is not None:
            try:
                raise sent.error
            finally:
                sent.error = None  # it knows this frame, and would keep the source
        return sent.batch

    def _send(self, shipment: Shipment) -> _Sent:
        self._dock.unlock(self._source.given_back())
        try:
            return _Sent(shipment.portion, *self._dock.send(shipment))
        except Exception as error:
            return _Sent(shipment.portion, error=error)

    def pinned(self, duration_ns: int) -> None:
        """Nothing is pinned."""

    def lock_pages(self, locker: PageLocker) -> None:
        """They are."""

    def shut_down(self) -> None:
        """Leave the pass."""
        self._source.shut_down()
