"""The length of a dataset and the bytes of a sample, where they are known."""

from __future__ import annotations

import itertools
import sys
from collections import UserDict
from typing import Any

import numpy as np
import torch

from minato._support.objects import Kind, derives

__all__ = ["length_of", "nbytes_of"]

_NUMBER_BYTES = 8
_MOST_PARTS = 8
"""The size of longer lists and dictionaries is extrapolated from their first values."""
_MOST_LOOKS = 128
"""Objects that are looked at in a sample."""
_TEXTS: tuple[Any, ...] = (str, bytes, bytearray)
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple)
_OF_NUMPY = tuple((each, vars(each)["nbytes"].__get__) for each in (np.ndarray, np.generic))


def length_of(dataset: object) -> int | None:
    """The length of a dataset or sampler; None if it has none."""
    try:
        return len(dataset)  # type: ignore[arg-type]  # its error is an answer
    except Exception:  # classes without a length raise TypeError, NotImplementedError or their own
        return None


def nbytes_of(value: object) -> int:
    """Bytes of the arrays, images, strings and numbers in a sample, at any depth; other objects count as 0.

    Images that are decoded when they are used (Pillow's) count with their pixels. Eight values of a list or dictionary
    stand for all of them, and little of a sample is looked at, so that a sample that refers to much costs nothing.
    """
    try:
        return _nbytes_of(value)
    except (
        Exception
    ):  # sparse tensors have no nbytes but an error, and another thread may change a dictionary
        return 0


def _nbytes_of(sample: object) -> int:
    total = 0.0
    waiting: list[tuple[Any, float]] = [(sample, 1.0)]
    for value, weight in waiting:  # which grows
        kind = type(value)
        if derives(kind, UserDict):
            value = (Kind(kind).dict_of(value) or {}).get("data")
            kind = type(value)
        base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
        if base is None:
            total += weight * _nbytes_of_leaf(value, kind)
        elif (length := base.__len__(value)) and len(waiting) < _MOST_LOOKS:
            values = dict.values(value) if base is dict else base.__iter__(value)
            first = [*itertools.islice(values, _MOST_PARTS)]
            waiting += [(each, weight * length / len(first)) for each in first]
    return int(total)


def _nbytes_of_leaf(value: Any, kind: type) -> int:
    for base, nbytes in _OF_NUMPY:
        if issubclass(kind, base):
            return int(nbytes(value))
    if issubclass(kind, (int, float)):
        return _NUMBER_BYTES
    if issubclass(kind, (torch.Tensor, memoryview)):
        return _nbytes_of_tensor(value)
    for base in _TEXTS:
        if issubclass(kind, base):
            return int(base.__len__(value))
    pillow = getattr(sys.modules.get("PIL.Image"), "Image", None)
    if isinstance(pillow, type) and issubclass(kind, pillow):
        width, height = value.size
        return int(width * height * len(value.getbands()))
    return 0


def _nbytes_of_tensor(value: torch.Tensor | memoryview) -> int:
    try:
        return int(value.nbytes)
    except Exception:  # sparse ones have none
        return 0
