"""Descriptors of full slots for processes that map the arena's memory but not its ledger."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from minato._core.codes import ERROR_BLOB, FAILED, KIND_MASK, SAMPLE_BLOB, TEXT_BLOB, TEXTS
from minato._core.segment import Segment
from minato._fork_safety import Loans
from minato.batching.arena import Slot
from minato.batching.layout import read_layout
from minato.batching.reader import BatchReader, check_texts
from minato.batching.sample_error import raise_sample_error, slot_overflow_error
from minato.batching.serialization import SharedStore, Store

__all__ = [
    "BatchDescriptor",
    "BatchHandle",
    "DescriptorReader",
    "LeasedBatch",
    "RemoteArena",
    "open_batch",
]


class BatchDescriptor(NamedTuple):
    """The data from which a process builds the batch of a slot.

    Attributes:
        slot: The slot that holds the batch.
        layout: Arena offset of the batch's layout; 0: it has none.
        result: Arena offset and bytes of the pickled batch, or of the pickled error; ``(0, 0)``: none.
        failed: Whether a sample or the collation raised.
        texts: Arena offset and bytes of each sample's strings; ``(0, 0)``: it has none.
        nbytes: Number of bytes written to the slot.
    """

    slot: Slot
    layout: int
    result: tuple[int, int]
    failed: bool
    texts: tuple[tuple[int, int], ...]
    nbytes: int


class LeasedBatch(NamedTuple):
    """A descriptor, the lease of its slot, and the part of the epoch that the batch covers."""

    descriptor: BatchDescriptor
    lease: np.ndarray[Any, np.dtype[np.uint8]]
    portion: Any = None


class BatchHandle(NamedTuple):
    """A received batch that is not built yet.

    Attributes:
        segment: This process's mapping of the arena.
        descriptor: The batch's descriptor.
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
        flags, layout, result, nbytes, _, used = self._ledger.contents(batch)
        kind, offset = result & KIND_MASK, result & ~KIND_MASK
        failed = bool(flags & FAILED) or kind == ERROR_BLOB
        if flags & FAILED:
            offset, nbytes = self._first_error(batch)
        texts: tuple[tuple[int, int], ...] = ()
        if flags & TEXTS and not (failed or offset):
            texts = tuple(
                (start, size) if kind == TEXT_BLOB else (0, 0)
                for kind, start, size in self._ledger.blobs(batch)
            )
        return LeasedBatch(
            BatchDescriptor(slot, layout, (offset, nbytes), failed, texts, used),
            self._leased(slot, used),
        )


def open_batch(descriptor: BatchDescriptor, segment: Segment, store: Store, lease: Any) -> Any:
    """Return the batch of a descriptor; its arrays view the lease.

    Raises:
        DamagedError: The memory does not hold what the workers wrote.
        Exception: The exception of a sample of the batch, or of its collation.
    """
    if descriptor.failed:
        if not descriptor.result[0]:
            raise_sample_error(slot_overflow_error(descriptor.slot))
        raise_sample_error(store.get(*descriptor.result, None, ERROR_BLOB))
    if descriptor.result[0]:
        return store.get(*descriptor.result, lease, SAMPLE_BLOB)
    fields, count, layout = read_layout(segment, descriptor.layout, descriptor.slot)
    texts = [store.get(*place, None, TEXT_BLOB) if place[0] else [] for place in descriptor.texts]
    check_texts(layout, count, texts)
    return layout.batch(lease, fields - descriptor.slot.start, count, texts)


class RemoteArena:
    """The mapped memory of another process's arena.

    Args:
        segment: The memory; an attribute too.
        returned: Called with the start of a slot when the last tensor of its batch is gone, by any thread at any time.
    """

    def __init__(self, segment: Segment, returned: Callable[[int], None]) -> None:
        self.segment = segment
        self._store = SharedStore(segment)
        self._returned = returned
        self._leases: dict[int, weakref.ref[Any]] = {}
        self._loans = Loans(self._leases)

    @property
    def num_leased(self) -> int:
        """Number of slots whose batches are in use."""
        self._loans.settle()
        return len(self._leases)

    def holds(self, place: BatchDescriptor | Slot) -> bool:
        """Whether a slot, or a descriptor's slot with all its parts, lies in the memory."""
        slot = place.slot if isinstance(place, BatchDescriptor) else place
        if not 0 <= slot.start <= slot.end <= self.segment.nbytes:
            return False
        if not isinstance(place, BatchDescriptor):
            return True
        places = [(place.layout, 0), place.result, *place.texts, (slot.start, place.nbytes)]
        return all(
            slot.start <= start and start + nbytes <= slot.end for start, nbytes in places if start
        )

    def received(self, descriptor: BatchDescriptor, portion: object) -> BatchHandle:
        """Return a handle of the batch, which this process opens."""
        return BatchHandle(
            self.segment, descriptor, portion, functools.partial(self._open, descriptor)
        )

    def _open(self, descriptor: BatchDescriptor) -> Any:
        self._loans.settle()
        start, end = descriptor.slot
        lease = self.segment.array[start:end]
        self._leases[start] = weakref.ref(lease, functools.partial(self._end, start))
        return open_batch(descriptor, self.segment, self._store, lease)

    def _end(self, start: int, reference: weakref.ref[Any]) -> None:
        self._leases.pop(start, None)
        self._returned(start)
