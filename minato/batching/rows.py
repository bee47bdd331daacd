"""Samples that are rows of a dataset's own memory, which are copied together."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from minato._support.objects import is_exactly

__all__ = ["Rows", "has_rows", "rows_of"]

Array: TypeAlias = "np.ndarray[Any, Any]"

_INDEX_TYPES = {int, np.int64}  # not bool, which adds a dimension to what it indexes
_ARRAYS = (np.ndarray, np.memmap)
_OF_ROWS = (torch.Tensor, TensorDataset, *_ARRAYS)


class Rows(NamedTuple):
    """Consecutive samples of a batch that are rows.

    Attributes:
        first: The first sample, as the dataset returns it.
        sources: For each tensor of a sample, the memory of which it is a row: shape (rows, bytes), uint8, C-contiguous.
        indices: Indices of the rows, in range: int64 of shape (count,), or a slice.
    """

    first: Any
    sources: list[Array]
    indices: Array | slice
    size: int

    def part(self, k: int, count: int) -> Rows:
        """Rows k … k+count-1 of these."""
        if count == self.size:
            return self
        indices, end = self.indices, k + count
        if isinstance(indices, slice):
            return self._replace(indices=slice(indices.start + k, indices.start + end), size=count)
        return self._replace(indices=indices[k:end], size=count)


def has_rows(dataset: object) -> bool:
    """Whether the samples of a dataset are rows: a tensor, an array, a ``TensorDataset``, or a ``Subset`` of one."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return is_exactly(dataset, _OF_ROWS)


def rows_of(dataset: Any, indices: list[Any]) -> Rows | None:
    """Return the rows that are the samples of these indices.

    Args:
        dataset: One of which :func:`has_rows` is true.

    Returns:
        None if the samples must be loaded one by one: an index is negative, out of range or not an integer, or NumPy
        cannot view the memory as contiguous rows.
    """
    while type(dataset) is Subset:
        if type(dataset.indices) not in (list, tuple, range, np.ndarray):
            return None
        try:
            indices = [dataset.indices[index] for index in indices]
        except (IndexError, TypeError):
            return None
        dataset = dataset.dataset
    sources: list[Array] = []
    for part in dataset.tensors if type(dataset) is TensorDataset else (dataset,):
        source = _memory(part)
        if source is None:
            return None
        sources.append(source)
    if not sources:
        return None
    rows = _in_range(indices, min(map(len, sources)))
    return None if rows is None else Rows(dataset[indices[0]], sources, rows, len(indices))


def _memory(part: Any) -> Array | None:
    """Return the bytes of each row of a tensor or an array of numbers; None if they are not contiguous in memory."""
    kind = type(part)
    try:
        if kind is torch.Tensor and part.is_contiguous():
            array: Array = part.view(torch.uint8).numpy()
        elif kind in _ARRAYS and part.flags.c_contiguous and _holds_numbers(part.dtype):
            array = np.asarray(part).view(np.uint8)  # without what np.memmap does for each slice
        else:
            return None
        return array.reshape(len(part), -1)
    except (RuntimeError, TypeError, ValueError):  # on a device, sparse, or without rows
        return None


def _holds_numbers(dtype: np.dtype) -> bool:
    """Whether a sample's bytes are those in memory; scalars of foreign byte order are not."""
    return dtype.kind in "biufc" and dtype.isnative


def _in_range(indices: list[Any], length: int) -> Array | slice | None:
    if not _INDEX_TYPES.issuperset(map(type, indices)):
        return None
    first, last = min(indices), max(indices)
    if first < 0 or last >= length:
        return None
    if last - first == len(indices) - 1 and indices == list(range(first, last + 1)):
        return slice(first, last + 1)
    return np.array(indices, np.int64)
