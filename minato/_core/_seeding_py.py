"""Keys of samples, and the words of a generator's state grown from a key."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from itertools import starmap
from operator import index as as_integer
from typing import Any, final

import numpy as np

__all__ = ["StateSnapshot", "StateWriter", "mix_seed", "sample_key", "spread_seed"]

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_SHIFT_16, _SHIFT_15 = np.uint32(16), np.uint32(15)
_FACTOR_1, _FACTOR_2 = np.uint32(0x21F0AAAD), np.uint32(0xD35A2D97)
_COMPARED_BYTES = 64  # at each end of a span
_TOP_BIT = np.uint32(0x80000000)


def _avalanche(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def mix_seed(seed: int, epoch: int, index: int) -> int:
    """Return the 64-bit key of a sample; every input bit reaches every output bit.

    The inputs count modulo 2**64. For a given seed and epoch no two indices share a key.
    """
    return sample_key(spread_seed(seed), epoch, index)


def spread_seed(seed: int) -> int:
    """Return the int64 that stands for a seed in :func:`sample_key`; each of its bits depends on all of the seed."""
    spread = _avalanche(as_integer(seed) + _GOLDEN)
    return spread - (spread >> 63 << 64)


def sample_key(spread: int, epoch: int, index: int) -> int:
    """Return the key of a sample, as :func:`mix_seed`, for a seed that is spread.

    It depends on the xor of seed and epoch: under another seed, an epoch with another number has the same keys.
    """
    key = _avalanche(((as_integer(spread) ^ as_integer(epoch)) & _MASK) + _GOLDEN)
    return _avalanche((key ^ (as_integer(index) & _MASK)) + _GOLDEN)


def _check_block(words: int, width: int) -> None:
    if width not in (4, 8):
        raise ValueError(f"width is 4 or 8 bytes, not {width}")
    if not 0 <= words <= 0x7FFFFFFF:
        raise ValueError(f"words is between 0 and 2**31 - 1, not {words}")


def _array_at(address: int, words: int, width: int) -> np.ndarray:
    memory = memoryview((ctypes.c_uint8 * (words * width)).from_address(address))
    return np.frombuffer(memory, dtype=np.dtype(f"u{width}"))


def _grow(key: int, streams: list[int], words: int) -> np.ndarray:
    """Return uint32 of shape (streams, words): one call of numpy for all rows of each operation."""
    opened = []
    for stream in streams:
        low = _avalanche(key + (stream + 1) * _GOLDEN)
        high = _avalanche(low + _GOLDEN)
        opened.append((low & 0xFFFFFFFF, (high & 0xFFFFFFFF) | 1, low >> 32, high >> 32))
    start, step, first, second = np.array(opened, dtype=np.uint32).T[:, :, np.newaxis]
    x: np.ndarray = np.arange(words, dtype=np.uint32) * step
    x += start
    x ^= x >> _SHIFT_16
    x *= _FACTOR_1
    x ^= first
    x ^= x >> _SHIFT_15
    x *= _FACTOR_2
    x ^= second
    x ^= x >> _SHIFT_15
    x[:, :1] |= _TOP_BIT
    return x


@final
class StateWriter:
    """Rewrites the states of several generators for one sample, in one call.

    Args:
        seed: First input of :func:`sample_key`.
        blocks: ``(address, words, stream, width)`` of each state: writable memory of ``words * width`` bytes, aligned
            to ``width``; different streams of one key are independent; width 4 stores uint32, and 8 the same values as
            uint64. The top bit of a block's first value is always set: the state is never all zero.
        cells: ``(address, value)`` of int32 words that are reset too (positions, caches).

    The memory must outlive the writer.

    Raises:
        ValueError: A width is neither 4 nor 8, or ``words`` is out of range.
    """

    def __init__(
        self,
        seed: int,
        blocks: list[tuple[int, int, int, int]],
        cells: list[tuple[int, int]],
    ) -> None:
        self._seed = as_integer(seed)
        for _, words, _, width in blocks:
            _check_block(words, width)
        blocks = [block for block in blocks if block[1] > 0]
        self._arrays = [_array_at(address, words, width) for address, words, _, width in blocks]
        self._streams = [as_integer(stream) for _, _, stream, _ in blocks]
        self._words = max((words for _, words, _, _ in blocks), default=0)
        self._cells = [(ctypes.c_int32.from_address(where), value) for where, value in cells]

    def write(self, epoch: int, index: int) -> None:
        """Fill every block from ``sample_key(seed, epoch, index)`` and set every cell."""
        key = sample_key(self._seed, epoch, index)
        if self._arrays:
            rows = _grow(key, self._streams, self._words)
            for array, row in zip(self._arrays, rows, strict=True):
                array[:] = row[: len(array)]
        for cell, value in self._cells:
            cell.value = value


def _differs(span: tuple[int, int], copy: bytes) -> bool:
    address, nbytes = span
    head = min(nbytes, _COMPARED_BYTES)
    ends = (ctypes.string_at(at, head) for at in (address, address + nbytes - head))
    return (*ends,) != (copy[:head], copy[nbytes - head :])


@final
class StateSnapshot:
    """A copy of the states of generators, to see whether anything in them changes.

    Args:
        spans: ``(address, nbytes)`` of each part. Of a long one, which holds the words of a twister, the ends are
            compared: a twist and a seed change all words.
        rests: Each returns a part that has no address.

    Attributes:
        rests: What they returned when the copy was taken.

    The memory must outlive the snapshot.
    """

    __slots__ = "_copies", "_parts", "_spans", "rests"

    def __init__(
        self, spans: list[tuple[int, int]], rests: Iterable[Callable[[], object]] = ()
    ) -> None:
        self._spans = [(as_integer(address), as_integer(nbytes)) for address, nbytes in spans]
        self._copies: list[bytes] = []
        self._parts = list(rests)
        self.rests: list[Any] = []
        self.take()

    def take(self) -> None:
        """Copy all parts as they are now."""
        self._copies = list(starmap(ctypes.string_at, self._spans))
        self.rests = [part() for part in self._parts]

    def holds(self) -> bool:
        """Whether each part still is as it was when the copy was taken."""
        pairs = zip(self._spans, self._copies, strict=True)
        return not any(starmap(_differs, pairs)) and self.rests == [part() for part in self._parts]

    def restore(self) -> None:
        """Write all parts that have an address back as they were then."""
        for (address, nbytes), copy in zip(self._spans, self._copies, strict=True):
            ctypes.memmove(address, copy, nbytes)

    def copies(self) -> list[bytes]:
        """The parts as they were then, each as bytes."""
        return [*self._copies]
