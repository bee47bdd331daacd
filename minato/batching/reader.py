"""The consumer's side of a batch: from a full slot to what the training loop gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from minato._core.codes import (
    END_BLOB,
    ERROR_BLOB,
    FAILED,
    KIND_MASK,
    SAMPLE_BLOB,
    STATE_BLOB,
    TEXT_BLOB,
    TEXTS,
)
from minato._core.ledger import Ledger
from minato._core.limits import slot_overflow
from minato.batching.arena import Arena, Slot
from minato.batching.layout import Layout
from minato.batching.serialization import Store, damaged
from minato.batching.writer import SampleError, read_layout

__all__ = ["BatchReader", "check_texts", "raised", "too_large"]


class BatchReader:
    """Makes the delivered object of a published batch, without copying its arrays."""

    def __init__(self, ledger: Ledger, arena: Arena, store: Store) -> None:
        self._ledger = ledger
        self._arena = arena
        self._store = store

    def read(self, batch: int, slot: Slot) -> Any:
        """The batch in ``slot``; the slot is leased to it, or free again if nothing in it is needed.

        Raises:
            Exception: What a sample of the batch, or its collation, raised.
        """
        flags, layout_offset, result, result_nbytes, _, used = self._ledger.contents(batch)
        kind, result = result & KIND_MASK, result & ~KIND_MASK
        if flags & FAILED or kind == ERROR_BLOB:
            if flags & FAILED:
                result, result_nbytes = self._first_error(batch)
            try:
                error = too_large(slot)
                if result:
                    error = self._store.get(result, result_nbytes, None, ERROR_BLOB)
            finally:
                self.discard(batch, slot)
            raised(error)
        lease = self._arena.lease(slot, used)
        if result:
            return self._store.get(result, result_nbytes, lease, SAMPLE_BLOB)
        fields, count, layout = read_layout(self._arena.segment, layout_offset, slot)
        texts: list[Any] = []
        if flags & TEXTS:
            texts = [
                self._store.get(offset, nbytes, None, kind) if kind == TEXT_BLOB else []
                for kind, offset, nbytes in self._ledger.blobs(batch)
            ]
        check_texts(layout, count, texts)
        return layout.batch(lease, fields - slot.start, count, texts)

    def state(self, batch: int) -> tuple[int, Any] | None:
        """Worker and state of its dataset, if that came with a batch or its end, or what asking for it raised.

        To be called before ``read``.
        """
        state: tuple[int, Any] | None = None
        for kind, offset, nbytes in self._ledger.blobs(batch):
            if kind == STATE_BLOB:
                state = self._store.get(offset, nbytes, None, kind)
            elif offset and kind == END_BLOB:
                state = self._store.peek(offset, nbytes, kind)
            elif offset and kind == ERROR_BLOB:
                state = self._store.peek(offset, nbytes, kind).state
        return state

    def discard(self, batch: int, slot: Slot) -> None:
        """Drop a batch that nobody wants any more."""
        _, _, result, _, _, used = self._ledger.contents(batch)
        self._store.drop(result & ~KIND_MASK)
        for _, offset, _ in self._ledger.blobs(batch):
            self._store.drop(offset)
        self._arena.release(slot, used)

    def _first_error(self, batch: int) -> tuple[int, int]:
        """Offset and size of the first error of a batch."""
        for kind, offset, nbytes in self._ledger.blobs(batch):
            if kind == ERROR_BLOB:
                return offset, nbytes
        raise damaged("the error of a sample")


def raised(error: Any) -> NoReturn:
    """Raise what a worker has left as an error."""
    if not isinstance(error, SampleError):
        raise damaged("the error of a sample")
    error.reraise()
    raise AssertionError(error)


def check_texts(layout: Layout, count: int, texts: Sequence[Any]) -> None:
    """Raise DamagedError unless each of ``count`` samples has the texts that the layout says."""
    if layout.num_texts:
        lengths = [len(each) if isinstance(each, (tuple, list)) else -1 for each in texts]
        if lengths != [layout.num_texts] * count:
            raise damaged("the texts of a batch")


def too_large(slot: Slot) -> SampleError:
    """The error of a batch whose slot has no room left, not even for an error."""
    return SampleError(MemoryError(slot_overflow(slot.end - slot.start)))
