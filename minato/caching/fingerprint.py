"""Fingerprints of datasets and transforms: the source files that define them and their state, in a few bytes."""

from __future__ import annotations

import copyreg
import functools
import hashlib
import importlib.metadata
import linecache
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch

from minato._support.counters import Counters
from minato._support.text import message_of, printable, type_name
from minato.sharing import SharedDict, SharedList

__all__ = ["fingerprint"]

_MOST_OBJECTS = 5_000_000
_MOST_BYTES = 4 << 30
"""Limits of one fingerprint, which is made when an epoch begins; a minute at most."""
_BLOCK = 1 << 16
"""Items of a shared list that are looked at together."""
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
"""Types whose ``repr`` is complete."""
_GENERATORS = (
    random.Random,
    np.random.RandomState,
    np.random.Generator,
    np.random.BitGenerator,
    torch.Generator,
)
_REMEDY = "give the cache a version= of your own"
_OF_CLASSES = (
    "__dict__ __weakref__ __doc__ __module__ __qualname__ __annotations__ __annotate__ __annotate_func__ "
    "__annotations_cache__ __firstlineno__ __static_attributes__ __abstractmethods__ _abc_impl __parameters__ "
    "__orig_bases__ __dataclass_fields__ __dataclass_params__ __slotnames__"
)
_IGNORED = frozenset(_OF_CLASSES.split())
"""Attributes of classes that Python and the standard library set; the text of the class says the same."""


def fingerprint(*parts: object) -> bytes:
    """Sixteen bytes that change when the code or the state of a part may have; the same in every run.

    Classes and functions count by the content of the files that define them, and those of installed packages by version
    too; also their base classes, closures, defaults and decorators. Objects count by what pickle would store of them,
    arrays and tensors by content. An object with a method ``__fingerprint__`` counts by its result instead. What other
    files hold that a function calls or reads is not seen.

    Raises:
        TypeError: A part cannot be pickled, is too large, or was defined where its source cannot be read.
    """
    walk = _Walk()
    try:
        python = walk.digest(tuple(sys.version_info[:2]))
        return _joined([python, *map(walk.digest, parts)])
    except RecursionError:
        raise TypeError(f"the dataset or a transform is nested too deeply: {_REMEDY}") from None


class _Walk:
    """Digests of values. One that is met again costs nothing, and one that holds itself ends there."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[bytes, object]] = {}  # the object too, so that no id is reused
        self._open: dict[int, int] = {}
        self._class_is_known = False
        """Whether the text of a class is known, so that it tells of functions that a program has made for it."""
        self._objects = 0
        self._nbytes = 0

    def digest(self, value: Any) -> bytes:
        kind = type(value)
        if kind in _PLAIN:
            return self._hash(_atom(value))
        done = self._done.get(id(value))
        if done is not None:
            return done[0]
        if id(value) in self._open:
            return self._hash(b"circle %d" % (len(self._open) - self._open[id(value)]))
        self._open[id(value)] = len(self._open)
        try:
            found = _joined([_name(kind), *self._parts(value, kind)])
        finally:
            del self._open[id(value)]
        self._done[id(value)] = found, value
        return found

    def _hash(self, data: Any) -> bytes:
        self._count(len(data))
        return hashlib.blake2b(data, digest_size=16).digest()

    def _count(self, nbytes: int) -> None:
        self._objects += 1
        self._nbytes += nbytes
        if self._objects > _MOST_OBJECTS or self._nbytes > _MOST_BYTES:
            raise TypeError(
                f"the dataset and the transforms hold more than {_MOST_OBJECTS} objects or {_MOST_BYTES >> 30} GiB, "
                f"too much for a fingerprint in each epoch: {_REMEDY}"
            )

    def _parts(self, value: Any, kind: type) -> Iterator[bytes]:
        """Digests of all that a value consists of."""
        if kind in (list, tuple):
            yield from self._items(value)
        elif kind is dict:
            yield from (self.digest(part) for item in value.items() for part in item)
        elif kind in (set, frozenset):
            yield from sorted(map(self.digest, value))
        elif kind in (np.ndarray, np.memmap) and not value.dtype.hasobject:
            yield self.digest((repr(value.dtype), value.shape))
            yield self._content(value)
        elif isinstance(value, torch.Tensor):
            yield from self._tensor(value)
        elif kind is Counters or isinstance(value, _GENERATORS):
            pass  # they change with each sample; a sample that draws is not cached
        elif kind in (SharedList, SharedDict):
            yield from self._shared(value)
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, type):
            yield from self._class(value)
        elif kind is MethodType:
            yield self.digest(value.__self__)
            yield self.digest(value.__func__)
        elif kind is ModuleType:
            yield self._module(value.__name__)
        elif kind is BuiltinFunctionType:
            bound = value.__self__
            yield self.digest(None if isinstance(bound, ModuleType) else bound)
            yield self.digest(value.__qualname__)
            yield self._module(value.__module__)
        else:
            yield from self._object(value, kind)

    def _items(self, items: Any) -> Iterator[bytes]:
        # A source may have a million keys.
        if _is_plain(items):
            try:
                text = repr(items)
            except ValueError:  # an integer of thousands of digits
                pass
            else:
                yield self._hash(text.encode("utf-8", "surrogatepass"))
                return
        yield from map(self.digest, items)

    def _shared(self, value: Any) -> Iterator[bytes]:
        items = value.items() if isinstance(value, SharedDict) else value
        block: list[Any] = []
        for item in items:
            block.append(item)
            if len(block) == _BLOCK:
                yield self._copied(block)
                block = []
        yield self._copied(block)

    def _copied(self, values: list[Any]) -> bytes:
        """The digest of values that only this walk knows, which it need not keep."""
        digests = list(self._items(values))
        for value in values:
            self._done.pop(id(value), None)
        return _joined(digests)

    def _content(self, array: Any) -> bytes:
        self._count(array.nbytes)  # before it reads a file
        flat = np.ascontiguousarray(array).reshape(-1)
        return hashlib.blake2b(flat.view(np.uint8) if flat.size else b"", digest_size=16).digest()

    def _tensor(self, value: torch.Tensor) -> Iterator[bytes]:
        if (
            value.layout is not torch.strided
            or value.is_quantized
            or value.is_meta
            or value.is_nested
        ):
            raise TypeError(
                f"a tensor of {value.dtype} and {value.layout} has no fingerprint: {_REMEDY}"
            )
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield self.digest((str(value.dtype), *value.shape))
        yield self._content(
            plain.view(-1).view(torch.uint8).numpy() if value.numel() else np.empty(0)
        )
        yield self.digest(type(value))
        yield self.digest(vars(value))

    def _object(self, value: Any, kind: type) -> Iterator[bytes]:
        """The class of an object, and what pickle would store."""
        yield self.digest(kind)
        said = getattr(kind, "__fingerprint__", None)
        if said is not None:
            yield self.digest(said(value))
            return
        reduce = copyreg.dispatch_table.get(kind)
        try:
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except RecursionError:
            raise
        except Exception as error:
            raise TypeError(
                f"an object of type {type_name(value, module=True)} has no fingerprint, as it cannot be pickled "
                f"({type(error).__name__}: {printable(message_of(error))[:200]}): {_REMEDY}"
            ) from error
        if isinstance(reduced, str):
            yield self.digest(reduced)
            yield self._module(getattr(value, "__module__", None))
            yield self.digest(getattr(value, "__wrapped__", None))
            return
        for number, part in enumerate(reduced):
            if number in (3, 4) and part is not None:  # iterators over items
                part = list(part)
            yield self.digest(part)
        if isinstance(value, np.ndarray):  # whose own way leaves them out
            yield self.digest(getattr(value, "__dict__", None))

    # ---- code ---------------------------------------------------------------------------

    def _module(self, name: str | None) -> bytes:
        file = getattr(sys.modules.get(name or ""), "__file__", None) or ""
        return _joined([self.digest(name), _text(file, name or "", None) or b""])

    def _function(self, function: FunctionType) -> Iterator[bytes]:
        code = function.__code__
        name = f"{function.__module__}.{function.__qualname__}"
        yield self.digest((name, *_place(code)))
        text = _text(code.co_filename, function.__module__, function.__globals__, code)
        wrapped = vars(function).get("__wrapped__")
        if text is None and not self._class_is_known:
            raise TypeError(
                f"the source of {name} cannot be read (it was defined in {code.co_filename!r}), so that it has no "
                f"fingerprint: define it in a file, or {_REMEDY}"
            )
        yield text or b""
        if text == _STANDARD:  # whose closures hold locks and registers
            yield self.digest(wrapped)
            return
        yield self.digest((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not set yet
                continue
            yield self._of_code(content, _is_installed(code.co_filename))
        for key, attribute in vars(function).items():
            yield self.digest(key)
            yield self._of_code(attribute, True)

    def _of_code(self, value: object, optional: bool) -> bytes:
        """The digest of something that code refers to; if it has none, its type may do."""
        try:
            return self.digest(value)
        except TypeError:
            if not optional:
                raise
            return _name(type(value))

    def _class(self, cls: type) -> Iterator[bytes]:
        yield _name(cls)
        module = _module_of(cls)
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        text = _text(file, module, None, cls)
        yield text or b""
        yield from (self.digest(base) for base in cls.__mro__[1:] if base is not object)
        yield self.digest(type(cls)) if type(cls) is not type else b""
        if text == _STANDARD or _is_installed(file) or not _is_of_python(cls):
            return
        before, self._class_is_known = self._class_is_known, text is not None
        try:
            yield from self._attributes(cls, text)
        finally:
            self._class_is_known = before

    def _attributes(self, cls: type, text: bytes | None) -> Iterator[bytes]:
        for name, attribute in vars(cls).items():
            if name in _IGNORED or isinstance(
                attribute, (MemberDescriptorType, GetSetDescriptorType)
            ):
                continue
            yield self.digest(name)
            functions = list(_functions(attribute))
            for function in functions:
                yield self.digest(function)
            # The file tells of the others, unless the program has changed them or they are made elsewhere.
            if not functions and not (text and type(attribute) in (list, dict, set)):
                yield self._of_code(attribute, text is not None)


def _functions(attribute: Any) -> Iterator[FunctionType]:
    """The functions behind an attribute of a class: those of methods, properties and decorators."""
    if isinstance(attribute, FunctionType):
        yield attribute
        return
    names = ("fget", "fset", "fdel") if isinstance(attribute, property) else ("__func__", "func")
    if hasattr(type(attribute), "__get__") or callable(attribute):
        for name in (*names, "__wrapped__"):
            try:
                inner = None if isinstance(attribute, type) else getattr(attribute, name, None)
            except Exception:  # of a __getattr__ of the program's
                inner = None
            if inner is not None and inner is not attribute:
                yield from _functions(inner)


def _is_of_python(cls: type) -> bool:
    """Whether a ``class`` statement may have made it; the classes of C have no attribute of their own."""
    return bool(cls.__flags__ & 1 << 9)


def _place(code: CodeType) -> tuple[object, ...]:
    """Where in its file a function begins and ends: two lambdas may stand in one line."""
    places = []
    if sys.version_info >= (3, 11):
        places = [place for place in code.co_positions() if None not in place and place[3]]
    if not places:  # Python keeps none: what the function does stands for it
        constants = [
            _place(each) if isinstance(each, CodeType) else each for each in code.co_consts
        ]
        return code.co_firstlineno, code.co_code, code.co_names, constants
    starts = [(line, column) for line, _, column, _ in places]
    ends = [(line, column) for _, line, _, column in places]
    return code.co_firstlineno, *min(starts), *max(ends)


# ---- files ----------------------------------------------------------------------------------

_STANDARD = b"the standard library"
_texts: dict[int, tuple[bytes | None, object]] = {}
"""Digests of files by what they define: an editor may change a file, while this program runs the former code."""


def _text(
    file: str, module: str, variables: dict[str, Any] | None, defined: object = None
) -> bytes | None:
    """What stands for the text that defines something: a digest of its file, with the versions of an installed package.

    Args:
        module: Name of the module.
        variables: The global variables of a function, which may know how to load the text.
        defined: A class or the code of a function, for which the file is read once.

    Returns:
        None if the text cannot be found.
    """
    if id(defined) in _texts and defined is not None:
        return _texts[id(defined)][0]
    found = _read(file, module, variables)
    if defined is not None:
        _texts[id(defined)] = found, defined
    return found


def _read(file: str, module: str, variables: dict[str, Any] | None) -> bytes | None:
    top = module.partition(".")[0]
    installed = _is_installed(file)
    standard = file.startswith((*_standard_paths(), "<frozen ")) or (
        not file and top in sys.stdlib_module_names
    )
    if standard and not installed:
        return _STANDARD
    versions = _versions(top) if installed else b""
    if versions and not file.endswith(".py"):
        return versions  # the code is compiled
    try:
        content = Path(file).read_bytes() if file else b""
    except OSError:
        content = b""
    if not content and file != "<string>":  # a name of many texts
        content = "".join(linecache.getlines(file, variables)).encode("utf-8", "surrogatepass")
    if not content:
        return versions or None
    return hashlib.blake2b(versions + content, digest_size=16).digest()


@functools.cache
def _standard_paths() -> tuple[str, ...]:
    return tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))


def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _versions(top: str) -> bytes:
    """The names and versions of the distributions that a package of this name belongs to."""
    try:
        names = [top]
        versions = [importlib.metadata.version(top)]
    except importlib.metadata.PackageNotFoundError:
        names = sorted(set(_distributions().get(top, ())))
        versions = [importlib.metadata.version(name) for name in names]
    return repr(list(zip(names, versions, strict=True))).encode() if names else b""


_distributions: Callable[[], Any] = functools.cache(importlib.metadata.packages_distributions)


# ---- bytes ----------------------------------------------------------------------------------


def _atom(value: Any) -> bytes:
    if type(value) is bytes:
        return b"b" + value
    text = f"{value:x}" if type(value) is int else value if type(value) is str else repr(value)
    return f"{type(value).__name__} {text}".encode("utf-8", "surrogatepass")


def _is_plain(items: Any, depth: int = 4) -> bool:
    """Whether the ``repr`` of a list is complete: it holds plain values, or lists, tuples and dicts of them."""
    kinds = set(map(type, items)) - _PLAIN
    if not kinds or not depth:
        return not kinds
    if not kinds <= {list, tuple, dict}:
        return False
    inner: list[Any] = []
    for item in items:
        if type(item) is dict:
            inner += item
            inner += item.values()
        elif type(item) in (list, tuple):
            inner += item
    return _is_plain(inner, depth - 1)


def _module_of(kind: type) -> str:
    module: object = kind.__module__
    return module if isinstance(module, str) else ""  # a descriptor, in metaclasses of C


def _name(kind: type) -> bytes:
    return f"{_module_of(kind)}.{kind.__qualname__}".encode("utf-8", "surrogatepass")


def _joined(parts: list[bytes]) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()
