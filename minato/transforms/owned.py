"""Generators that a dataset and its transforms own: found by a search, and seeded for each sample like the global ones.

The search visits objects, containers, partial functions, methods and closures, the attributes of classes, and global
variables that functions name. It runs none of their code. The path to a generator selects its random stream, so that
it draws the same numbers in each process.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import re
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import numpy as np
import torch

from minato._compat import numpy_state, python_state
from minato.transforms.rng_memory import MemoryGenerator, own_generator

__all__ = ["OwnedGenerators"]

_MOST_OBJECTS = 20_000
_MOST_ITEMS, _MOST_CONTAINERS = 1024, 16
"""Items and inner containers that the search visits in a container; a larger one is data."""
_OPAQUE: tuple[type, ...] = (str, bytes, bytearray, int, float, complex, np.ndarray, np.generic)
_OPAQUE += (torch.Tensor, torch.dtype, types.ModuleType, types.BuiltinFunctionType)
_PLAIN = frozenset((*_OPAQUE, bool, type(None)))
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, deque)
_WITHOUT_PARTS = frozenset((*_CONTAINERS, OrderedDict, types.FunctionType, types.MethodType))
"""Types whose classes hold no generator; functions are never empty."""
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
_NAMED_LIKE_ONE = re.compile(r"(Random|RandomState|RNG|Rng|Generator|mt19937)$")
_LIBRARIES = ("builtins", "abc", "typing", "collections", "torch", "numpy", "minato")
"""Packages whose classes use no generators but the global ones."""

Get = Callable[[Any], Any]
Found = tuple[str, Any, Get | None, Any]
"""Path and generator; function and name that get it again from its holder."""
Slots = list[tuple[str, types.MemberDescriptorType]]


class OwnedGenerators:
    """The generators that some objects own.

    Args:
        roots: Objects to search, by name.

    Attributes:
        generators: Generators that can be seeded for a sample, by path.
        others: Path and type of those that cannot.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self.generators: dict[str, MemoryGenerator] = {}
        self.others: list[str] = []
        self._found: list[Found] = []
        self._gets: list[tuple[Get, Any]] = []
        self._held: list[Any] = []
        self.look()

    @property
    def names(self) -> list[str]:
        """Path and type of each generator."""
        return [_described(path, generator) for path, generator, *_ in self._found] + self.others

    def look(self) -> bool:
        """Search again; returns whether the generators have changed."""
        before = [id(generator) for _, generator, *_ in self._found]
        self.others = []
        self._take(_walk(self._roots))
        return before != [id(generator) for _, generator, *_ in self._found]

    def moved(self) -> bool:
        """Return whether an attribute that held a generator holds another object now."""
        return not all(map(is_, [get(name) for get, name in self._gets], self._held))

    def follow(self) -> None:
        """Take the generators that these attributes hold now."""
        self._take(
            (path, generator if get is None else get(name), get, name)
            for path, generator, get, name in self._found
        )

    def _take(self, found: Iterator[Found]) -> None:
        self._found, self.generators, self._gets, self._held = [], {}, [], []
        for path, generator, get, name in found:
            bound = own_generator(generator, _stream(path))
            if bound is None:
                self.others.append(_described(path, generator))
                continue
            self._found.append((path, generator, get, name))
            self.generators[path] = bound
            if get is not None:
                self._gets.append((get, name))
                self._held.append(generator)


def _described(path: str, generator: object) -> str:
    kind = type(generator)
    where = f" on {generator.device}" if isinstance(generator, torch.Generator) else ""
    return f"{path} ({kind.__module__}.{kind.__qualname__}{where})"


@functools.cache
def _stream(path: str) -> int:
    digest = hashlib.blake2b(path.encode("utf-8", "surrogatepass"), digest_size=7).digest()
    return int.from_bytes(digest, "little") + 16  # after the streams of the global generators


def _walk(roots: Mapping[str, Any]) -> Iterator[Found]:
    """Yield all generators that can be reached, nearest first, each once."""
    seen = {id(each) for each in (python_state(), numpy_state(), torch.default_generator)}
    kept: list[Any] = []  # keeps the ids in ``seen`` unique
    slots: dict[type, Slots] = {each: [] for each in _WITHOUT_PARTS}
    waiting: deque[tuple[str, Any, Get | None, Any]] = deque(
        (name, root, None, None) for name, root in roots.items()
    )
    while waiting and len(kept) < _MOST_OBJECTS:
        path, thing, get, name = waiting.popleft()
        if type(thing) in _PLAIN or isinstance(thing, _OPAQUE) or id(thing) in seen:
            continue
        seen.add(id(thing))
        kept.append(thing)
        if isinstance(thing, _GENERATORS):
            if not isinstance(thing, random.SystemRandom):  # no seed repeats it
                yield path, thing, get, name
            continue
        kind = thing if isinstance(thing, type) else type(thing)
        if kind not in slots:
            slots[kind] = _slots_of(kind)
            waiting.extend(_parts_of_class(kind))
        if kind is thing:
            continue
        if _is_foreign_generator(thing):
            yield path, thing, get, name
        waiting.extend(_parts(path, thing))
        for attribute, member in slots[kind]:
            try:
                waiting.append((f"{path}.{attribute}", member.__get__(thing), None, None))
            except AttributeError:  # not set
                continue


def _parts(path: str, thing: object) -> Iterator[Found]:
    """Yield the objects that an object holds, with their paths."""
    if isinstance(thing, _CONTAINERS):
        base = next(each for each in _CONTAINERS if isinstance(thing, each))
        items = dict.items(thing) if base is dict else enumerate(base.__iter__(thing))
        containers = 0
        for key, value in itertools.islice(items, _MOST_ITEMS):
            if type(value) in _PLAIN:
                continue
            containers += isinstance(value, _CONTAINERS)
            if containers > _MOST_CONTAINERS:
                break
            yield f"{path}[{key!r}]" if type(key) in (str, int) else path, value, None, None
    elif isinstance(thing, functools.partial):
        yield f"{path}.func", thing.func, None, None
        yield f"{path}.args", thing.args, None, None
        yield f"{path}.keywords", thing.keywords, None, None
    elif isinstance(thing, types.MethodType):
        yield f"{path}.__self__", thing.__self__, None, None
        yield f"{path}.__func__", thing.__func__, None, None
    elif isinstance(thing, types.FunctionType):
        yield from _parts_of_function(path, thing)
    held = _attributes(thing)
    if held is not None:
        for name, value in itertools.islice(held.items(), _MOST_ITEMS):
            if type(value) not in _PLAIN and not (type(value) in _WITHOUT_PARTS and not value):
                yield f"{path}.{name}", value, held.get, name


def _attributes(thing: object) -> dict[str, Any] | None:
    try:
        held = object.__getattribute__(thing, "__dict__")
    except Exception:  # a property of that name may raise anything
        return None
    return held if isinstance(held, dict) else None


def _slots_of(kind: type) -> Slots:
    """Return the attributes in ``__slots__`` of a type."""
    return [
        (name, member)
        for one in kind.__mro__
        for name, member in vars(one).items()
        if isinstance(member, types.MemberDescriptorType) and one.__module__ != "builtins"
    ]


def _parts_of_class(kind: type) -> Iterator[Found]:
    """Yield generators in the attributes of a class, and in global variables that its functions name."""
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] in _LIBRARIES:
            continue
        held = vars(one)
        path = f"{_in_any_process(one.__module__)}.{one.__qualname__}"
        for name, value in held.items():
            if isinstance(value, _GENERATORS):
                yield f"{path}.{name}", value, held.get, name
            function = getattr(value, "__func__", value)  # of a static or class method
            if isinstance(function, types.FunctionType):
                yield from _global_variables(function.__code__, function.__globals__)


def _parts_of_function(path: str, function: types.FunctionType) -> Iterator[Found]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        try:
            yield f"{path}.{name}", cell.cell_contents, None, None
        except ValueError:  # not yet set
            continue
    yield f"{path}.__defaults__", function.__defaults__, None, None
    yield f"{path}.__kwdefaults__", function.__kwdefaults__, None, None
    yield from _global_variables(function.__code__, function.__globals__)


def _global_variables(code: types.CodeType, held: dict[str, Any]) -> Iterator[Found]:
    """Yield generators in the global variables that a code object names."""
    for name in code.co_names:
        value = held.get(name)
        if isinstance(value, _GENERATORS):
            module = _in_any_process(str(held.get("__name__")))
            yield f"{module}.{name}", value, held.get, name
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_variables(constant, held)


def _in_any_process(module: str) -> str:
    """Return the name of a module in the training process; spawned workers have another name for the main module."""
    return "__main__" if module == "__mp_main__" else module


def _is_foreign_generator(thing: object) -> bool:
    """Return whether an object without attributes looks like a generator of another library, for example in C++."""
    return bool(_NAMED_LIKE_ONE.search(type(thing).__name__)) and _attributes(thing) is None
