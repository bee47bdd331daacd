"""Objects that have no layout, pickled into the arena with their arrays outside the pickle; the indices of batches."""

from __future__ import annotations

import itertools
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from minato._core import Ledger
from minato._core.segment import Segment
from minato._support.items import Item
from minato._support.objects import nbytes_of
from minato._support.pickling import Purpose, dumps
from minato._support.values import text_of

Allocate = Callable[[int], int]
"""Allocates a number of bytes; returns their arena offset, a multiple of 64."""

_HEAD = struct.Struct("<IIQ")
"""Numbers of arrays and of payloads; checksum of the kind, the spans, and the pickle without its payloads. The spans of
the pickle, of the arrays and of the payloads follow, then the pickle, then the arrays."""
_SPAN = struct.Struct("<QQ")
_TOP = struct.Struct("<IIQQQ")
_ALIGNMENT = 64

_MOST_LISTED = 8


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class DamagedError(RuntimeError):
    """Shared memory does not hold the bytes that a worker wrote."""


def damaged(subject: str) -> DamagedError:
    """Return the error that names the damaged part."""
    return DamagedError(
        f"{subject}, as a worker has left it in shared memory, is damaged: something in one of the processes, such as "
        "an extension module, has written to memory that is not its own"
    )


class Store(ABC):
    """The memory of batches: a segment with their fields, and objects outside them, which workers put for others."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    @abstractmethod
    def put(
        self, allocate: Allocate, value: object, purpose: Purpose = "sample", kind: int = 0
    ) -> tuple[int, int]:
        """Store an object; returns ``(offset, nbytes)`` for ``get``. Raises the exception of its pickling.

        The offset is a multiple of 64. ``get`` must give the same ``kind``; it is 0 for no blob.
        """

    @abstractmethod
    def get(self, offset: int, nbytes: int, lease: object = None, kind: int = 0) -> Any:
        """Return the object at ``offset``; its arrays view the lease of the slot, or are copies without one."""

    @abstractmethod
    def drop(self, offset: int) -> None:
        """Remove an object that no ``get`` will fetch."""


class SharedStore(Store):
    """Pickles objects into the arena, for workers in other processes."""

    def put(
        self, allocate: Allocate, value: object, purpose: Purpose = "sample", kind: int = 0
    ) -> tuple[int, int]:
        pieces, raws = dumps(value, purpose)
        sizes = [piece.nbytes for piece in pieces]
        payloads = [i for i in range(1, len(pieces)) if _is_payload(pieces[i - 1], sizes[i])]
        head = _aligned(_HEAD.size + _SPAN.size * (1 + len(raws) + len(payloads)))
        starts = list(itertools.accumulate(sizes, initial=head))
        spans, end = [(head, starts[-1] - head)], _aligned(starts[-1])
        for raw in raws:
            spans.append((end, raw.nbytes))
            end = _aligned(end + raw.nbytes)
        holes = [(starts[i], sizes[i]) for i in payloads]
        offset = allocate(end)
        memory = self.segment.array[offset : offset + end]
        for i, span in enumerate((*spans, *holes)):
            _SPAN.pack_into(memory, _HEAD.size + i * _SPAN.size, *span)
        begins = (*starts[:-1], *(start for start, _ in spans[1:]))
        for start, raw in zip(begins, (*pieces, *raws), strict=True):
            memory[start : start + raw.nbytes] = np.frombuffer(raw, np.uint8)
        checksum = _checksum(memoryview(memory), starts[-1], holes, kind)
        _HEAD.pack_into(memory, 0, len(raws), len(holes), checksum)
        return offset, end

    def get(self, offset: int, nbytes: int, lease: Any = None, kind: int = 0) -> Any:
        """Unpickle an object; with a lease its arrays view the arena. DamagedError: the memory has none of it."""
        memory = self.segment.array[offset : offset + nbytes]
        whole = memoryview(memory)
        (start, size), *arrays = _checked(whole, kind)
        data = whole[start : start + size]
        if not arrays:
            return pickle.loads(data)
        held = memoryview(memory.copy()) if lease is None else _spanning(lease, memory)
        return pickle.loads(data, buffers=[held[first : first + count] for first, count in arrays])

    def drop(self, offset: int) -> None:
        """Do nothing: the object's memory is reused with its slot."""


def _checked(whole: memoryview, kind: int) -> list[tuple[int, int]]:
    """Start and size of an object's pickle and arrays; DamagedError, by a checksum without arrays and payloads."""
    nbytes = len(whole)
    if nbytes >= _TOP.size:
        arrays, payloads, checksum, start, size = _TOP.unpack_from(whole)
        table, end = _HEAD.size + _SPAN.size * (1 + arrays + payloads), start + size
        # The pickle follows the spans: that bounds the number of spans before it is used.
        if start == _aligned(table) and end <= nbytes:
            spans = [(start, size)]
            if arrays or payloads:
                spans = list(_SPAN.iter_unpack(whole[_HEAD.size : table]))
            holes = spans[1 + arrays :]
            if _checksum(whole, end, holes, kind) == checksum:
                del spans[1 + arrays :]
                if _aligned(sum(spans[-1])) == nbytes:
                    return spans
    raise damaged("an object")


def _is_payload(before: memoryview, nbytes: int) -> bool:
    """Whether a part of a pickle is the content of ``bytes`` or a ``bytearray``: ``before`` then ends with its size."""
    end = bytes(before[-9:])
    if end[-5:-4] == pickle.BINBYTES:
        return end[-4:] == nbytes.to_bytes(4, "little")
    is_wide = end[:1] in (pickle.BINBYTES8, pickle.BYTEARRAY8)
    return is_wide and end[1:] == nbytes.to_bytes(8, "little")


def _checksum(whole: memoryview, end: int, holes: list[tuple[int, int]], checksum: int) -> int:
    """The checksum of an object up to ``end``, without its head and its ``holes``."""
    begin = _HEAD.size
    for start, size in holes:
        checksum = crc32(whole[begin:start], checksum)
        begin = start + size
    return crc32(whole[begin:end], checksum)


def _spanning(lease: np.ndarray, memory: np.ndarray) -> memoryview:
    """Return the part of the lease that is ``memory``; it keeps the lease alive."""
    start = memory.ctypes.data - lease.ctypes.data
    if not 0 <= start <= lease.nbytes - memory.nbytes:
        raise damaged("an object of another batch")
    # A slice of an array would keep the base of the lease alive; a slice of a memoryview keeps the lease.
    return memoryview(lease)[start : start + memory.nbytes]


class LocalStore(Store):
    """Passes objects by reference, for workers in this process.

    ``put`` returns about how many bytes a batch has, which no slot holds.
    """

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self._values: dict[int, Any] = {}
        # Threads get different ones, without a lock that an interruption could leave held.
        self._offsets = itertools.count(_ALIGNMENT, _ALIGNMENT)

    def put(
        self, allocate: Allocate, value: object, purpose: Purpose = "sample", kind: int = 0
    ) -> tuple[int, int]:
        offset = next(self._offsets)
        self._values[offset] = value
        return offset, nbytes_of(value) if purpose == "result" else 0

    def get(self, offset: int, nbytes: int, lease: object = None, kind: int = 0) -> Any:
        return self._values[offset]

    def drop(self, offset: int) -> None:
        self._values.pop(offset, None)


def listed(indices: Sequence[object]) -> str:
    """Some indices, for a message: the first few."""
    more = f" and {len(indices) - _MOST_LISTED} more" if len(indices) > _MOST_LISTED else ""
    first = indices[:_MOST_LISTED]
    if not first or type(first[0]) is not Item:
        return f"indices {', '.join(map(text_of, first))}{more}"
    items = [each for each in indices if type(each) is Item]
    if len({item.reader for item in items}) == 1:
        ordinals = ", ".join(str(item.ordinal) for item in items[:_MOST_LISTED])
        return f"items {ordinals}{more} of reader {items[0].reader}"
    return f"{', '.join(map(str, first))}{more}"


class StoredIndices:
    """The indices that the sampler has given for the samples in flight, by either end of the ledger.

    The store holds those that are no integers. ``name`` makes the name of an item of its key, where samples are those
    of an iterable dataset; by default they have indices.
    """

    def __init__(
        self, ledger: Ledger, store: Store, name: Callable[[int], object] | None = None
    ) -> None:
        self._ledger, self._store = ledger, store
        self._are_keys = name is not None
        self.name: Callable[[Any], object] = name or (lambda index: index)

    def read(self, batch: int, k: int, count: int) -> Sequence[Any]:
        """The indices of samples k … k+count-1 of a batch; all of them are in the sampler's own container."""
        record = self._ledger.describe(batch)
        if self._are_keys or not record.indices_offset:
            return self._ledger.indices(batch, k, count)
        found: Sequence[Any] = self._store.get(record.indices_offset, record.indices_nbytes)
        return found if k == 0 and count >= len(found) else list(found)[k : k + count]

    def first(self, batch: int) -> Any:
        """The index of the first sample of a batch; None of an empty one."""
        return next(iter(self.read(batch, 0, 1)), None)

    def describe(self, batch: int) -> str:
        """The indices of the samples at the places of a batch, for a message."""
        indices = self.of(batch)
        return listed(indices) if indices else "indices that are no longer known"

    def of(self, batch: int) -> list[object]:
        """The indices of the samples at the places of a batch, as far as they are known."""
        record = self._ledger.describe(batch)
        own_places = range(record.first, record.first + record.count)
        indices: list[object] = []
        for position in own_places if record.bound else self._ledger.occupants(batch):
            if position < 0:
                continue  # the place is free
            own, k = self._ledger.locate(position)
            # Otherwise its own batch was yielded, and the record is in use again.
            if 0 <= k < self._ledger.describe(own).count:
                indices.extend(map(self.name, self.read(own, k, 1)))
        return indices
