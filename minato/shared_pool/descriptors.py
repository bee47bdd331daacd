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
from minato.batching.layout_record import read_layout
from minato.batching.reader import BatchReader, check_texts
from minato.batching.sample_error import raise_sample_error, slot_overflow_error
from minato.batching.serialization import SharedStore, Store

__all__ = ["Annex", "Packed", "Parcel", "ParcelReader", "Shipment", "opened"]


class Parcel(NamedTuple):
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


class Packed(NamedTuple):
    """A parcel, what keeps its slot for it, and what is in it for the account of whoever gets it."""

    parcel: Parcel
    lease: np.ndarray[Any, np.dtype[np.uint8]]
    portion: Any = None


class Shipment(NamedTuple):
    """A parcel that has come to where it is opened.

    Attributes:
        segment: The arena's memory, as this process has it.
        parcel: The same.
        portion: What is in it, for the account of whoever gets it.
        open: Gives the batch (see :func:`opened`). To be called once, so that the slot becomes free again.
    """

    segment: Segment
    parcel: Parcel
    portion: Any
    open: Callable[[], Any]


class ParcelReader(BatchReader):
    """Gives batches as parcels, for whoever opens them."""

    def read(self, batch: int, slot: Slot) -> Packed:
        """The batch in ``slot``, which is leased to the parcel, errors included."""
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
        return Packed(
            Parcel(slot, layout, (offset, nbytes), failed, texts, used),
            self._arena.lease(slot, used),
        )


def opened(parcel: Parcel, segment: Segment, store: Store, lease: Any) -> Any:
    """The batch of a parcel; its arrays view the lease.

    Raises:
        DamagedError: What lies there is not what the workers wrote.
        Exception: What a sample of the batch, or its collation, raised.
    """
    if parcel.failed:
        if not parcel.result[0]:
            raise_sample_error(slot_overflow_error(parcel.slot))
        raise_sample_error(store.get(*parcel.result, None, ERROR_BLOB))
    if parcel.result[0]:
        return store.get(*parcel.result, lease, SAMPLE_BLOB)
    fields, count, layout = read_layout(segment, parcel.layout, parcel.slot)
    texts = [store.get(*place, None, TEXT_BLOB) if place[0] else [] for place in parcel.texts]
    check_texts(layout, count, texts)
    return layout.batch(lease, fields - parcel.slot.start, count, texts)


class Annex:
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

    def holds(self, what: Parcel | Slot) -> bool:
        """Whether a slot lies in the memory, or a parcel with all its parts in a slot that does."""
        slot = what.slot if isinstance(what, Parcel) else what
        if not 0 <= slot.start <= slot.end <= self.segment.nbytes:
            return False
        if not isinstance(what, Parcel):
            return True
        places = [(what.layout, 0), what.result, *what.texts, (slot.start, what.nbytes)]
        return all(
            slot.start <= start and start + nbytes <= slot.end for start, nbytes in places if start
        )

    def received(self, parcel: Parcel, portion: Any) -> Shipment:
        """A parcel, to be opened here."""
        return Shipment(self.segment, parcel, portion, functools.partial(self._open, parcel))

    def _open(self, parcel: Parcel) -> Any:
        start, end = parcel.slot
        lease = self.segment.array[start:end]
        self._leases[start] = weakref.ref(lease, functools.partial(self._end, start))
        return opened(parcel, self.segment, self._store, lease)

    def _end(self, start: int, reference: weakref.ref[Any]) -> None:
        self._leases.pop(start, None)
        self._returned(start)
