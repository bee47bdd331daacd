"""Fingerprints of transforms: their code and parameters in a few bytes."""

from __future__ import annotations

import functools
import hashlib
import pickle
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from minato._support.counters import Counters

__all__ = ["fingerprint"]

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
"""Types whose ``repr`` is complete."""


def fingerprint(*parts: object) -> bytes:
    """Sixteen bytes that change when the code or the parameters of a part do; the same in every run.

    Functions count by their byte code, constants, defaults and closures; objects by the functions of their classes and
    by their attributes; arrays and tensors by content. Functions that a function calls do not count. An object with a
    method ``__fingerprint__`` counts by its result, in the place of its attributes.

    Raises:
        TypeError: A part holds an object that cannot be distinguished from others of its type.
    """
    hasher = _Hasher()
    for part in parts:
        hasher.add(part)
    return hasher.digest.digest()


class _Hasher:
    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._seen: dict[
            int, tuple[int, Any]
        ] = {}  # keeps the objects alive, so that no id is reused

    def add(self, value: Any) -> None:
        kind = type(value)
        self._label(f"{kind.__module__}.{kind.__qualname__}")
        if kind in _PLAIN:
            self._label(repr(value))
            return
        if id(value) in self._seen:
            self._label("again", str(self._seen[id(value)][0]))
            return
        self._seen[id(value)] = len(self._seen), value
        if kind in (list, tuple):
            # A source may have a million keys.
            if _PLAIN.issuperset(map(type, value)):
                self._label(repr(value))
            else:
                self._all(value)
        elif kind is dict:
            self._all([part for item in value.items() for part in item])
        elif kind in (set, frozenset):
            self._label(*sorted(fingerprint(item).hex() for item in value))
        elif isinstance(value, torch.Tensor):
            self._array(value.detach().cpu().contiguous().view(-1).numpy(), value.shape)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._array(value, value.shape)
        elif isinstance(value, Counters):
            pass  # counts are no part of an identity
        elif isinstance(value, CodeType):
            self._label(value.co_code.hex(), *value.co_names)
            self._all(value.co_consts)
        elif isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            self._all([value.__code__, value.__defaults__, value.__kwdefaults__, cells])
        elif isinstance(value, MethodType):
            self._all([value.__self__, value.__func__])
        elif isinstance(value, functools.partial):
            self._all([value.func, value.args, value.keywords])
        elif isinstance(value, (type, BuiltinFunctionType, np.ufunc)):
            self._label(f"{getattr(value, '__module__', '')}.{value.__name__}")
        else:
            self._object(value)

    def _object(self, value: object) -> None:
        for base in type(value).__mro__:
            for name, attribute in sorted(vars(base).items()):
                if isinstance(attribute, FunctionType):
                    self._label(name)
                    self.add(attribute.__code__)
        said = getattr(type(value), "__fingerprint__", None)
        if said is not None:
            self.add(said(value))
            return
        own = getattr(type(value), "__getstate__", None)
        if own is not getattr(object, "__getstate__", None):  # what lasts, says the object
            self.add(value.__getstate__())
            return
        if state := getattr(value, "__dict__", None):
            self.add(dict(state))
            return
        try:
            self._label(pickle.dumps(value, 4).hex())
        except Exception as error:
            raise TypeError(
                f"{value!r} of type {type(value).__name__} has no fingerprint: give the cache a version= of your own"
            ) from error

    def _array(self, values: Any, shape: Any) -> None:
        self._label(str(values.dtype), str(tuple(shape)))
        self.digest.update(np.ascontiguousarray(values).tobytes())

    def _all(self, values: Any) -> None:
        self._label(str(len(values)))
        for value in values:
            self.add(value)

    def _label(self, *texts: str) -> None:
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            self.digest.update(len(data).to_bytes(8, "little") + data)
