"""Reads published batches: makes tensors that view the slot, or copies of a small batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from minato._core import Ledger
from minato._core.codes import (
    ERROR_BLOB,
    FAILED,
    KIND_MASK,
    NOTHING_AT_PLACES,
    SAMPLE_BLOB,
    STATE_BLOB,
    TEXT_BLOB,
    TEXTS,
)
from minato._core.segment import Segment
from minato.batching.arena import Arena, Slot
from minato.batching.blobs import exception_of, raise_sample_error, slot_overflow_error
from minato.batching.layout import Layout, read_layout
from minato.batching.serialization import Store, damaged

COPIED_NBYTES = 16 << 10
"""Batches up to this size are copied out of their slots: that costs less than to lend a slot and take it back."""

Texts = tuple[tuple[int, int, int], ...]
"""Number of a sample in its batch, and the place of its strings and those of the samples after it."""


class BatchDescriptor(NamedTuple):
    """The data of which a process builds the batch of a slot; a place is an offset in the arena and bytes, or zeros."""

    slot: Slot
    layout: int  # offset of the batch's layout
    result: tuple[int, int]  # place of the pickled batch, or of the pickled error
    failed: bool  # a sample or the collation raised
    texts: Texts
    nbytes: int  # written to the slot


class BatchReader:
    """Makes the batches that ``next()`` returns; copies no arrays but those of a small batch."""

    def __init__(self, ledger: Ledger, arena: Arena, store: Store) -> None:
        self.ledger, self._arena, self._store = ledger, arena, store
        self._held: tuple[Slot, Any] | None = None  # the last leased slot and its view

    def describe(self, batch: int, slot: Slot) -> BatchDescriptor:
        """Return what :func:`open_batch` needs of the batch in ``slot``, or of its error."""
        record = self.ledger.describe(batch)
        flags = record.flags
        failed = bool(flags & FAILED) or record.result & KIND_MASK == ERROR_BLOB
        result = record.result & ~KIND_MASK, record.result_nbytes
        if flags & FAILED:
            result = self._first_error(batch)
        texts: Texts = ()
        if flags & TEXTS and not (failed or result[0]):
            texts = tuple(
                (k, start, size)
                for k, (kind, start, size) in self.ledger.blobs(batch).items()
                if kind == TEXT_BLOB
            )
        return BatchDescriptor(slot, record.layout, result, failed, texts, record.used_nbytes)

    def failure(self, batch: int, slot: Slot) -> BaseException | None:
        """Return what a sample of the batch, or its collation, has raised; None if nothing was raised."""
        record = self.ledger.describe(batch)
        if not record.flags & FAILED and record.result & KIND_MASK != ERROR_BLOB:
            return None
        return exception_of(_error_of(self.describe(batch, slot), self._store))

    def read(self, batch: int, slot: Slot) -> Any:
        """Return the batch in ``slot``, or raise what a sample or the collation raised. Its tensors lease the slot.

        Those of a small batch do not. If this was interrupted, it can be called again. The slot is leased by this
        reader, too, until ``discard``.
        """
        record, segment = self.ledger.describe(batch), self._arena.segment
        copies = record.used_nbytes <= COPIED_NBYTES and self._arena.pinned_slots is None
        if copies and record.flags == NOTHING_AT_PLACES and not record.result:
            fields, end, count, layout = read_layout(segment, record.layout, slot)
            return layout.batch(segment.array[fields:end].copy(), 0, count, ())
        descriptor = self.describe(batch, slot)
        lease = None
        if not (copies or descriptor.failed):
            lease = self.leased(slot, descriptor.nbytes)
        return open_batch(descriptor, segment, self._store, lease)

    def leased(self, slot: Slot, used: int) -> Any:
        """Lease a slot; again, the same view, if the last call was interrupted."""
        if self._held is None or self._held[0] != slot:
            self._held = slot, self._arena.view(slot)
        return self._arena.lease(slot, used, self._held[1])

    def state(self, batch: int) -> tuple[int, Any] | None:
        """Before ``read``: number of a worker, and state of its dataset or exception of ``state_dict()``; or None."""
        state: tuple[int, Any] | None = None
        for kind, offset, nbytes in self.ledger.blobs(batch).values():
            if kind == STATE_BLOB:
                state = self._store.get(offset, nbytes, None, kind)
            elif offset and kind == ERROR_BLOB:
                state = self._store.get(offset, nbytes, None, kind).state
        return state

    def discard(self, batch: int, slot: Slot) -> None:
        """Drop the objects of a batch, and free its slot, unless it is leased."""
        record = self.ledger.describe(batch)
        if record.result:
            self._store.drop(record.result & ~KIND_MASK)
        if record.flags != NOTHING_AT_PLACES:
            for _, offset, _ in self.ledger.blobs(batch).values():
                self._store.drop(offset)
        if self._held is not None and self._held[0] == slot:
            self._held = None
        self._arena.release(slot, record.used_nbytes)

    def _first_error(self, batch: int) -> tuple[int, int]:
        """Return offset and size of the first error of a batch."""
        for kind, offset, nbytes in self.ledger.blobs(batch).values():
            if kind == ERROR_BLOB:
                return offset, nbytes
        raise damaged("the error of a sample")


def open_batch(descriptor: BatchDescriptor, segment: Segment, store: Store, lease: Any) -> Any:
    """Return the batch of a descriptor; its arrays view the lease, or are copies without one.

    DamagedError: The memory does not hold what the workers wrote. Exception: That of a sample, or of its collation.
    """
    if descriptor.failed:
        raise_sample_error(_error_of(descriptor, store))
    offset, nbytes = descriptor.result
    if offset:
        return store.get(offset, nbytes, lease, SAMPLE_BLOB)
    fields, end, count, layout = read_layout(segment, descriptor.layout, descriptor.slot)
    texts = texts_of(layout, count, descriptor.texts, store)
    if lease is None:
        return layout.batch(segment.array[fields:end].copy(), 0, count, texts)
    return layout.batch(lease, fields - descriptor.slot.start, count, texts)


def _error_of(descriptor: BatchDescriptor, store: Store) -> object:
    offset, nbytes = descriptor.result
    if not offset:
        return slot_overflow_error(descriptor.slot)
    return store.get(offset, nbytes, None, ERROR_BLOB)


def texts_of(layout: Layout, count: int, places: Texts, store: Store) -> list[str | bytes]:
    """Return the strings of ``count`` samples; DamagedError: they are others than the layout's.

    Samples that a worker delivers together have theirs at the place of the first. Of a worker that dies meanwhile, the
    places after some may be filled by another, whose strings count.
    """
    texts: list[str | bytes] = []
    for k, offset, nbytes in places:
        found = store.get(offset, nbytes, None, TEXT_BLOB)
        if type(found) is not list:
            raise damaged("the texts of a batch")
        texts[k * layout.num_texts :] = found
    if len(texts) != layout.num_texts * count:
        raise damaged("the texts of a batch")
    return texts
