"""How objects that have no fixed layout travel through the arena: pickled, their arrays beside the pickle."""

from __future__ import annotations

import itertools
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minato._core.ledger import Ledger
from minato._core.segment import Segment
from minato._pickling import Purpose, dumps

__all__ = ["LocalRooms", "LocalStore", "SharedRooms", "SharedStore", "Store", "keys_of"]

Allocate = Callable[[int], int]
"""Gives the arena offset of so many fresh bytes, aligned to 64."""

_COUNT = struct.Struct("<Q")
_SPAN = struct.Struct("<QQ")
_ALIGNMENT = 64


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Store(ABC):
    """Where objects lie between the worker that makes them and whoever collates or delivers them."""

    @abstractmethod
    def put(self, allocate: Allocate, value: Any, purpose: Purpose = "sample") -> tuple[int, int]:
        """Keep an object; returns ``(offset, nbytes)``, a multiple of 64 and what ``get`` needs beside it.

        Args:
            purpose: What the object is (see ``SidePickler``).
        """

    @abstractmethod
    def get(self, offset: int, nbytes: int, lease: Any = None) -> Any:
        """The object kept at ``offset``.

        Args:
            lease: Memory of the slot that the object's arrays may view; None: they are copies.
        """

    def peek(self, offset: int, nbytes: int) -> Any:
        """A copy of, or a reference to, the object; it stays."""
        return self.get(offset, nbytes)

    @abstractmethod
    def drop(self, offset: int) -> None:
        """Forget an object that nobody will fetch."""


class SharedStore(Store):
    """Objects pickled into the arena, for workers in other processes."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def put(self, allocate: Allocate, value: Any, purpose: Purpose = "sample") -> tuple[int, int]:
        """Pickle an object into the arena. Raises whatever its pickling raises."""
        data, raws = dumps(value, purpose)
        head = _aligned(_COUNT.size + _SPAN.size * (len(raws) + 1))
        spans, end = [], head
        for raw in (data, *raws):
            spans.append((end, raw.nbytes))
            end = _aligned(end + raw.nbytes)
        offset = allocate(end)
        memory = self._segment.array[offset : offset + end]
        _COUNT.pack_into(memory, 0, len(raws))
        for i, span in enumerate(spans):
            _SPAN.pack_into(memory, _COUNT.size + i * _SPAN.size, *span)
        for (start, nbytes), raw in zip(spans, (data, *raws), strict=True):
            memory[start : start + nbytes] = np.frombuffer(raw, np.uint8)
        return offset, end

    def get(self, offset: int, nbytes: int, lease: Any = None) -> Any:
        """Unpickle an object; with a lease its arrays view the arena."""
        memory = self._segment.array[offset : offset + nbytes]
        whole = memoryview(memory.copy() if lease is None else _spanning(lease, memory))
        (count,) = _COUNT.unpack_from(whole, 0)
        parts = []
        for i in range(count + 1):
            start, size = _SPAN.unpack_from(whole, _COUNT.size + i * _SPAN.size)
            parts.append(whole[start : start + size])
        return pickle.loads(parts[0], buffers=parts[1:])

    def drop(self, offset: int) -> None:
        """Nothing is to be done: what lies in the arena goes with its slot."""


def _spanning(lease: np.ndarray[Any, Any], memory: np.ndarray[Any, Any]) -> memoryview:
    """The part of the lease that is ``memory``, holding the lease itself alive."""
    start = memory.ctypes.data - lease.ctypes.data
    # Slicing an array would skip the lease and hold its base; slicing a memoryview holds the lease.
    return memoryview(lease)[start : start + memory.nbytes]


class LocalStore(Store):
    """Objects passed by reference, for workers in this process."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._offsets = itertools.count(_ALIGNMENT, _ALIGNMENT)

    def put(self, allocate: Allocate, value: Any, purpose: Purpose = "sample") -> tuple[int, int]:
        """Keep an object until it is fetched."""
        offset = next(self._offsets)
        self._values[offset] = value
        return offset, 0

    def get(self, offset: int, nbytes: int, lease: Any = None) -> Any:
        """The object itself; it is kept no longer."""
        return self._values.pop(offset)

    def peek(self, offset: int, nbytes: int) -> Any:
        """The object itself; it stays."""
        return self._values[offset]

    def drop(self, offset: int) -> None:
        """Forget an object that nobody will fetch."""
        self._values.pop(offset, None)


class SharedRooms:
    """Room for one object of each worker process, from where another one can take it.

    Args:
        segment: Memory to divide among them.
        count: How many workers there are.
    """

    def __init__(self, segment: Segment, count: int) -> None:
        self._segment = segment
        self._store = SharedStore(segment)
        self._room_nbytes = segment.nbytes // count // _ALIGNMENT * _ALIGNMENT

    def put(self, number: int, value: Any) -> int:
        """Copy an object to the room of worker ``number``; returns its size.

        Raises:
            MemoryError: The room is too small.
            PicklingError: The object would not arrive as it is, or may not.
        """

        def allocate(nbytes: int) -> int:
            if nbytes > self._room_nbytes:
                raise MemoryError(f"{nbytes} bytes do not fit a room of {self._room_nbytes}")
            return number * self._room_nbytes

        return self._store.put(allocate, value, "partial")[1]

    def get(self, number: int, nbytes: int) -> Any:
        """A copy of what lies there, which is no longer needed."""
        start = number * self._room_nbytes
        value = self._store.get(start, nbytes)
        self._segment.discard(start, start + nbytes)
        return value


class LocalRooms:
    """The same for worker threads: by reference."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}

    def put(self, number: int, value: Any) -> int:
        """Keep an object."""
        self._values[number] = value
        return 0

    def get(self, number: int, nbytes: int) -> Any:
        """The object; it is kept no longer."""
        return self._values.pop(number)


def keys_of(ledger: Ledger, store: Store, batch: int, k: int, count: int) -> Sequence[Any]:
    """The keys of samples k … k+count-1 of a batch."""
    *_, offset, nbytes, _ = ledger.describe(batch)
    if not offset:
        return ledger.keys(batch, k, count)
    keys: list[Any] = store.peek(offset, nbytes)
    return keys[k : k + count]
