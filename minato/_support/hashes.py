"""Hashes that are the same in every process."""

from __future__ import annotations

import hashlib
import io
import pickle
from numbers import Number
from typing import Any

from minato._support.text import text_of
from minato._support.values import integer_of, plain

__all__ = ["index_hash", "key_hash"]


def index_hash(index: Any) -> int:
    """Return an integer for an index: equal ones for equal indices, in any process, and never an error.

    It is the index itself for integers, also for those of NumPy and tensors of one, and otherwise its
    :func:`key_hash`.
    """
    if type(index) is int:
        return index
    number = None if issubclass(type(index), str) else integer_of(index)
    return key_hash(index) if number is None else number


def key_hash(key: Any) -> int:
    """Return a 64-bit hash of a key's content, the same for all keys that equal it, of whichever type.

    Numbers count by their value; strings, bytes, tuples, lists, arrays and sets by their content; other objects by
    their pickle, or by their ``repr`` if they cannot be pickled.
    """
    try:
        digest = _digest(plain(key))
    except Exception:  # a key's own methods may raise anything
        digest = _hashed(b"text" + text_of(key).encode())
    return int.from_bytes(digest, "little")


def _digest(value: Any) -> bytes:
    """The digest of a plain value, or of an object that has no plain value."""
    kind = type(value)  # not isinstance(), which asks the value for its __class__
    if kind is str:
        return _hashed(b"str" + value.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        return _hashed(b"bytes" + value)
    if kind is tuple:
        return _hashed(b"sequence" + b"".join(map(_digest, value)))
    if issubclass(kind, (set, frozenset)):
        return _hashed(b"set" + b"".join(sorted(_digest(plain(item)) for item in value)))
    if issubclass(kind, Number) and value == value:  # the hash of NaN differs between processes
        number = hash(value)
        return _hashed(b"%s%d" % (b"whole" if number == value else b"number", number))
    to = io.BytesIO()
    pickler = pickle.Pickler(to, 4)
    # Without the memo, equal keys have equal bytes even if some share their parts.
    pickler.fast = True
    pickler.dump(value)
    return _hashed(b"object" + to.getvalue())


def _hashed(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()
