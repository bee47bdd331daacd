"""The indices of batches in a ledger, which lie there or in the store of objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minato._core import Ledger
from minato._support.text import text_of
from minato.batching.serialization import Store

__all__ = ["StoredIndices", "listed"]

_MOST_LISTED = 8
"""Number of indices of a batch that a message lists."""


def listed(indices: Sequence[object]) -> str:
    """Some indices, for a message: the first few."""
    more = f" and {len(indices) - _MOST_LISTED} more" if len(indices) > _MOST_LISTED else ""
    return f"indices {', '.join(map(text_of, indices[:_MOST_LISTED]))}{more}"


class StoredIndices:
    """The indices that the sampler has given for the samples in flight.

    Args:
        ledger: Either end of the ledger.
        store: Holds indices that are no integers.
    """

    def __init__(self, ledger: Ledger, store: Store) -> None:
        self._ledger = ledger
        self._store = store

    def read(self, batch: int, k: int, count: int) -> Sequence[Any]:
        """The indices of samples k … k+count-1 of a batch; all of them are in the sampler's own container."""
        record = self._ledger.describe(batch)
        if not record.indices_offset:
            return self._ledger.indices(batch, k, count)
        found: Sequence[Any] = self._store.peek(record.indices_offset, record.indices_nbytes)
        return found if k == 0 and count >= len(found) else list(found)[k : k + count]

    def first(self, batch: int) -> Any:
        """The index of the first sample of a batch; None of an empty one."""
        return next(iter(self.read(batch, 0, 1)), None)

    def describe(self, batch: int) -> str:
        """The indices of the samples at the places of a batch, for a message."""
        record = self._ledger.describe(batch)
        own_places = range(record.first, record.first + record.count)
        indices: list[object] = []
        for position in own_places if record.bound else self._ledger.occupants(batch):
            if position < 0:
                continue  # the place is free
            own, k = self._ledger.locate(position)
            # Otherwise its own batch was yielded, and the record is in use again.
            if 0 <= k < self._ledger.describe(own).count:
                indices.extend(self.read(own, k, 1))
        return listed(indices) if indices else "indices that are no longer known"
