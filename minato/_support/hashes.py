"""Hashes that are the same in every process: of an index, and of objects with the code that defines them."""

from __future__ import annotations

import copyreg
import functools
import hashlib
import importlib.metadata
import io
import linecache
import marshal
import os
import pickle
import random
import sys
import sysconfig
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from itertools import chain
from numbers import Number
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from minato._support.objects import (
    MEMBERS,
    attribute,
    in_any_process,
    is_exactly,
    module_of,
    mro_of,
    name_of,
    parts_of,
    vars_of,
)
from minato._support.pickling import INTEGERS, span_of
from minato._support.values import integer_of, message_of, plain, printable, text_of, type_name

_MOST_OBJECTS = 5_000_000
_MOST_BYTES = 4 << 30
"""Limits of one fingerprint, which is made when an epoch begins; a minute at most."""
_PLAIN = frozenset(map(id, (type(None), bool, int, float, complex, str, bytes)))
_NESTED: dict[int, Callable[[Any], Any]] = {
    id(list): iter,
    id(tuple): iter,
    id(dict): lambda held: chain(held, held.values()),
}
"""What containers of plain values hold, by the id of their type."""
GENERATORS = (
    *(random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator),
    torch.Generator,
)
_OF_CLASSES = frozenset(
    [
        *("__annotations__", "__annotations_cache__", "__annotate_func__", "__slotnames__"),
        *("__static_attributes__", "__conditional_annotations__"),
        "__module__",  # another one in a spawned process
    ]
)
"""Attributes of classes that Python sets, some when they are asked for, or in any order; name and text say the same."""
_OF_PYTHON = 1 << 9
"""A flag of types that a ``class`` statement may have made; the classes of C have no attribute of their own."""
_STANDARD = b"the standard library"
_CONSTANT_NBYTES = 4
"""The bytecode of a function that returns a constant in Python 3.12, which keeps no columns for it."""
_END: Any = object()


def index_hash(index: object) -> int:
    """An integer for an index, the same for equal ones in any process, never an error: an integer is its own."""
    if type(index) is int:
        return index
    number = None if issubclass(type(index), str) else integer_of(index)
    return key_hash(index) if number is None else number


def key_hash(key: object) -> int:
    """Return a 64-bit hash of a key's content, the same for all keys that equal it, of whichever type.

    Numbers count by their value; strings, bytes, tuples, lists, arrays, sets and dicts by their content; other objects
    by their pickle, in which tensors count by content, too, or by their ``repr`` if they cannot be pickled.
    """
    try:
        digest = _digest(plain(key))
    except Exception:  # a key's own methods may raise anything
        digest = _hashed(b"text" + text_of(key).encode())
    return int.from_bytes(digest, "little")


def _digest(value: Any) -> bytes:
    kind = type(value)  # not isinstance(), which asks the value for its __class__
    if kind is str:
        return _hashed(b"str" + value.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        return _hashed(b"bytes" + value)
    if kind is tuple:
        return _hashed(b"sequence" + b"".join(map(_digest, value)))
    if issubclass(kind, (set, frozenset)):
        return _hashed(b"set" + b"".join(sorted(_digest(plain(item)) for item in value)))
    if issubclass(kind, dict):
        pairs = (tuple(map(plain, pair)) for pair in dict.items(value))
        return _hashed(b"dict" + b"".join(sorted(map(_digest, pairs))))
    if issubclass(kind, Number) and value == value:  # the hash of NaN differs between processes
        number = hash(value)
        return _hashed(b"%s%d" % (b"whole" if number == value else b"number", number))
    to = io.BytesIO()
    pickler = _ByContent(to, 4)
    # Without the memo, equal keys have equal bytes even if some share their parts.
    pickler.fast = True
    pickler.dump(value)
    return _hashed(b"object" + to.getvalue())


class _ByContent(pickle.Pickler):
    """Pickles tensors by their content, as torch's own way has an address in it, and what a script defines by name."""

    def reducer_override(self, value: object) -> Any:
        if issubclass(type(value), torch.Tensor):
            return tuple, (plain(value),)
        # A spawned process has the main module under another name, and pickle goes by that.
        if isinstance(value, type) and module_of(value) == "__main__":
            return str, (f"__main__.{name_of(value)}",)
        if isinstance(value, FunctionType) and in_any_process(value.__module__) == "__main__":
            return str, (f"__main__.{value.__qualname__}",)
        return NotImplemented


def _hashed(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


# ---- fingerprints ---------------------------------------------------------------------------


def fingerprint(*parts: object) -> bytes:
    """Sixteen bytes that change when the code or the state of a part may have; the same in every run.

    Classes and functions count by the content of the files that define them, and those of installed packages by name
    and version; also their base classes, closures, defaults and decorators. Objects count by the state that pickle
    would store, arrays and tensors by content. An object with a method ``__fingerprint__`` counts by its result
    instead. Code and data in other files that a function uses are not seen. TypeError: a part cannot be pickled, is too
    large, or was defined where its source cannot be read.
    """
    return _Walk().digest((sys.version_info[:2], parts))


class _Optional(NamedTuple):
    """A part that counts by its type alone if it has no fingerprint."""

    value: object


class _Frame(NamedTuple):
    """A value some of whose parts have their digests already."""

    value: object
    parts: Generator[object, None, None]
    optional: bool
    digests: list[bytes]


class _Walk:
    """Digests of values. One that is met again costs nothing, and one that holds itself ends there."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[bytes, object]] = {}  # the object too, so that no id is reused
        self._frames: list[_Frame] = []
        self._open: dict[int, int] = {}
        self._classes_of_files = 0
        """How many open classes have a file, which tells of functions that a program has made for them."""
        self._objects = self._nbytes = 0

    def digest(self, root: object) -> bytes:
        self._enter(root, False)
        while True:
            frame = self._frames[-1]
            try:
                part: Any = next(frame.parts, _END)
                if part is _END:
                    found = self._leave(frame)
                    if not self._frames:
                        return found
                    self._frames[-1].digests.append(found)
                    continue
                optional = type(part) is _Optional
                value = part.value if optional else part
                known = self._known(value)
                if known is None:
                    self._enter(value, optional)
                else:
                    frame.digests.append(known)
            except TypeError:
                if not self._took_type():
                    raise

    def _known(self, value: object) -> bytes | None:
        """The digest of a plain value, or of one that was met before."""
        if id(type(value)) in _PLAIN:
            return self._hash(_atom(value))
        if id(value) in self._done:
            return self._done[id(value)][0]
        if id(value) in self._open:
            return self._hash(b"circle %d" % (len(self._frames) - self._open[id(value)]))
        return None

    def _enter(self, value: object, optional: bool) -> None:
        self._open[id(value)] = len(self._frames)
        self._frames.append(_Frame(value, self._parts(value), optional, []))

    def _leave(self, frame: _Frame) -> bytes:
        self._frames.pop()
        del self._open[id(frame.value)]
        is_set = is_exactly(frame.value, (set, frozenset))
        digests = sorted(frame.digests) if is_set else frame.digests
        found = self._hash(b"".join(digests))
        self._done[id(frame.value)] = found, frame.value
        return found

    def _took_type(self) -> bool:
        """Take the type of the innermost open value that is optional for it; False if there is none."""
        while self._frames:
            frame = self._frames.pop()
            del self._open[id(frame.value)]
            frame.parts.close()
            if frame.optional:
                self._frames[-1].digests.append(self._hash(_name(type(frame.value)).encode()))
                return True
        return False

    def _hash(self, data: bytes) -> bytes:
        self._count(len(data))
        return hashlib.blake2b(data, digest_size=16).digest()

    def _count(self, nbytes: int) -> None:
        self._objects += 1
        self._nbytes += nbytes
        if self._objects > _MOST_OBJECTS or self._nbytes > _MOST_BYTES:
            self._frames = []
            raise TypeError(
                f"the dataset and the transforms hold more than {_MOST_OBJECTS} objects or {_MOST_BYTES >> 30} GiB, "
                "too much for a fingerprint in each epoch"
            )

    def _parts(self, value: Any) -> Generator[Any, None, None]:
        kind = type(value)
        yield _name(kind)
        if is_exactly(value, (list, tuple, dict)):
            content = _plain_content(value)
            if content is not None:  # a source may have a million keys
                yield content
            else:
                yield from chain.from_iterable(list(value.items())) if kind is dict else list(value)
        elif is_exactly(value, (set, frozenset)):
            yield from value
        elif is_exactly(value, (np.ndarray, np.memmap)) and not value.dtype.hasobject:
            yield repr(value.dtype)
            yield value.shape
            yield self._content(value)
        elif issubclass(kind, torch.Tensor):
            yield from self._tensor(value)
        elif issubclass(kind, GENERATORS):
            pass  # they change with each sample; a sample that draws is not cached
        elif kind is FunctionType:
            yield from self._function(value)
        elif issubclass(kind, type):
            yield from self._class(value)
        elif kind is MethodType:
            yield from (part for _, part in parts_of(value))
        elif kind is ModuleType:
            yield in_any_process(value.__name__)
            yield _source(getattr(value, "__file__", None) or "", value.__name__, defined=value)
        elif kind is BuiltinFunctionType:
            yield value.__self__
            yield value.__qualname__
        else:
            yield from _state(value)

    def _content(self, array: np.ndarray) -> bytes:
        found, (span, before) = hashlib.blake2b(), span_of(array)
        if span.nbytes < array.nbytes:  # items overlap, as those of a sliding window
            found.update(repr((before, array.strides)).encode())
            array = span
        self._count(array.nbytes)  # before it reads a file
        flat = np.ascontiguousarray(array).reshape(-1)
        found.update(flat.view(np.uint8) if flat.size else b"")
        return found.digest()

    def _tensor(self, value: torch.Tensor) -> Iterator[Any]:
        odd = value.layout is not torch.strided or value.is_quantized or value.is_nested
        if odd or value.is_meta:
            raise TypeError(f"a tensor of {value.dtype} and {value.layout} has no fingerprint")
        plain_one = value.detach().cpu().resolve_conj().resolve_neg()
        yield str(value.dtype)
        yield tuple(value.shape)
        # NumPy does not know all dtypes, but one of each size.
        yield self._content(plain_one.view(INTEGERS.get(value.itemsize, value.dtype)).numpy())
        yield type(value)
        yield vars(value)

    def _function(self, function: FunctionType) -> Iterator[Any]:
        code = function.__code__
        name = f"{in_any_process(function.__module__)}.{function.__qualname__}"
        text = _source(code.co_filename, function.__module__, function.__globals__, defined=code)
        if text is None and not self._classes_of_files:
            raise TypeError(
                f"the source of {name} cannot be read (it was defined in {code.co_filename!r}), so that it has no "
                "fingerprint: define it in a file"
            )
        yield name
        yield text
        if text == _STANDARD:  # whose closures hold locks and registers
            yield vars(function).get("__wrapped__")
            return
        places = list(code.co_positions())
        if function.__name__ == "<lambda>" and not any(column for *_, column in places):
            if len(code.co_code) > _CONSTANT_NBYTES:
                raise TypeError(
                    f"{name} has no fingerprint, as Python keeps no columns, which tell it from others in its line: "
                    "make it a function with a name"
                )
            yield code.co_consts
        yield repr(places)
        for part, value in parts_of(function):
            is_cell = part not in (".__defaults__", ".__kwdefaults__")
            yield _Optional(value) if is_cell and _is_installed(code.co_filename) else value
        yield from map(_Optional, chain.from_iterable(list(vars(function).items())))

    def _class(self, cls: type) -> Iterator[Any]:
        module = module_of(cls)
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        text = _source(file, module, defined=cls)
        yield _name(cls)
        yield text
        yield from (base for base in mro_of(cls)[1:] if base is not object)
        yield type(cls)
        if text == _STANDARD or _is_installed(file) or not cls.__flags__ & _OF_PYTHON:
            return
        self._classes_of_files += text is not None
        try:
            # A list: pickle adds to a class that it meets.
            for name, attribute in list(vars_of(cls).items()):
                if name in _OF_CLASSES or is_exactly(attribute, MEMBERS):
                    continue
                yield name
                yield from _pieces_of(attribute)
        finally:
            self._classes_of_files -= text is not None


def _plain_content(value: Any) -> bytes | None:
    """The content of a list, tuple or dictionary that holds plain values, or such containers of them, four deep."""
    level = [value]
    for _ in range(5):
        kinds = {id(type(each)) for each in level}
        if kinds <= _PLAIN:
            return marshal.dumps(value, 0)  # this version does not ask which values are one object
        if not kinds <= _PLAIN | _NESTED.keys():
            return None
        nested = [each for each in level if id(type(each)) in _NESTED]
        level = [part for each in nested for part in _NESTED[id(type(each))](each)]
    return None


def _atom(value: object) -> bytes:
    if type(value) is bytes:
        return b"b" + value
    text = f"{value:x}" if type(value) is int else value if type(value) is str else repr(value)
    return f"{type(value).__name__} {text}".encode("utf-8", "surrogatepass")


def _state(value: object) -> Iterator[Any]:
    """The class of an object, and what pickle would store."""
    kind = type(value)
    yield kind
    said = attribute(kind, "__fingerprint__")
    if said is not None:
        yield said(value)
        return
    try:
        reduce = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception as error:
        raise TypeError(
            f"an object of type {type_name(value, module=True)} has no fingerprint, as it cannot be pickled "
            f"({type(error).__name__}: {printable(message_of(error))[:200]})"
        ) from error
    if isinstance(reduced, str):
        yield reduced
        yield sys.modules.get(getattr(value, "__module__", None) or "")
        yield getattr(value, "__wrapped__", None)
        return
    for number, part in enumerate(reduced):  # the fourth and fifth are iterators over items
        yield list(part) if number in (3, 4) and part is not None else part
    if isinstance(value, np.ndarray):  # whose own way leaves them out
        yield getattr(value, "__dict__", None)


def _pieces_of(value: object) -> Iterator[object]:
    """An attribute of a class, and the functions behind it: those of methods, properties and decorators."""
    if type(value) is FunctionType:
        yield value
        return
    # A descriptor has no pickle, and one of a class of the program's may have a state.
    yield _Optional(value)
    if not isinstance(value, type) and (callable(value) or hasattr(type(value), "__get__")):
        inner = [part for _, part in parts_of(value)]
        for part in (*inner, attribute(value, "func"), attribute(value, "__wrapped__")):
            if part is not value and part is not None:
                yield from _pieces_of(part)


# ---- files ----------------------------------------------------------------------------------


def _source(
    file: str, module: str, variables: dict[str, object] | None = None, *, defined: object
) -> bytes | None:
    """What stands for the text that defines something: a digest of its file, or the version of an installed package.

    The global variables of a function may know how to load the text. The file is read once for each module, class or
    code: an editor may change it while this program runs the former code. None if the text cannot be found.
    """
    known = _sources.get(id(defined))
    if known is None or known[1]() is not defined:
        # Not the class itself: one that is made in a function may hold a whole dataset.
        known = _read(file, module, variables), weakref.ref(defined, _forget(id(defined)))
        _sources[id(defined)] = known
    return known[0]


_sources: dict[int, tuple[bytes | None, weakref.ref[object]]] = {}


def _forget(key: int) -> Callable[[object], object]:
    return lambda _: _sources.pop(key, None)


def _read(file: str, module: str, variables: dict[str, object] | None) -> bytes | None:
    top = module.partition(".")[0]
    if _is_installed(file):
        versions = _versions(top)
        if versions:
            return versions
    elif file.startswith(_standard_paths()) or (not file and top in sys.stdlib_module_names):
        return _STANDARD
    content = b""
    with suppress(OSError):
        content = Path(file).read_bytes() if file else b""
    if not content and file != "<string>":  # a name of many texts
        content = "".join(linecache.getlines(file, variables)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content).digest() if content else None


@functools.cache
def _standard_paths() -> tuple[str, ...]:
    paths = (f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
    return (*paths, "<frozen ")


def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _versions(top: str) -> bytes:
    """The names and versions of the distributions that a package of this name belongs to."""
    try:
        found = [(top, importlib.metadata.version(top))]
    except importlib.metadata.PackageNotFoundError:
        names = sorted(set(_distributions().get(top, ())))
        found = [(name, importlib.metadata.version(name)) for name in names]
    return repr(found).encode() if found else b""


_distributions: Callable[[], Any] = functools.cache(importlib.metadata.packages_distributions)


def _name(kind: type) -> str:
    return f"{module_of(kind)}.{name_of(kind)}"
