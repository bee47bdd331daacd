"""Full slots as they are told to other processes, which have the arena's memory but not its ledger."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from minato._core.codes import ERROR_BLOB, FAILED, KIND_MASK, SAMPLE_BLOB, TEXT_BLOB, TEXTS
from minato._core.segment import Segment
from minato.batching.arena import Slot
from minato.batching.reader import BatchReader, check_texts, raised, too_large
from minato.batching.serialization import SharedStore, Store
from minato.batching.writer import read_layout

__all__ = [
    "BatchDescriptor",
    "BatchHandle",
    "DescriptorReader",
    "LeasedBatch",
    "RemoteArena",
    "open_batch",
]


class BatchDescriptor(NamedTuple):
    """What has to be known to make a batch of a slot.

    Attributes:
        slot: Where all of it lies.
        layout: Arena offset of the layout, if that is what the batch is made by.
        result: Arena offset and bytes of the pickled batch otherwise; or of the error, if
        failed: a sample or the collation raised.
        texts: Arena offset and bytes of each sample's texts, (0, 0) where it has none.
        nbytes: How much of the slot was written.
    """

    slot: Slot
    layout: int
    result: tuple[int, int]
    failed: bool
    texts: tuple[tuple[int, int], ...]
    nbytes: int


class LeasedBatch(NamedTuple):
    """A descriptor, what keeps its slot for it, and what is in it for the account of whoever gets it."""

    descriptor: BatchDescriptor
    lease: np.ndarray[Any, np.dtype[np.uint8]]
    portion: Any = None


class BatchHandle(NamedTuple):
    """A descriptor that has come to where it is opened.

    Attributes:
        segment: The arena's memory, as this process has it.
        descriptor: The same.
        portion: What is in it, for the account of whoever gets it.
        open: Gives the batch (see :func:`open_batch`). To be called once, so that the slot becomes free again.
    """

    segment: Segment
    descriptor: BatchDescriptor
    portion: Any
    open: Callable[[], Any]


class DescriptorReader(BatchReader):
    """Gives batches as descriptors, for whoever opens them."""

    def read(self, batch: int, slot: Slot) -> LeasedBatch:
        """The batch in ``slot``, which is leased to the descriptor, errors included."""
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
            self._arena.lease(slot, used),
        )


def open_batch(descriptor: BatchDescriptor, segment: Segment, store: Store, lease: Any) -> Any:
    """The batch of a descriptor; its arrays view the lease.

    Raises:
        DamagedError: What lies there is not what the workers wrote.
        Exception: What a sample of the batch, or its collation, raised.
    """
    if descriptor.failed:
        if not descriptor.result[0]:
            raised(too_large(descriptor.slot))
        raised(store.get(*descriptor.result, None, ERROR_BLOB))
    if descriptor.result[0]:
        return store.get(*descriptor.result, lease, SAMPLE_BLOB)
    fields, count, layout = read_layout(segment, descriptor.layout, descriptor.slot)
    texts = [store.get(*place, None, TEXT_BLOB) if place[0] else [] for place in descriptor.texts]
    check_texts(layout, count, texts)
    return layout.batch(lease, fields - descriptor.slot.start, count, texts)


class RemoteArena:
    """An arena of another process, as far as its memory goes.

    Args:
        segment: That memory; an attribute too.
        returned: Called with the start of a slot, by any thread and at any time, when nothing of what was opened in it
            is left.
    """

    def __init__(self, segment: Segment, returned: Callable[[int], None]) -> None:
        self.segment = segment
        self._store = SharedStore(segment)
        self._returned = returned
        self._leases: dict[int, weakref.ref[Any]] = {}

    @property
    def num_leased(self) -> int:
        """Slots of which something is left."""
        return len(self._leases)

    def holds(self, what: BatchDescriptor | Slot) -> bool:
        """Whether a slot lies in the memory, or a descriptor with all its parts in a slot that does."""
        slot = what.slot if isinstance(what, BatchDescriptor) else what
        if not 0 <= slot.start <= slot.end <= self.segment.nbytes:
            return False
        if not isinstance(what, BatchDescriptor):
            return True
        places = [(what.layout, 0), what.result, *what.texts, (slot.start, what.nbytes)]
        return all(
            slot.start <= start and start + nbytes <= slot.end for start, nbytes in places if start
        )

    def received(self, descriptor: BatchDescriptor, portion: Any) -> BatchHandle:
        """A descriptor, to be opened here."""
        return BatchHandle(
            self.segment, descriptor, portion, functools.partial(self._open, descriptor)
        )

    def _open(self, descriptor: BatchDescriptor) -> Any:
        start, end = descriptor.slot
        lease = self.segment.array[start:end]
        self._leases[start] = weakref.ref(lease, functools.partial(self._end, start))
        return open_batch(descriptor, self.segment, self._store, lease)

    def _end(self, start: int, reference: weakref.ref[Any]) -> None:
        self._leases.pop(start, None)
        self._returned(start)
