"""Reads published batches: makes tensors that view the slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minato._core import Ledger
from minato._core.codes import (
    ERROR_BLOB,
    FAILED,
    KIND_MASK,
    SAMPLE_BLOB,
    STATE_BLOB,
    TEXT_BLOB,
    TEXTS,
)
from minato.batching.arena import Arena, Slot
from minato.batching.blobs import exception_of, slot_overflow_error
from minato.batching.layout import Layout, read_layout
from minato.batching.serialization import Store, damaged

__all__ = ["BatchReader", "check_texts"]

_NOTHING_AT_PLACES = 1
"""The flags of a full batch without any object at its places: bit k of the flags stands for blobs of kind k."""


class BatchReader:
    """Makes the batches that ``next()`` returns, without copying their arrays."""

    def __init__(self, ledger: Ledger, arena: Arena, store: Store) -> None:
        self.ledger, self._arena, self._store = ledger, arena, store
        self._held: tuple[Slot, Any] | None = None  # the last leased slot and its view

    def failure(self, batch: int, slot: Slot) -> BaseException | None:
        """Return what a sample of the batch, or its collation, has raised; None if nothing was raised."""
        record = self.ledger.describe(batch)
        flags, nbytes = record.flags, record.result_nbytes
        kind, result = record.result & KIND_MASK, record.result & ~KIND_MASK
        if not flags & FAILED and kind != ERROR_BLOB:
            return None
        if flags & FAILED:
            result, nbytes = self.first_error(batch)
        if not result:
            return exception_of(slot_overflow_error(slot))
        return exception_of(self._store.get(result, nbytes, None, ERROR_BLOB))

    def read(self, batch: int, slot: Slot) -> Any:
        """Return the batch in ``slot``, or raise what a sample or the collation raised. Its tensors lease the slot.

        If this was interrupted, it can be called again. The slot is leased by this reader, too, until ``discard``. A
        batch that raises frees it.
        """
        record = self.ledger.describe(batch)
        flags, result = record.flags, record.result & ~KIND_MASK
        if flags & FAILED or record.result & KIND_MASK == ERROR_BLOB:
            try:
                error = self.failure(batch, slot)
            finally:
                self.discard(batch, slot)
            try:
                assert error is not None
                raise error
            finally:
                del error  # its traceback holds this frame
        lease = self.leased(slot, record.used_nbytes)
        if result:
            return self._store.get(result, record.result_nbytes, lease, SAMPLE_BLOB)
        fields, count, layout = read_layout(self._arena.segment, record.layout, slot)
        texts: list[Any] = []
        if flags & TEXTS:
            texts = [
                self._store.get(offset, nbytes, None, kind) if kind == TEXT_BLOB else []
                for kind, offset, nbytes in self.ledger.blobs(batch)
            ]
        check_texts(layout, count, texts)
        return layout.batch(lease, fields - slot.start, count, texts)

    def leased(self, slot: Slot, used: int) -> Any:
        """Lease a slot; again, the same view, if the last call was interrupted."""
        if self._held is None or self._held[0] != slot:
            self._held = slot, self._arena.view(slot)
        return self._arena.lease(slot, used, self._held[1])

    def state(self, batch: int) -> tuple[int, Any] | None:
        """Before ``read``: number of a worker, and state of its dataset or exception of ``state_dict()``; or None."""
        state: tuple[int, Any] | None = None
        for kind, offset, nbytes in self.ledger.blobs(batch):
            if kind == STATE_BLOB:
                state = self._store.get(offset, nbytes, None, kind)
            elif offset and kind == ERROR_BLOB:
                state = self._store.peek(offset, nbytes, kind).state
        return state

    def discard(self, batch: int, slot: Slot) -> None:
        """Drop the objects of a batch, and free its slot, unless it is leased."""
        record = self.ledger.describe(batch)
        if record.result:
            self._store.drop(record.result & ~KIND_MASK)
        if record.flags != _NOTHING_AT_PLACES:
            for _, offset, _ in self.ledger.blobs(batch):
                self._store.drop(offset)
        if self._held is not None and self._held[0] == slot:
            self._held = None
        self._arena.release(slot, record.used_nbytes)

    def first_error(self, batch: int) -> tuple[int, int]:
        """Return offset and size of the first error of a batch."""
        for kind, offset, nbytes in self.ledger.blobs(batch):
            if kind == ERROR_BLOB:
                return offset, nbytes
        raise damaged("the error of a sample")


def check_texts(layout: Layout, count: int, texts: Sequence[object]) -> None:
    """Raise DamagedError unless each of ``count`` samples has as many strings as the layout."""
    if layout.num_texts:
        lengths = [len(each) if isinstance(each, (tuple, list)) else -1 for each in texts]
        if lengths != [layout.num_texts] * count:
            raise damaged("the texts of a batch")
