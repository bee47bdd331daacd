"""The batches of one rank, if all ranks of its node share one pool of workers."""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from minato._core.segment import Segment
from minato._fork_safety import signals_deferred
from minato.batching.arena import DeviceEvent, MemoryPinner, PinnedSlots, Slot
from minato.batching.reader import BatchDescriptor, BatchReader, open_batch
from minato.batching.serialization import Store
from minato.delivery.device import DeviceCopier, accelerator_of
from minato.sampling.epoch import Epoch
from minato.sampling.progress import Outgoing
from minato.sampling.samplers import IndexBatches

if TYPE_CHECKING:
    from minato.shared_pool.client import PoolClient
    from minato.shared_pool.server import PoolServer


class LeasedBatch(NamedTuple):
    """A descriptor, the lease of its slot, and the part of the epoch that the batch covers."""

    descriptor: BatchDescriptor
    lease: npt.NDArray[np.uint8]
    portion: Any = None


SUPERSEDED = (
    "another iterator of this loader was made since: with workers=SharedPool(...) the ranks go through one epoch at a "
    "time"
)
"""Why the iterator of an epoch that its rank has left cannot go on."""


@dataclass(eq=False, slots=True)
class BatchHandle:
    """A batch that has arrived. It stays with the pool until the training loop has it."""

    segment: Segment  # this process's mapping of the arena
    descriptor: BatchDescriptor
    portion: Any  # the part of the epoch that the batch covers
    read: Callable[[], object] | None  # may be called again
    is_replaced: bool = False  # the rank has asked for another batch after it
    started: Any = None  # the copy to a device, as RankDevice.start returns it
    outgoing: Outgoing | None = None  # the batch, or its error

    @classmethod
    def of(cls, leased: LeasedBatch, segment: Segment, store: Store) -> BatchHandle:
        """The handle of a batch in a segment, in which a store finds its objects."""
        descriptor, lease, portion = leased
        read = functools.partial(open_batch, descriptor, segment, store, lease)
        return cls(segment, descriptor, portion, read)

    def open(self) -> Any:
        """Return the batch."""
        assert self.read is not None
        return self.read()


class DescriptorReader(BatchReader):
    """Reads batches as descriptors, which another process may open."""

    def failure(self, batch: int, slot: Slot) -> None:
        """None: the error of a batch travels in its descriptor."""

    def read(self, batch: int, slot: Slot) -> LeasedBatch:
        """Return the descriptor of the batch, or of its error, in ``slot``, with a lease of the slot."""
        descriptor = self.describe(batch, slot)
        return LeasedBatch(descriptor, self.leased(slot, descriptor.nbytes))


class RankDevice:
    """Copies batches from the shared memory of the node to one rank's device, ``ahead`` of their use.

    Each rank pins the pages of its own mapping. A batch stays held, so that no process reuses its slot, until the
    device has passed the event recorded after its copy.
    """

    def __init__(self, device: torch.device, ahead: int) -> None:
        self.ahead = ahead
        accelerator = accelerator_of(device)
        self._pinner: MemoryPinner | None = accelerator if accelerator.pins_memory else None
        self._pinned: weakref.WeakKeyDictionary[Segment, PinnedSlots] = weakref.WeakKeyDictionary()
        self._held = held = deque[tuple[object, DeviceEvent]]()
        self._copier = DeviceCopier(accelerator, lambda _, host, end: held.append((host, end)))
        # Returns the batch of a copy; work that the program queues from then on waits for that.
        self.finish = self._copier.finish
        # When the process exits, the driver ends all copies.
        weakref.finalize(self, _finish_copies, self._held, os.getpid()).atexit = False

    def unpin(self, slots: Iterable[tuple[Segment, Slot]]) -> None:
        """Unpin pages that were returned to the system: other pages have replaced them."""
        for segment, slot in slots:
            if segment in self._pinned:
                self._pinned[segment].unlock(slot)

    def start(self, handle: BatchHandle) -> Any:
        """Start to copy a batch; returns the argument of ``finish``. Raises what a sample, or the copy, raised."""
        while self._held and self._held[0][1].query():
            self._held.popleft()
        read = functools.partial(self._opened, handle)
        return self._copier.start(handle.descriptor.slot, read)

    def _opened(self, handle: BatchHandle) -> Any:
        batch = handle.open()
        if self._pinner is not None:
            if handle.segment not in self._pinned:
                self._pinned[handle.segment] = PinnedSlots(self._pinner, handle.segment)
            slots = self._pinned[handle.segment]
            slots.lock(handle.descriptor.slot, handle.descriptor.nbytes)
        return batch


def _finish_copies(held: deque[tuple[object, DeviceEvent]], owner: int) -> None:
    """Wait for copies that are still running when the device's object is dropped."""
    while held and owner == os.getpid():
        _, event = held.popleft()
        event.synchronize()


class RankSource:
    """The batches of one rank (see :class:`minato.delivery.iterator.BatchSource`), which a pool gives it.

    Args:
        join: Called with an epoch and its batches; joins the next epoch of all ranks. Returns its number in the pool,
            and whether batches that were prefetched for it were its own.
        device: Copies the batches to this rank's device; None: they stay in shared memory.
        session: Lives as long as this source, as the channel ends with it.
    """

    def __init__(
        self,
        pool: PoolServer | PoolClient,
        join: Callable[[Epoch, IndexBatches], tuple[int, bool]],
        device: RankDevice | None,
        session: object,
    ) -> None:
        self._pool, self._join, self._device, self._session = pool, join, device, session
        self._number = -1
        self._is_over = False
        self._part: Any = None
        self._handle: BatchHandle | None = None  # of the batch that next() returned last
        self._leave: Callable[[], Any] = lambda: None

    def begin(self, epoch: Epoch, batches: IndexBatches) -> bool:
        """Join the next epoch of all ranks, and drop the prefetched batches of the last one."""
        self._leave()
        self._handle, self._is_over = None, False
        self._part = epoch.progress.part
        assert self._part is not None, "the epoch was begun without a session"
        self._number, begun = self._join(epoch, batches)
        # On request, or when this source is dropped; the server handles the exit itself.
        self._leave = leave = weakref.finalize(self, self._pool.leave, self._number, epoch)
        leave.atexit = False
        return begun

    def next(self) -> Outgoing:
        """Return the next batch for this rank: the same one until it is given.

        The handler of a signal may raise at any line: the next call goes on there.
        """
        handle, part = self._handle, self._part
        if handle is not None and handle.outgoing is not None and handle.outgoing.is_given:
            part.settle()
            self._pool.drop(handle)
            self._handle = None
        if self._is_over:
            raise StopIteration
        try:
            handle = self._handle = self._pool.next(self._number)
        except Exception as error:
            if isinstance(error, StopIteration):
                part.ended()
            self._is_over = True
            self._leave()
            raise
        self._begin(handle)
        outgoing = self._outgoing(handle)
        handle.read = handle.started = None  # the batch alone holds its slot
        if self._device is not None:
            for later in self._pool.arrived(self._number)[1 : self._device.ahead + 1]:
                self._begin(later)
        outgoing.records = [functools.partial(part.handed, handle.portion, part.batches)]
        part.last = outgoing
        return outgoing

    def _begin(self, handle: BatchHandle) -> None:
        """Ask for one more batch instead, and start to copy this one; each once."""
        if not handle.is_replaced:
            self._pool.ask(self._number, handle)
        if self._device is None or handle.outgoing is not None or handle.started is not None:
            return
        with signals_deferred():
            self._device.unpin(self._pool.given_back())
        try:
            handle.started = self._device.start(handle)
        except Exception as error:
            handle.outgoing = Outgoing.of_error(error)

    def _outgoing(self, handle: BatchHandle) -> Outgoing:
        """Build the batch of a handle, once."""
        if handle.outgoing is None and self._device is not None:
            handle.outgoing = Outgoing(self._device.finish(handle.started))
        if handle.outgoing is None:
            try:
                handle.outgoing = Outgoing(handle.open())
            except Exception as error:
                handle.outgoing = Outgoing.of_error(error)
        return handle.outgoing

    def pinned(self, duration_ns: int) -> None:
        """Do nothing: times are measured for all ranks together."""

    def workers_ended(self, duration_ns: int) -> None:
        """Do nothing, as they end with the pool."""

    def pin_slots(self, locker: MemoryPinner) -> None:
        """Do nothing: torch pins the copies that a rank's consumers make; a device pins its own."""

    def stop(self) -> None:
        """Have ``next()``, in any thread, raise RuntimeError rather than wait for a batch."""
        self._pool.stop(self._number)

    def shut_down(self) -> None:
        """Leave the epoch; the workers end when all ranks have left it, unless they persist."""
        self._leave()
