"""The length of a dataset and the bytes of a sample, where they are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["length_of", "nbytes_of"]

_NUMBER_BYTES = 8
_MOST_PARTS = 8
"""The size of longer lists is extrapolated from their first elements."""


def length_of(dataset: Any) -> int | None:
    """The length of a dataset or sampler; None if it has none."""
    try:
        return len(dataset)
    except (
        Exception
    ):  # classes without a length raise TypeError or NotImplementedError, and others what they like
        return None


def nbytes_of(value: object) -> int:
    """Bytes of the arrays, images, strings and numbers in a sample, at any depth; other objects count as 0.

    Images that are decoded when they are used (Pillow's) count with their pixels.
    """
    try:
        return _nbytes_of(value)
    except (
        Exception
    ):  # sparse tensors have no nbytes but an error, and containers may be of the user's making
        return 0


def _nbytes_of(value: Any) -> int:
    nbytes = getattr(value, "nbytes", None)  # tensors, arrays, memoryviews
    if type(nbytes) is int:
        return nbytes
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, (int, float)):
        return _NUMBER_BYTES
    if isinstance(value, Mapping):
        return sum(map(nbytes_of, value.values()))
    if isinstance(value, (list, tuple)):
        counted = value[:_MOST_PARTS]
        total = sum(map(nbytes_of, counted))
        return total * len(value) // len(counted) if counted else 0
    if hasattr(value, "getbands"):
        width, height = value.size
        return int(width * height * len(value.getbands()))
    return 0
