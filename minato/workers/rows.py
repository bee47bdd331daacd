"""Samples that are rows of tensors or arrays: a batch copies them together, without an object for each."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

__all__ = ["Rows", "rows_of"]

Array: TypeAlias = "np.ndarray[Any, Any]"

_INDEX_TYPES = {int, np.int64}
_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""By size, dtypes that NumPy has, in place of ``float8`` and ``bfloat16``."""


class Rows(NamedTuple):
    """Consecutive samples of a batch that are rows.

    Attributes:
        first: The first sample, as the dataset returns it.
        sources: For each tensor of a sample, the C-contiguous array of which it is a row.
        indices: Indices of the rows, in range: int64 of shape (count,), or a slice.
        size: Number of rows.
    """

    first: Any
    sources: list[Array]
    indices: Array | slice
    size: int


def rows_of(dataset: Any, indices: list[Any]) -> Rows | None:
    """Return the rows that are the samples of these indices.

    Args:
        dataset: One of which :func:`minato.workers.fetch.has_rows` is true.

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
    """Return a tensor or an array as a C-contiguous array of numbers; None if it is none."""
    if type(part) is torch.Tensor:
        try:
            if part.is_floating_point() and part.itemsize < 4 and part.dtype is not torch.float16:
                part = part.view(_INTEGERS[part.itemsize])
            array = part.numpy()
        except (RuntimeError, TypeError):  # on a device, sparse, or it requires a gradient
            return None
    elif (
        type(part) in (np.ndarray, np.memmap) and part.dtype.kind in "biufc" and part.dtype.isnative
    ):
        array = np.asarray(part)  # without what np.memmap does for each slice
    else:
        return None
    flags = array.flags
    return array if array.ndim and flags.c_contiguous and flags.aligned else None


def _in_range(indices: list[Any], length: int) -> Array | slice | None:
    if not _INDEX_TYPES.issuperset(map(type, indices)):
        return None
    first, last = min(indices), max(indices)
    if first < 0 or last >= length:
        return None
    if last - first == len(indices) - 1 and indices == list(range(first, last + 1)):
        return slice(first, last + 1)
    return np.array(indices, np.int64)
