"""What a value from outside is, whatever its own methods do: the plain value that it equals, a number, a safe text."""

from __future__ import annotations

import contextlib
import operator
import traceback
from collections.abc import Callable, Mapping, Set
from typing import Any, cast

import numpy as np
import torch

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
_LONGEST = 1000  # of a text of an object, in characters
_IN_LINES = dict.fromkeys(
    [*range(9), *range(0xB, 0x20), *range(0x7F, 0xA0)], "\N{REPLACEMENT CHARACTER}"
)
_IN_A_LINE = {**_IN_LINES, **dict.fromkeys([9, 10, 13], " ")}


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


# ---- texts ----


def gives_keys(value: object) -> bool:
    """Whether a loop over a value gives keys: one over a dictionary does, and one over a TensorDict gives its rows."""
    if not isinstance(value, Mapping):
        return False
    return type(next(iter(value), None)) is type(next(iter(value.keys()), None))


def printable(text: str, *, lines: bool = False) -> str:
    """Return the text without control characters, which a terminal would interpret; ``lines`` keeps breaks and tabs."""
    return text if text.isprintable() else text.translate(_IN_LINES if lines else _IN_A_LINE)


def digits(value: float) -> str:
    """A number to three digits, without an exponent from 1000 on: 0.0123, 48.1, 16600."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:.0f}" if abs(rounded) >= 1000 else f"{rounded:.3g}"


def counted(number: int | str, things: str) -> str:
    """A number of things, which are given in the plural: ``1 batch``, ``2 batches``."""
    if str(number) == "1":
        things = things.removesuffix("es" if things.endswith(("ches", "sses")) else "s")
    return f"{number} {things}"


def seconds(value: float) -> str:
    """A time to three digits, in the largest unit of which it has one."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if float(f"{value / scale:.3g}") >= 1:
            return f"{digits(value / scale)} {unit}"
    return f"{1e9 * value:.0f} ns" if value else "0 s"


def text_of(value: object) -> str:
    """The ``repr`` of an object, or the plain value that it equals: never an error or long, in every encoding."""
    try:
        text = repr(_shown(value))
    except Exception as error:
        return f"<{type_name(value)} whose repr() raised {type_name(error)}>"
    return short(text)


def _shown(value: Any) -> Any:
    kind = type(value)
    if kind is list:
        return list(plain(value))
    # The repr of a large array is short, its content is not.
    return value if issubclass(kind, (torch.Tensor, np.ndarray)) and value.ndim else plain(value)


def message_of(error: BaseException) -> str:
    """Return the text of an exception, as ``str(error)``."""
    try:
        text = str(error)
    except Exception as raised:
        return f"<{type_name(error)} whose str() raised {type_name(raised)}>"
    return _encodable(text)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception, with its causes, as Python prints it."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as raised:  # by an attribute of it, of a cause or of a frame's module
        return f"{message_of(error)} (its traceback cannot be formatted: {type_name(raised)})"
    return _encodable(text)


def type_name(value: object, *, full: bool = False, module: bool = False) -> str:
    """The name of an object's type, whatever that answers; ``full``: ``Outer.Inner``, ``module``: its module, too."""
    kind = type(value)
    name = _string(kind, "__qualname__" if full or module else "__name__") or "object"
    of = _string(kind, "__module__") if module else ""
    return f"{of}.{name}" if of else name


def short(text: str, most: int = _LONGEST) -> str:
    """Return a text that every encoding has, cut after ``most`` characters."""
    return _encodable(text if len(text) <= most else f"{text[: most - 3]}...")


def _string(kind: type, attribute: str) -> str:
    found: object = None
    with contextlib.suppress(Exception):
        found = getattr(kind, attribute)
    return short(found) if isinstance(found, str) else ""


def _encodable(text: str) -> str:
    """Return the text without lone surrogates, which no encoding has, and as a plain string."""
    return str.encode(text, "utf-8", "backslashreplace").decode()
