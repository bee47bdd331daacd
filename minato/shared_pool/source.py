"""The batches of one rank, if all ranks of its node share one pool of workers."""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from minato._core.codes import ERROR_BLOB, FAILED, KIND_MASK, SAMPLE_BLOB, TEXT_BLOB, TEXTS
from minato._core.segment import Segment
from minato.batching.arena import DeviceEvent, MemoryPinner, PinnedSlots, Slot
from minato.batching.blobs import raise_sample_error, slot_overflow_error
from minato.batching.layout import read_layout
from minato.batching.reader import BatchReader, check_texts
from minato.batching.serialization import Store
from minato.delivery.device import DeviceCopier, accelerator_of
from minato.sampling.epoch import Epoch
from minato.sampling.progress import Outgoing
from minato.sampling.samplers import IndexBatches
from minato.shared_pool.channel import BatchDescriptor

if TYPE_CHECKING:
    from minato.shared_pool.client import PoolClient
    from minato.shared_pool.server import PoolServer

__all__ = [
    "BatchHandle",
    "DescriptorReader",
    "LeasedBatch",
    "RankDevice",
    "RankSource",
    "open_batch",
]


class LeasedBatch(NamedTuple):
    """A descriptor, the lease of its slot, and the part of the epoch that the batch covers."""

    descriptor: BatchDescriptor
    lease: npt.NDArray[np.uint8]
    portion: Any = None


class BatchHandle(NamedTuple):
    """A received batch that is not built yet.

    Attributes:
        segment: This process's mapping of the arena.
        portion: The part of the epoch that the batch covers.
        open: Returns the batch (see :func:`open_batch`). Must be called once, so that the slot becomes free again.
    """

    segment: Segment
    descriptor: BatchDescriptor
    portion: Any
    open: Callable[[], Any]


class DescriptorReader(BatchReader):
    """Reads batches as descriptors, which another process may open."""

    def failure(self, batch: int, slot: Slot) -> None:
        """None: the error of a batch travels in its descriptor."""

    def read(self, batch: int, slot: Slot) -> LeasedBatch:
        """Return the descriptor of the batch, or of its error, in ``slot``, with a lease of the slot."""
        record = self.ledger.describe(batch)
        flags, used = record.flags, record.used_nbytes
        failed = bool(flags & FAILED) or record.result & KIND_MASK == ERROR_BLOB
        offset, nbytes = record.result & ~KIND_MASK, record.result_nbytes
        if flags & FAILED:
            offset, nbytes = self.first_error(batch)
        texts: tuple[tuple[int, int], ...] = ()
        if flags & TEXTS and not (failed or offset):
            texts = tuple(
                (start, size) if kind == TEXT_BLOB else (0, 0)
                for kind, start, size in self.ledger.blobs(batch)
            )
        descriptor = BatchDescriptor(slot, record.layout, (offset, nbytes), failed, texts, used)
        return LeasedBatch(descriptor, self.leased(slot, used))


def open_batch(
    descriptor: BatchDescriptor, segment: Segment, store: Store, lease: npt.NDArray[np.uint8]
) -> Any:
    """Return the batch of a descriptor; its arrays view the lease.

    Raises:
        DamagedError: The memory does not hold what the workers wrote.
        Exception: The exception of a sample of the batch, or of its collation.
    """
    offset, nbytes = descriptor.result
    if descriptor.failed and not offset:
        raise_sample_error(slot_overflow_error(descriptor.slot))
    if descriptor.failed:
        raise_sample_error(store.get(offset, nbytes, None, ERROR_BLOB))
    if offset:
        return store.get(offset, nbytes, lease, SAMPLE_BLOB)
    fields, count, layout = read_layout(segment, descriptor.layout, descriptor.slot)
    texts = [store.get(*place, None, TEXT_BLOB) if place[0] else [] for place in descriptor.texts]
    check_texts(layout, count, texts)
    return layout.batch(lease, fields - descriptor.slot.start, count, texts)


class RankDevice:
    """Copies batches from the shared memory of the node to one rank's device.

    Each rank pins the pages of its own mapping. A batch stays held, so that no process reuses its slot, until the
    device has passed the event recorded after its copy.

    Args:
        ahead: Number of batches to copy ahead of use; an attribute too.
    """

    def __init__(self, device: torch.device, ahead: int) -> None:
        self.ahead = ahead
        accelerator = accelerator_of(device)
        self._pinner: MemoryPinner | None = accelerator if accelerator.pins_memory else None
        self._pinned: weakref.WeakKeyDictionary[Segment, PinnedSlots] = weakref.WeakKeyDictionary()
        self._held = held = deque[tuple[object, DeviceEvent]]()
        self._copier = DeviceCopier(accelerator, lambda _, host, end: held.append((host, end)))
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

    def finish(self, started: Any) -> Any:
        """Return the batch on the device; work that the program queues from now on waits for its copy."""
        return self._copier.finish(started)

    def _opened(self, handle: BatchHandle) -> Any:
        batch = handle.open()
        if self._pinner is not None:
            pinned = self._pinned.get(handle.segment)
            if pinned is None:
                pinned = self._pinned[handle.segment] = PinnedSlots(self._pinner, handle.segment)
            pinned.lock(handle.descriptor.slot, handle.descriptor.nbytes)
        return batch


def _finish_copies(held: deque[tuple[object, DeviceEvent]], owner: int) -> None:
    """Wait for copies that are still running when the device's object is dropped."""
    while held and owner == os.getpid():
        _, event = held.popleft()
        event.synchronize()


class _Upcoming(NamedTuple):
    """A batch that ``next`` returns later, or its error, and the part of the epoch that it covers."""

    portion: Any
    batch: Any = None
    error: Exception | None = None


class RankSource:
    """The batches of one rank (see :class:`minato.delivery.iterator.BatchSource`).

    Args:
        pool: Gives this rank its batches.
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
        self._pool = pool
        self._join = join
        self._device = device
        self._session = session
        self._number = -1
        self._part: Any = None
        self._upcoming: deque[_Upcoming] = deque()
        self._last: Outgoing | None = None
        self._leave: Callable[[], Any] = lambda: None

    def begin(self, epoch: Epoch, batches: IndexBatches) -> bool:
        """Join the next epoch of all ranks, and drop the prefetched batches of the last one."""
        self._leave()
        self._last = None
        self._upcoming.clear()
        self._part = epoch.progress.part
        assert self._part is not None, "the epoch was begun without a session"
        self._number, begun = self._join(epoch, batches)
        # On request, or when this source is dropped; the server handles the exit itself.
        self._leave = leave = weakref.finalize(self, self._pool.leave, self._number)
        leave.atexit = False
        return begun

    def next(self) -> Outgoing:
        """Return the next batch for this rank: the same one until it is given."""
        if self._last is None or self._last.is_given:
            self._last = self._next()
        return self._last

    @property
    def has_next(self) -> bool:
        """Whether the next batch has arrived."""
        return self._pool.has_next(self._number)

    def _next(self) -> Outgoing:
        upcoming = self._upcoming.popleft() if self._upcoming else self._start()
        batch, error = upcoming.batch, upcoming.error
        if self._device is not None:
            if error is None:
                batch = self._device.finish(batch)
            while len(self._upcoming) < self._device.ahead and self.has_next:
                self._upcoming.append(self._start())
        self._part.handed(upcoming.portion)
        return Outgoing(batch, error)

    def _start(self) -> _Upcoming:
        """Take the next batch, and build it or start to copy it."""
        try:
            handle = self._pool.next(self._number)
        except StopIteration:
            self._part.ended()
            raise
        try:
            if self._device is None:
                return _Upcoming(handle.portion, handle.open())
            self._device.unpin(self._pool.given_back())
            return _Upcoming(handle.portion, self._device.start(handle))
        except Exception as error:
            return _Upcoming(handle.portion, error=error)

    def pinned(self, duration_ns: int) -> None:
        """Do nothing: times are measured for all ranks together."""

    def pin_slots(self, locker: MemoryPinner) -> None:
        """Do nothing: torch pins the copies that a rank's consumers make; a device pins its own."""

    def shut_down(self) -> None:
        """Leave the epoch; the workers end when all ranks have left it, unless they persist."""
        self._leave()
