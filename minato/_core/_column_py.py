"""Lists of Python objects in one stretch of memory."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from operator import index as as_index
from typing import Any

import numpy as np

__all__ = ["Column"]

_DTYPES = {"bool": np.bool_, "int": np.int64, "float": np.float64}


class Column:
    """A list that cannot be changed. Each access makes new objects, equal to those that were stored.

    Args:
        layout: What the list consists of, ``(kind, length, start, offsets, keys, children)``. ``kind`` is one of

            * ``"bool"``, ``"int"``, ``"float"``: 1 or 8 bytes an item, from byte ``start`` of the memory;
            * ``"str"`` (UTF-8), ``"bytes"``, ``"pickle"``: the bytes of all items from ``start``; item ``i`` ends
              where item ``i + 1`` begins, and the ``length + 1`` beginnings, as int64, stand from byte ``offsets``;
            * ``"list"``: item ``i`` is ``children[0][begin:end]``, with beginnings as above;
            * ``"tuple"``: one column for each place;
            * ``"dict"``: one column for each key, in their order.

            Every start is a multiple of 8.
        memory: shape (nbytes,), uint8, C-contiguous. Not written by anybody as long as the column lives.
    """

    def __init__(self, layout: tuple[Any, ...], memory: np.ndarray[Any, Any]) -> None:
        kind, length, start, offsets, keys, children = layout
        self._kind: str = kind
        self._length: int = length
        self._keys: tuple[Any, ...] = keys
        self._children = tuple(Column(child, memory) for child in children)
        self._data = memory[start:]
        self._offsets = memory[:0].view(np.int64)
        if kind in _DTYPES:
            dtype = np.dtype(_DTYPES[kind])
            self._data = memory[start : start + length * dtype.itemsize].view(dtype)
        elif kind not in ("tuple", "dict"):
            self._offsets = memory[offsets : offsets + 8 * (length + 1)].view(np.int64)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """One item, or a list of those of a slice."""
        if isinstance(index, slice):
            return [self._get(i) for i in range(*index.indices(self._length))]
        i = as_index(index)
        if i < 0:
            i += self._length
        if not 0 <= i < self._length:
            raise IndexError(f"index {index} is out of range for {self._length} items")
        return self._get(i)

    def __iter__(self) -> Iterator[Any]:
        return map(self._get, range(self._length))

    def _get(self, i: int) -> Any:
        kind = self._kind
        if kind in _DTYPES:
            return self._data[i].item()
        if kind == "tuple":
            return tuple(child._get(i) for child in self._children)
        if kind == "dict":
            values = (child._get(i) for child in self._children)
            return dict(zip(self._keys, values, strict=True))
        begin, end = self._offsets[i : i + 2].tolist()
        if kind == "list":
            return [self._children[0]._get(j) for j in range(begin, end)]
        data = self._data[begin:end].tobytes()
        if kind == "str":
            return data.decode("utf-8", "surrogatepass")
        return data if kind == "bytes" else pickle.loads(data)
