"""Generators that a dataset and its transforms own: found by a search, and seeded for each sample like the global ones.

Besides what :class:`~minato._support.objects.Search` visits, it finds those that are attributes of classes, or global
variables that functions name. The path to a generator selects its random stream, so that it draws the same numbers in
each process.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch

from minato._compat import numpy_state, python_state
from minato._support.hashes import GENERATORS
from minato._support.objects import (
    Glance,
    Kind,
    Node,
    Search,
    in_any_process,
    module_of,
    name_of,
    parts_of,
    path_of,
    vars_of,
)
from minato.transforms.rng_memory import MemoryGenerator, own_generator

_OPAQUE: tuple[type, ...] = (str, bytes, bytearray, int, float, complex, np.ndarray, np.generic)
_OPAQUE += (torch.Tensor, torch.dtype, types.ModuleType, MemoryGenerator)
_NAMED_LIKE_ONE = re.compile(r"(Random|RandomState|RNG|Rng|Generator|mt19937)$")
_MOST_MISSED = 2
_LIBRARIES = ("builtins", "abc", "typing", "collections", "torch", "numpy", "minato")
"""Packages whose classes use no generators but the global ones."""


class OwnedGenerators:
    """The generators that some objects own.

    Attributes:
        generators: Generators that can be seeded for a sample, by path.
        others: Path and type of those that cannot.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._roots = roots
        self.generators: dict[str, MemoryGenerator[Any]] = {}
        self.others: list[str] = []
        self._found: list[Node] = []
        self._gets: list[tuple[Callable[[Any], Any], str]] = []
        self._held: list[Any] = []
        self._glance: Glance | None = None
        self._num_missed = 0  # by the glance
        # What the last search knew of classes, which mostly stay as they are. Not for all objects of this process: a
        # class that is made in a function may hold a whole dataset.
        self._kinds: dict[int, Kind] = {}
        self._classes: dict[int, _KnownClass] = {}
        self.look()

    @property
    def names(self) -> list[str]:
        """Path and type of each generator."""
        return [*map(_described, self._found), *self.others]

    @property
    def identities(self) -> list[int]:
        """The id of each generator that can be seeded."""
        return [id(node.thing) for node in self._found]

    def look(self) -> bool:
        """Search again; returns whether the generators have changed."""
        if self._glance is not None and self._glance.finds_nothing(self._roots):
            return False
        before = self.identities
        self.others = []
        classes: dict[int, _KnownClass] = {}
        search = self._new_search(classes)
        self._take(_found_by(search, self._roots))
        self._kinds, self._classes = search.kinds, classes
        if self._found or self.others:
            self._glance = None
            return before != self.identities
        self._num_missed += self._glance is not None
        # It does not see all objects, or there are other kinds each time: then it only takes time.
        gives_up = self._num_missed > _MOST_MISSED
        self._glance = None if gives_up else _glance_after(search, classes, self._roots)
        return bool(before)

    def _new_search(self, classes: dict[int, _KnownClass]) -> Search:
        """A search that enters in ``classes`` what it knows of classes."""
        return Search(
            _is_generator,
            of_class=functools.partial(_parts_of_class, self._classes, classes),
            of_function=lambda function: _global_variables(function.__code__, function.__globals__),
            opaque=(
                *_OPAQUE,
                OwnedGenerators,
            ),  # a cache has its own, which knows what classes hold
            known=self._kinds,
        )

    def moved(self) -> bool:
        """Return whether an attribute that held a generator holds another object now."""
        return not all(map(is_, [get(name) for get, name in self._gets], self._held))

    def follow(self) -> None:
        """Take the generators that these attributes hold now."""
        now = (
            (node, node.thing if node.get is None else node.get(node.name)) for node in self._found
        )
        self._take([node._replace(thing=thing) for node, thing in now])

    def _take(self, found: Iterable[Node]) -> None:
        self._found, self.generators, self._gets, self._held = [], {}, [], []
        for node in found:
            path = path_of(node)
            bound = own_generator(node.thing, _stream(path))
            if bound is None:
                self.others.append(_described(node))
                continue
            self._found.append(node)
            self.generators[path] = bound
            if node.get is not None:
                self._gets.append((node.get, node.name))
                self._held.append(node.thing)


def _described(node: Node) -> str:
    generator, kind = node.thing, type(node.thing)
    where = f" on {generator.device}" if isinstance(generator, torch.Generator) else ""
    return f"{path_of(node)} ({kind.__module__}.{kind.__qualname__}{where})"


@functools.lru_cache(1000)
def _stream(path: str) -> int:
    digest = hashlib.blake2b(path.encode("utf-8", "surrogatepass"), digest_size=7).digest()
    return int.from_bytes(digest, "little") + 16  # after the streams of the global generators


def _found_by(search: Search, roots: Mapping[str, object]) -> list[Node]:
    found = search.run(roots, seen=(python_state(), numpy_state(), torch.default_generator))
    # No seed repeats a SystemRandom.
    return [node for node in found if not issubclass(type(node.thing), random.SystemRandom)]


def _glance_after(
    search: Search, classes: dict[int, _KnownClass], roots: Mapping[str, object]
) -> Glance | None:
    """What tells soon that there is still nothing to find, after a search that found nothing; None: nothing does."""
    own = [kind for kind in search.classes if not _is_of_library(kind)]
    known = [each for kind in own if (each := classes.get(id(kind))) is not None]
    if len(known) < len(own):
        return None
    named: dict[int, tuple[types.CodeType, _Names]] = {}  # the code, so that its id stands for it
    for function in (node.thing for node in search.opened):
        if type(function) is types.FunctionType:
            names, code = _Names(function.__globals__), function.__code__
            names.add(code)
            named[id(code)] = code, names

    def names_nothing(function: types.FunctionType) -> bool:
        _, names = named.get(id(function.__code__), (None, None))
        return names is not None and function.__globals__ is names.held and names.hold_nothing()

    closures = [node.thing for each in known for node in each.closures]
    glance = Glance(search, [each.holds for each in known], names_nothing, closures)
    return glance if glance.finds_nothing(roots, first=True) else None


def _is_generator(kind: Kind) -> bool:
    if issubclass(kind.kind, GENERATORS):
        return True
    # An object without attributes that looks like a generator of another library, for example in C++.
    return not kind.has_dict and bool(_NAMED_LIKE_ONE.search(name_of(kind.kind)))


class _KnownClass:
    """A class that holds no generator in its attributes, nor in global variables that its functions name.

    Args:
        kind: The class, which this keeps, so that its id stands for it.
        closures: Its functions with variables of their own, in which a search looks.
    """

    def __init__(self, kind: type, closures: list[Node]) -> None:
        self.kind, self.closures = kind, closures
        values = [*vars_of(kind).values()]
        self._types = [*map(type, values)]
        # Those that hold code are kept; of the others, whose values may be large, the types.
        self._places = [k for k, value in enumerate(values) if _holds_code(value)]
        self._code = [values[k] for k in self._places]
        functions = chain.from_iterable(map(_functions_in, self._code))
        names: dict[int, _Names] = {}
        for function in functions:
            held = function.__globals__
            names.setdefault(id(held), _Names(held)).add(function.__code__)
        self._named = [*names.values()]

    def holds(self) -> bool:
        """Whether its attributes are the same, and no name stands for a generator."""
        values = [*vars_of(self.kind).values()]
        return (
            len(values) == len(self._types)
            and all(map(is_, map(type, values), self._types))
            and all(map(is_, map(values.__getitem__, self._places), self._code))
            and all(map(_Names.hold_nothing, self._named))
        )


class _Names:
    """The global variables of a module that some functions name."""

    def __init__(self, held: dict[str, object]) -> None:
        self.held = held
        self._names: list[str] = []
        self._harmless: dict[int, type] = {}  # types that values have had, by id

    def add(self, code: types.CodeType) -> None:
        self._names += set(_names(code)).difference(self._names)

    def hold_nothing(self) -> bool:
        kinds = [*map(type, map(self.held.get, self._names))]
        if not self._harmless.keys() >= {*map(id, kinds)}:
            if any(issubclass(kind, GENERATORS) for kind in kinds):
                return False
            self._harmless = {id(kind): kind for kind in kinds}
        return True


def _holds_code(value: object) -> bool:
    return type(value) is types.FunctionType or any(True for _ in parts_of(value))


def _is_of_library(kind: type) -> bool:
    return module_of(kind).partition(".")[0] in _LIBRARIES


def _parts_of_class(
    before: Mapping[int, _KnownClass], now: dict[int, _KnownClass], kind: type
) -> Iterable[Node]:
    """Further nodes of a class. What is known of it now is entered in ``now``; ``before`` is of an earlier search."""
    if _is_of_library(kind):
        return ()
    known = before.get(id(kind))
    if known is not None and known.holds():
        now[id(kind)] = known
        return known.closures
    nodes = list(_searched(kind))
    if all(type(node.thing) is types.FunctionType for node in nodes):
        now[id(kind)] = _KnownClass(kind, nodes)
    return nodes


def _functions_in(value: object) -> Iterator[types.FunctionType]:
    for part in (value, *(part for _, part in parts_of(value))):
        if type(part) is types.FunctionType:
            yield part


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _names(constant)


def _searched(kind: type) -> Iterator[Node]:
    held = vars_of(kind)
    module = module_of(kind)
    path = f"{module}.{name_of(kind)}"
    for name, value in list(held.items()):
        if issubclass(type(value), GENERATORS):
            yield Node(value, None, f"{path}.{name}", held.get, name)
        for function in _functions_in(value):
            yield from _global_variables(function.__code__, function.__globals__)
            if function.__closure__ is not None:  # of a decorator, which holds the function itself
                yield Node(function, None, f"{path}.{name}")


def _global_variables(code: types.CodeType, held: dict[str, object]) -> Iterator[Node]:
    for name in _names(code):
        value = held.get(name)
        if issubclass(type(value), GENERATORS):
            module = in_any_process(str(held.get("__name__")))
            yield Node(value, None, f"{module}.{name}", held.get, name)
