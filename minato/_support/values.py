"""Values of NumPy, torch, pandas and subclasses of Python's own types, as the plain values that they equal."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Set
from typing import Any, cast

import numpy as np
import torch

__all__ = ["integer_of", "items_of", "number_of", "plain"]

_PLAIN = frozenset((int, str, float, bool, bytes, complex, type(None)))
_NAN = float("nan")
_NUMBERS = (np.bool_, np.integer, np.floating, np.complexfloating)
_CONVERTED: dict[type, Callable[[Any], object]] = {
    int: int.__pos__,
    str: str.__str__,
    float: float.__pos__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    complex: complex.__pos__,
}
"""The value of a subclass without the subclass's own methods."""


def plain(value: Any) -> Any:
    """Return the plain value that a value equals, which hashes and prints alike wherever it comes from.

    Numbers and strings of NumPy, tensors of one number, and subclasses of ``int``, ``str``, ``float``, ``bytes`` and
    ``complex`` become those of Python; arrays, tensors, lists and tuples become tuples of plain values. NaN is one
    value, as None is. All other objects stay what they are.
    """
    kind = type(value)  # not isinstance(), which asks the object for its __class__
    if kind in _PLAIN:
        return _NAN if kind is float and value != value else value
    if issubclass(kind, (list, tuple)):
        return tuple(map(plain, value))
    if issubclass(kind, _NUMBERS):
        number = value.item()
        if isinstance(number, np.floating):  # a long double, whose plain form is the nearest float
            number = float(number)
        elif isinstance(number, np.complexfloating):
            number = complex(number)
        return plain(number)
    if issubclass(kind, torch.Tensor):
        return plain(value.detach().tolist())
    if issubclass(kind, np.ndarray):
        return plain(value.tolist())
    for base, converted in _CONVERTED.items():
        if issubclass(kind, base):
            return plain(converted(value))
    return value


def integer_of(value: object) -> int | None:
    """Return the integer that a value equals where it indexes a list, as tensors of one do; None if it is none."""
    if type(value) is int:
        return value
    if type(value) is np.bool_:
        return int(value)
    try:
        return int(operator.index(cast("int", value)))
    except Exception:  # __index__ may be a method of the user's
        return None


def number_of(value: object) -> int | float | None:
    """Return the number that a value equals; None if it is no number, or a bool."""
    try:
        found = plain(value)
    except Exception:
        return None
    if isinstance(found, (int, float)):
        return None if isinstance(found, bool) else found
    if isinstance(found, (str, bytes, complex, tuple)) or not hasattr(type(found), "__float__"):
        return None
    try:
        return float(found)  # a Decimal or a Fraction
    except Exception:
        return None


def items_of(name: str, values: Any) -> list[Any]:
    """Return the items of a sequence by their positions, whatever holds them.

    Lists, tuples, ranges, arrays, tensors, and what pandas, polars and pyarrow have; the rows of a table are tuples.

    Raises:
        TypeError: The values have no order, or are not several; the message names them.
    """
    if isinstance(values, (Mapping, Set)):
        raise TypeError(
            f"{name} is a {type(values).__name__}, which has no positions: give a list with one item for each key"
        )
    if isinstance(values, torch.Tensor):
        values = values.detach()
    for method, arguments in (
        ("itertuples", {"index": False, "name": None}),
        ("iter_rows", {}),
        ("tolist", {}),
        ("to_pylist", {}),
        ("to_list", {}),
    ):
        found = getattr(values, method, None)
        if callable(found):
            values = found(**arguments)
            break
    if not hasattr(type(values), "__iter__") and hasattr(type(values), "__getitem__"):
        # By its length: a dataset need not raise IndexError at its end.
        return [values[i] for i in range(len(values))]
    try:
        return list(values)
    except TypeError:
        raise TypeError(
            f"{name} is a {type(values).__name__}: give a list with one item for each key"
        ) from None
