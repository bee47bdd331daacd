"""Memory that is written once, and read by all processes."""

from __future__ import annotations

import pickle
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np

from minato._core.segment import Segment

__all__ = ["ReadOnlyMemory", "SharedArray", "shared_base", "view_of"]


class ReadOnlyMemory:
    """What a function has written.

    A process that is being started maps the same memory. Other pickles hold the content; with Ray a node has it once.

    Attributes:
        buffer: The memory, as an object with the buffer protocol.
        array: shape (nbytes,), uint8, read-only.
    """

    def __init__(self, content: Segment | Any) -> None:
        self._segment = content if isinstance(content, Segment) else None
        # Not an array, in which NumPy would see the base of all views.
        self.buffer: Any = content.mapping if isinstance(content, Segment) else content
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(self.buffer, np.uint8)

    def words(self, dtype: Any, start: int, count: int) -> memoryview:
        """A view of ``count`` numbers of a dtype from byte ``start`` on."""
        nbytes = count * np.dtype(dtype).itemsize
        return memoryview(self.array[start : start + nbytes].view(dtype))

    def __fingerprint__(self) -> np.ndarray[Any, Any]:
        return self.array

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self._segment is not None and get_spawning_popen() is not None:
            return ReadOnlyMemory, (self._segment,)
        return ReadOnlyMemory, (
            pickle.PickleBuffer(self.array) if protocol >= 5 else self.array.tobytes(),
        )


class SharedArray(np.ndarray[Any, Any]):
    """The base of plain arrays that view a :class:`ReadOnlyMemory`."""

    memory: ReadOnlyMemory

    def reduce_view(self, view: np.ndarray) -> tuple[Any, ...]:
        """How a process that is being started makes a view of the same memory."""
        start = (
            view.__array_interface__["data"][0] - self.memory.array.__array_interface__["data"][0]
        )
        return view_of, (self.memory, view.dtype, start, view.shape, view.strides)


def view_of(
    memory: ReadOnlyMemory,
    dtype: np.dtype,
    start: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
) -> np.ndarray[Any, Any]:
    """A plain array that views memory from byte ``start`` on."""
    if 0 in shape:
        return np.empty(shape, dtype)
    base = SharedArray(shape, dtype, memory.buffer, start, strides)
    base.memory = memory
    return np.asarray(base)


def shared_base(array: np.ndarray) -> SharedArray | None:
    """The base of an array that views shared memory; None for other arrays."""
    base: Any = array
    while type(base) is np.ndarray:
        base = base.base
    return base if isinstance(base, SharedArray) else None
