"""How objects that have no fixed layout travel through the arena: pickled, their arrays beside the pickle."""

from __future__ import annotations

import itertools
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from minato._core.codes import ERROR_BLOB, KIND_MASK, STATE_BLOB
from minato._core.ledger import Ledger
from minato._core.segment import Segment
from minato._support.pickling import Purpose, dumps

__all__ = ["DamagedError", "LocalStore", "SharedStore", "Store", "damaged", "keys_of"]

Allocate = Callable[[int], int]
"""Gives the arena offset of so many fresh bytes, aligned to 64."""

_HEAD = struct.Struct("<QQ")
"""Number of arrays, and the checksum of kind, spans (of pickle and arrays) and pickle, the last two of which follow."""
_SPAN = struct.Struct("<QQ")
_TOP = struct.Struct("<QQQQ")
"""The head, and the span of the pickle."""
_ALIGNMENT = 64


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class DamagedError(RuntimeError):
    """What a worker has left in shared memory is not what it has written."""


def damaged(what: str) -> DamagedError:
    """The error that says so of ``what``."""
    return DamagedError(
        f"{what}, as a worker has left it in shared memory, is damaged: something in one of the processes, such as an "
        "extension module, has written to memory that is not its own"
    )


class Store(ABC):
    """Where objects lie between the worker that makes them and whoever collates or delivers them."""

    @abstractmethod
    def put(
        self, allocate: Allocate, value: Any, purpose: Purpose = "sample", kind: int = 0
    ) -> tuple[int, int]:
        """Keep an object; returns ``(offset, nbytes)``, a multiple of 64 and what ``get`` needs beside it.

        Args:
            purpose: What the object is (see ``SidePickler``).
            kind: Of the blob; 0 for an object that is none. ``get`` and ``peek`` must name the same.
        """

    @abstractmethod
    def get(self, offset: int, nbytes: int, lease: Any = None, kind: int = 0) -> Any:
        """The object kept at ``offset``.

        Args:
            lease: Memory of the slot that the object's arrays may view; None: they are copies.
        """

    def peek(self, offset: int, nbytes: int, kind: int = 0) -> Any:
        """A copy of, or a reference to, the object; it stays."""
        return self.get(offset, nbytes, None, kind)

    @abstractmethod
    def drop(self, offset: int) -> None:
        """Forget an object that nobody will fetch."""


class SharedStore(Store):
    """Objects pickled into the arena, for workers in other processes."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def put(
        self, allocate: Allocate, value: Any, purpose: Purpose = "sample", kind: int = 0
    ) -> tuple[int, int]:
        """Pickle an object into the arena. Raises whatever its pickling raises."""
        data, raws = dumps(value, purpose)
        head = _aligned(_HEAD.size + _SPAN.size * (len(raws) + 1))
        spans, end = [], head
        for raw in (data, *raws):
            spans.append((end, raw.nbytes))
            end = _aligned(end + raw.nbytes)
        offset = allocate(end)
        memory = self._segment.array[offset : offset + end]
        for i, span in enumerate(spans):
            _SPAN.pack_into(memory, _HEAD.size + i * _SPAN.size, *span)
        for (start, nbytes), raw in zip(spans, (data, *raws), strict=True):
            memory[start : start + nbytes] = np.frombuffer(raw, np.uint8)
        checksum = crc32(memory[_HEAD.size : head + data.nbytes], kind)
        _HEAD.pack_into(memory, 0, len(raws), checksum)
        return offset, end

    def get(self, offset: int, nbytes: int, lease: Any = None, kind: int = 0) -> Any:
        """Unpickle an object; with a lease its arrays view the arena.

        Raises:
            DamagedError: What lies there is not what was put there, or of another kind. It is not unpickled.
        """
        memory = self._segment.array[offset : offset + nbytes]
        (start, size), *arrays = _checked(memoryview(memory), kind)
        whole = memoryview(memory.copy()) if lease is None else _spanning(lease, memory)
        buffers = [whole[first : first + count] for first, count in arrays]
        return pickle.loads(whole[start : start + size], buffers=buffers)

    def drop(self, offset: int) -> None:
        """Nothing is to be done: what lies in the arena goes with its slot."""


def _checked(whole: memoryview, kind: int) -> list[tuple[int, int]]:
    """Start and size of the pickle and of each array in the memory of an object.

    Raises:
        DamagedError: The checksum does not fit. The arrays themselves have none.
    """
    nbytes = len(whole)
    if nbytes >= _TOP.size:
        count, checksum, start, size = _TOP.unpack_from(whole)
        table, end = _HEAD.size + _SPAN.size * (count + 1), start + size
        # The pickle follows the spans: that bounds the number of these before it is used.
        bounded = start == _aligned(table) and end <= nbytes
        if bounded and crc32(whole[_HEAD.size : end], kind) == checksum:
            spans = [(start, size)]
            if count:
                spans = list(_SPAN.iter_unpack(whole[_HEAD.size : table]))
                end = sum(spans[-1])
            if _aligned(end) == nbytes:
                return spans
    raise damaged("an object")


def _spanning(lease: np.ndarray[Any, Any], memory: np.ndarray[Any, Any]) -> memoryview:
    """The part of the lease that is ``memory``, holding the lease itself alive."""
    start = memory.ctypes.data - lease.ctypes.data
    if not 0 <= start <= lease.nbytes - memory.nbytes:
        raise damaged("an object of another batch")
    # Slicing an array would skip the lease and hold its base; slicing a memoryview holds the lease.
    return memoryview(lease)[start : start + memory.nbytes]


class LocalStore(Store):
    """Objects passed by reference, for workers in this process."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._offsets = itertools.count(_ALIGNMENT, _ALIGNMENT)

    def sweep(self, ledger: Ledger) -> None:
        """Drop what no batch in flight refers to: an interrupted worker left it. No other worker may run."""
        kept: set[int] = set()
        for batch in ledger.live:
            result = ledger.contents(batch)[2]
            kept.add(result & ~KIND_MASK)
            kept.add(ledger.describe(batch)[6])
            for kind, offset, _ in ledger.blobs(batch):
                if not result or kind in (ERROR_BLOB, STATE_BLOB):  # else it is collated
                    kept.add(offset)
        self._values = {offset: value for offset, value in self._values.items() if offset in kept}

    def put(
        self, allocate: Allocate, value: Any, purpose: Purpose = "sample", kind: int = 0
    ) -> tuple[int, int]:
        """Keep an object until it is fetched."""
        offset = next(self._offsets)
        self._values[offset] = value
        return offset, 0

    def get(self, offset: int, nbytes: int, lease: Any = None, kind: int = 0) -> Any:
        """The object itself; it is kept no longer."""
        return self._values.pop(offset)

    def peek(self, offset: int, nbytes: int, kind: int = 0) -> Any:
        """The object itself; it stays."""
        return self._values[offset]

    def drop(self, offset: int) -> None:
        """Forget an object that nobody will fetch."""
        self._values.pop(offset, None)


def keys_of(ledger: Ledger, store: Store, batch: int, k: int, count: int) -> Sequence[Any]:
    """The keys of samples k … k+count-1 of a batch."""
    *_, offset, nbytes, _ = ledger.describe(batch)
    if not offset:
        return ledger.keys(batch, k, count)
    keys: list[Any] = store.peek(offset, nbytes)
    return keys[k : k + count]
