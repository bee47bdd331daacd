"""Text of objects and from outside, made safe: it is made whatever the object's own methods do, and can be printed."""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

import numpy as np
import torch

from minato._support.values import plain

__all__ = [
    "digits",
    "message_of",
    "printable",
    "seconds",
    "short",
    "text_of",
    "traceback_of",
    "type_name",
]

_LONGEST = 1000
"""Of a text of an object, in characters."""
_IN_LINES = dict.fromkeys(
    [*range(9), *range(0xB, 0x20), *range(0x7F, 0xA0)], "\N{REPLACEMENT CHARACTER}"
)
_IN_A_LINE = {**_IN_LINES, **dict.fromkeys([9, 10, 13], " ")}


def printable(text: str, *, lines: bool = False) -> str:
    """Return the text without control characters, which a terminal would interpret; ``lines`` keeps breaks and tabs."""
    return text if text.isprintable() else text.translate(_IN_LINES if lines else _IN_A_LINE)


def digits(value: float) -> str:
    """A number to three digits, without an exponent from 1000 on: 0.0123, 48.1, 16600."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:.0f}" if abs(rounded) >= 1000 else f"{rounded:.3g}"


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
