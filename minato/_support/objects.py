"""Looks at objects of the user's: by their real type, on snapshots, without running their code.

An object may lie about its class, raise wherever it is asked, hold a million others, refer to itself, or be changed by
another thread meanwhile. So what is here reads the memory of objects by the functions of their builtin base types: no
``isinstance``, ``==``, ``hash``, ``len``, ``repr`` or attribute of an object or of its class. No walk recurses.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import types
import weakref
from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from minato._core import types_in
from minato._support.values import message_of, plain

mro_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
"""The base classes of a class, without its metaclass."""
vars_of: Callable[[type], types.MappingProxyType[str, Any]] = type.__dict__["__dict__"].__get__
"""The attributes of a class itself, without its metaclass."""
_module_of: Callable[[type], object] = type.__dict__["__module__"].__get__
name_of: Callable[[type], str] = type.__dict__["__qualname__"].__get__
"""The qualified name of a class, without its metaclass."""
_flags_of: Callable[[type], int] = type.__dict__["__flags__"].__get__
_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8
"""Flags of ``type`` in C: all classes written in Python have the first, and those of the standard library in C both."""

_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, deque)
"""Types whose items are looked at. The order of a set differs between processes."""
MEMBERS = types.GetSetDescriptorType, types.MemberDescriptorType
"""Types of what a class has in place of its instances' attributes."""
_TRIES = 3  # how often a container that another thread changes is read
_MOST_ITEMS = 1024
_MOST_ALIKE, _MOST_ITEMS_ALIKE = 32, 2048
_MOST_LOOKS = 20_000  # values that a search looks at in all
_MOST_GLANCED, _MOST_LEVELS, _GLANCED_EACH, _LEFT_OUT_EACH = 32_768, 16, 512, 32
"""Values that a glance looks at, how deep they lie, and as how many a new object counts, and one that is left out."""


def attribute(thing: object, name: str, default: object = None) -> Any:
    """An attribute of an object of the user's; the default if it has none, or if asking for it raises."""
    try:
        return getattr(thing, name, default)
    except Exception:  # a property or __getattr__ may raise anything
        return default


def figures_of(dataset: object) -> dict[str, float]:
    """What ``minato_figures()`` of a dataset's class returns: numbers by name for a report; empty without it."""
    # Plain ones: JSON knows neither the numbers of NumPy nor those of torch, nor other things that are no numbers.
    found = {str(name): plain(each) for name, each in _asked(dataset, "minato_figures").items()}
    return {name: each for name, each in found.items() if isinstance(each, (int, float))}


def facts_of(dataset: object) -> dict[str, str]:
    """What ``minato_facts()`` of a dataset's class returns: what decides its items, by name; empty without it."""
    return _asked(dataset, "minato_facts")


def _asked(dataset: object, method: str) -> dict[str, Any]:
    # Not of the instance: its __getattr__ may return anything for any name.
    known = callable(attribute(type(dataset), method))
    return cast("dict[str, Any]", getattr(dataset, method)()) if known else {}


def takes_lists(dataset: object) -> bool:
    """Whether a dataset has ``__getitems__``. One that raises has it: its use raises again, as with torch."""
    try:
        return bool(getattr(dataset, "__getitems__", None))
    except Exception:
        return True


def is_exactly(thing: object, kinds: Iterable[type]) -> bool:
    """Whether an object is of one of these classes itself; unlike ``in`` it does not ask the object's metaclass."""
    return True in map(is_, kinds, repeat(type(thing)))


def derives(kind: type, *bases: type) -> bool:
    """Whether a class is or extends one of these classes; unlike ``issubclass`` it does not ask an abstract class."""
    return any(one is base for one in mro_of(kind) for base in bases)


class Kind:
    """What a search needs to know of a class.

    Attributes:
        container: Its base among dict, list, tuple and deque, or None.
        has_parts: Whether :func:`parts_of` may name something in its instances.
    """

    __slots__ = ("_dict_of", "_is_in_python", "_slots", "container", "has_parts", "kind")

    def __init__(self, kind: type) -> None:
        # Its id stands for it as long as this object lives.
        self.kind = kind
        self.container: Any = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
        self._dict_of: Callable[[Any], Any] | None = None
        self._slots: list[tuple[str, types.MemberDescriptorType]] = []
        self.has_parts = issubclass(kind, _WITH_PARTS)
        self._is_in_python = not (self.has_parts or self.container)
        for one in mro_of(kind):
            is_python = _flags_of(one) & (_HEAP_TYPE | _IMMUTABLE) == _HEAP_TYPE
            self._is_in_python &= one is object or is_python
            held = vars_of(one)
            found: Any = held.get("__dict__")
            if self._dict_of is None and is_exactly(found, MEMBERS):
                self._dict_of = found.__get__
            if "__slots__" in held:  # a class in C has members that show how it works
                slot = types.MemberDescriptorType
                self._slots += [each for each in list(held.items()) if type(each[1]) is slot]
        if kind is threading.local:  # its method of access makes a __dict__ for each thread
            self._dict_of, self._is_in_python = attrgetter("__dict__"), False

    @property
    def has_attributes(self) -> bool:
        """Whether its instances have attributes, in a ``__dict__`` or in slots."""
        return self._dict_of is not None or bool(self._slots)

    @property
    def has_dict(self) -> bool:
        """Whether its instances have a ``__dict__``."""
        return self._dict_of is not None

    def dict_of(self, thing: object) -> dict[str, Any] | None:
        """The live ``__dict__`` of an instance; None if it has none.

        Until Python 3.12 the program's own access to an attribute takes longer, once its object has got a dictionary.
        """
        held = None if self._dict_of is None else self._dict_of(thing)
        return held if issubclass(type(held), dict) else None

    def slots_of(self, thing: object) -> Iterator[tuple[str, Any]]:
        """Names and values of the slots of an instance."""
        for name, member in self._slots:
            with suppress(AttributeError):  # not set
                yield name, member.__get__(thing)

    def attributes_of(self, thing: object) -> list[tuple[Any, Any]]:
        """Names and values of what an instance has now in its ``__dict__`` and in slots."""
        held = self.dict_of(thing)
        return [*([] if held is None else items_of(held, dict)), *self.slots_of(thing)]

    def values_of(self, thing: object) -> list[object]:
        """All that an instance holds now: items, what :func:`parts_of` names, and attributes.

        Raises:
            RuntimeError: Another thread changes it.
        """
        if (found := self.referents_of(thing)) is not None:
            return found
        values: list[object] = []
        if self.container is not None:
            base = self.container
            read: Callable[[object], Iterable[object]]
            read = dict.values if base is dict else base.__iter__  # type: ignore[assignment]
            values += read(thing)
        if self.has_parts:
            values += [part for _, part in parts_of(thing)]
        if (held := self.dict_of(thing)) is not None:
            values += dict.values(held)
        if self._slots:
            values += [value for _, value in self.slots_of(thing)]
        return values

    def referents_of(self, thing: object) -> list[object] | None:
        """The values of an instance's attributes, which gets no ``__dict__`` by that; None: it may have one already."""
        if not self._is_in_python:
            return None
        values = [each for each in gc.get_referents(thing) if each is not self.kind]
        may_be_dict = self.has_dict and len(values) <= 1 + len(self._slots)
        return (
            None if may_be_dict and any(issubclass(type(each), dict) for each in values) else values
        )

    def set_attribute(self, thing: object, name: str, value: object) -> None:
        """Set an attribute that an instance has."""
        held = self.dict_of(thing)
        if held is not None and name in held:
            dict.__setitem__(held, name, value)
        else:
            next(member for slot, member in self._slots if slot == name).__set__(thing, value)


def items_of(thing: Any, base: Any) -> list[tuple[Any, Any]]:
    """Keys or positions, and items, of an instance of a container type as it is now; empty if it changes too fast."""
    for _ in range(_TRIES):
        with suppress(RuntimeError):  # another thread, or a finalizer, changes it
            return list(dict.items(thing) if base is dict else enumerate(base.__iter__(thing)))
    return []


def module_of(kind: type) -> str:
    """The module of a class in the training process; spawned workers have another name for the main module."""
    module = _module_of(kind)
    return in_any_process(module) if type(module) is str else ""


def is_own_class(thing: Any) -> bool:
    """Whether a value is one of minato's classes."""
    return issubclass(type(thing), type) and module_of(thing).startswith("minato.")


def in_any_process(module: str) -> str:
    """The name of a module in the training process."""
    return "__main__" if module == "__mp_main__" else module


class Node(NamedTuple):
    """An object that a search has reached.

    Attributes:
        step: How the holder holds it: text, or its key in a tuple.
        get: With ``name`` returns what the holder holds there now; None if that is not known.
        group: Key of the objects that are like it.
        place: Part of the keys of those that it holds: its class, its code, or where the outermost container is held.
    """

    thing: Any
    parent: Node | None
    step: str | tuple[Any]
    get: Callable[[str], Any] | None = None
    name: str = ""
    group: Any = None
    place: Any = None


def _step(key: object) -> str | tuple[Any]:
    return (key,) if type(key) is str or type(key) is int else ""


def path_of(node: Node) -> str:
    """How a node is reached, such as ``dataset.parts['a'][0]``."""
    steps: list[str] = []
    one: Node | None = node
    while one is not None:
        steps.append(one.step if isinstance(one.step, str) else _item(one.step[0]))
        one = one.parent
    return "".join(reversed(steps))


def _item(key: str | int) -> str:
    try:
        return f"[{key!r}]"
    except ValueError:  # an integer of thousands of digits
        return "[...]"


class _Group:
    """Objects that are alike: those of one class, or the containers, that are under one attribute of one class.

    Attributes:
        owns: Something was found in one of them: then all are looked into.
        rest: A node of the others, and the further items of its holder that are like it.
    """

    __slots__ = ("items_left", "left", "owns", "rest", "skipped")

    def __init__(self) -> None:
        self.left = _MOST_ALIKE
        self.items_left = _MOST_ITEMS_ALIKE
        self.owns = False
        self.skipped: list[Node] = []
        self.rest: list[tuple[Node, list[tuple[Any, Any]]]] = []

    def takes(self, size: int) -> bool:
        """Whether one more is looked into, of this number of items; the first that is not ends it for all others."""
        if self.owns:
            return True
        if self.left <= 0 or size > self.items_left:
            self.left = 0
            return False
        self.left -= 1
        self.items_left -= size
        return True

    def left_out(self) -> Iterator[Node]:
        """All that was left out so far, once."""
        skipped, rest, self.skipped, self.rest = self.skipped, self.rest, [], []
        yield from skipped
        for like, items in rest:
            for key, thing in items:
                yield like._replace(thing=thing, step=_step(key))


class Search:
    """Finds objects below some roots, the nearest first, each once.

    It looks at attributes of objects, at items of dictionaries, lists, tuples and deques, and at what :func:`parts_of`
    names. With ``samples`` its cost is bounded: containers of more than 1,024 items are data. Of the objects of one
    class, and of the containers, under one attribute of a class, in however many objects, it looks into the first 32
    (and at 2,048 items of these containers); into the others only if it found something in one of these. It ends after
    20,000 values. Only counts decide, so that it finds the same in each process.

    Args:
        wants: Whether such a value is what is looked for; then it is not looked into.
        opens: Whether to look into the attributes of objects of this kind below the roots; None: into all, and into
            functions and the like.
        of_class: Further nodes of a class that is seen for the first time.
        samples: Look at a sample of objects that are alike; otherwise at all objects.
        known: The ``kinds`` of an earlier search.

    Attributes:
        kinds: The kinds of all objects that it has met, by the id of their class.
        opened: The nodes that were looked into, in this order.
    """

    def __init__(
        self,
        finds: Callable[[Kind], bool],
        *,
        wants: Callable[[Any], bool] = lambda value: True,
        opens: Callable[[Kind], bool] | None = None,
        of_class: Callable[[type], Iterable[Node]] = lambda kind: (),
        of_function: Callable[[types.FunctionType], Iterable[Node]] = lambda function: (),
        opaque: tuple[type, ...] = (),
        samples: bool = True,
        known: Mapping[int, Kind] | None = None,
    ) -> None:
        self._finds, self._wants, self._opens = finds, wants, opens
        self._of_class, self._of_function, self._opaque = of_class, of_function, opaque
        self._samples = samples
        self._most_items = _MOST_ITEMS if samples else sys.maxsize
        self._most_looks = _MOST_LOOKS if samples else sys.maxsize
        self._plain = set(map(id, (*opaque, bool, type(None))))
        self.kinds: dict[int, Kind] = {}
        self._known = known or {}
        self._wanted: set[int] = set()  # ids of kinds
        self._seen: dict[int, Any] = {}  # an id is unique as long as its object lives
        self._classes: dict[int, type] = {}
        self._groups: dict[Any, _Group] = {}
        self._waiting: deque[Node] = deque()
        self._found: list[Node] = []
        self.opened: list[Node] = []
        self.looks = 0

    def run(self, roots: Mapping[str, object], seen: Iterable[object] = ()) -> list[Node]:
        """Search. If it samples, and an object is odd in a way that nobody has thought of, it finds nothing."""
        self._seen = {id(each): each for each in seen}
        try:
            for name, root in roots.items():
                self._offer(Node(root, None, name, place=name))
            while self._waiting and self.looks < self._most_looks:
                self._open(self._waiting.popleft())
        except Exception:
            if not self._samples:
                raise
            return []
        return self._found

    @property
    def classes(self) -> list[type]:
        """All classes that it has met, with their bases."""
        return [*self._classes.values()]

    def _kind(self, of: type) -> Kind | None:
        """The kind of the values of a class; None if there is nothing in them."""
        key = id(of)
        if key in self._plain:
            return None
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = self._known.get(key) or Kind(of)
            if issubclass(kind.kind, self._opaque):
                self._plain.add(key)
                return None
            self._look_at_class(kind.kind)
            if self._finds(kind):
                self._wanted.add(key)
            elif not (kind.container or kind.has_attributes or kind.has_parts):
                self._plain.add(key)
                return None
        return kind

    def _look_at_class(self, kind: type) -> None:
        for one in mro_of(kind):
            if id(one) not in self._classes:
                self._classes[id(one)] = one
                for node in self._of_class(one):
                    self._offer(node)

    def _offer(self, node: Node) -> bool:
        """Note what is looked for; look into other objects later. False: its group leaves it out."""
        thing = node.thing
        kind = self._kind(type(thing))
        if kind is None:
            return True
        if id(kind.kind) in self._wanted and self._wants(thing):
            if id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                self._found.append(node)
                self._release(node.parent)
            return True
        size = 0 if kind.container is None else kind.container.__len__(thing)
        if size > self._most_items or (not size and kind.kind is kind.container):
            return True  # data, or nothing
        if node.group is not None and self._samples:
            group = self._groups.get(node.group)
            if group is None:
                group = self._groups[node.group] = _Group()
            if not group.takes(size):
                group.skipped.append(node)
                return False
        self._waiting.append(node)
        return True

    def _release(self, holder: Node | None) -> None:
        """Have all objects looked into that are like those that hold something."""
        while holder is not None:
            group = self._groups.get(holder.group)
            if group is not None and not group.owns:
                group.owns = True
                self._waiting.extend(group.left_out())
            holder = holder.parent

    def _open(self, node: Node) -> None:
        thing = node.thing
        if id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        self.opened.append(node)
        kind = self.kinds[id(type(thing))]
        if issubclass(kind.kind, type):
            self._look_at_class(thing)
            return
        if kind.container is not None:
            items = items_of(thing, kind.container)
            self.looks += len(items)
            left_out: dict[int, list[Any]] = {}  # items by their type, after a node of the first
            # No loop over a thousand texts.
            kinds = map(id, types_in([*map(itemgetter(1), items)]))
            for item in () if self._plain.issuperset(kinds) else items:
                if (kind_id := id(type(item[1]))) in self._plain:
                    continue
                if kind_id in left_out:
                    left_out[kind_id].append(item)
                    continue
                each = self._held(node, _step(item[0]), item[1])
                if not self._offer(each) and kind_id not in _FUNCTIONS:
                    left_out[kind_id] = [each]
            for like, *rest in left_out.values():
                group = self._groups[like.group]
                group.rest.append((like, rest))
                if group.owns:  # since a later item
                    self._waiting.extend(group.left_out())
        if self._opens is not None and node.parent is not None and not self._opens(kind):
            return
        for name, value in parts_of(thing):
            self._offer(self._held(node, name, value))
        if type(thing) is types.FunctionType:
            for each in self._of_function(thing):
                self._offer(each)
        if self._hold_data(kind, thing):
            return
        held = kind.dict_of(thing)
        get = held.get if type(held) is dict else None
        items = [] if held is None else items_of(held, dict)
        self.looks += 1 + len(items)
        for name, value in items:
            if id(type(value)) not in self._plain and type(name) is str:
                self._offer(self._held(node, f".{name}", value, get, name))
        for name, value in kind.slots_of(thing):
            self._offer(self._held(node, f".{name}", value, None, name))

    def _hold_data(self, kind: Kind, thing: object) -> bool:
        """Whether there is nothing in any attribute of an object, so that nobody needs their names."""
        values: list[Any] | None = kind.referents_of(thing)
        if values is None:
            return False
        for value in values:
            held = self._kind(type(value))
            if held is None:
                continue
            if held.kind is not held.container or id(held.kind) in self._wanted:
                return False
            if len(value) <= self._most_items:
                items = [*map(itemgetter(1), items_of(value, held.container))]
                if any(self._kind(each) is not None for each in types_in(items)):
                    return False
        self.looks += 1 + len(values)
        return True

    def _held(
        self,
        holder: Node,
        step: str | tuple[object],
        value: object,
        get: Callable[[str], object] | None = None,
        name: str = "",
    ) -> Node:
        kind, holder_kind = self._kind(type(value)), self.kinds[id(type(holder.thing))]
        kind_id = id(type(value))
        place: Any = holder.place
        if holder_kind.container is None:
            place = place, step
        elif name:
            place = id(holder_kind.kind), step
        group = place
        if kind_id in _FUNCTIONS:
            group = place = _FUNCTIONS[kind_id](value)
        elif kind is not None and kind.container is None:
            group, place = (place, kind_id), kind_id
        return Node(value, holder, step, get, name, group, place)


_FUNCTIONS: dict[int, Callable[[Any], int]] = {
    id(types.FunctionType): lambda function: id(function.__code__),
    id(types.MethodType): lambda method: id(method.__func__),
    id(functools.partial): lambda partial: id(partial.func),
}
"""What functions that are alike have in common, by the id of their type."""


def parts_of(thing: object) -> Iterator[tuple[str, Any]]:
    """Names and values of what functions, methods, their descriptors, and default dictionaries hold."""
    if type(thing) is types.MethodType:
        yield ".__self__", thing.__self__
        yield ".__func__", thing.__func__
    elif type(thing) is types.BuiltinMethodType:
        if not is_exactly(thing.__self__, (types.ModuleType, types.NoneType)):  # else a function
            yield ".__self__", thing.__self__
    elif type(thing) is types.FunctionType:
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
            with suppress(ValueError):  # not yet set
                yield f".{name}", cell.cell_contents
        yield ".__defaults__", thing.__defaults__
        yield ".__kwdefaults__", thing.__kwdefaults__
    elif issubclass(type(thing), functools.partial):
        yield ".func", _PARTIAL["func"](thing)
        yield ".args", _PARTIAL["args"](thing)
        yield ".keywords", _PARTIAL["keywords"](thing)
    elif issubclass(type(thing), defaultdict):
        yield ".default_factory", _DEFAULT(thing)
    else:
        for name in _DESCRIPTORS.get(id(type(thing)), ()):
            yield f".{name}", getattr(thing, name)


class Glance:
    """Tells whether objects still hold nothing of what a search looks for, in less than half of its time.

    It looks at the objects that the search has looked into, and at others that were not there then, and knows no
    paths. False may also mean that only another search can tell: there are many new objects, or kinds of objects that
    the search has not met.

    Args:
        search: Has found nothing.
        classes: Whether a class that it has met still holds nothing, each.
        function_holds_nothing: Whether the global variables that a function names do.
        closures: Functions of these classes with variables of their own, which are looked at, too.
    """

    def __init__(
        self,
        search: Search,
        classes: Iterable[Callable[[], bool]],
        function_holds_nothing: Callable[[types.FunctionType], bool],
        closures: list[types.FunctionType],
    ) -> None:
        self._kinds, self._plain, self._wanted = search.kinds, search._plain, search._wanted
        self._known_classes, self._classes = search._classes, list(classes)
        self._finds = search._finds
        self._function_holds_nothing, self._closures = function_holds_nothing, closures
        # By ids, for these objects may go: whatever then has the id of one that was looked into, is looked into.
        self._opened = {id(node.thing) for node in search.opened}
        self._left_out: dict[int, weakref.ref[Any]] = {}  # what was not, by its id

    def finds_nothing(self, roots: Mapping[str, object], *, first: bool = False) -> bool:
        """Whether the objects below some roots hold nothing for sure; ``first``: at once after the search."""
        try:
            level = [*roots.values(), *self._closures]
            return all(each() for each in self._classes) and self._finds_nothing(level, first)
        except Exception:  # changed by another thread, or odd in a way that nobody has thought of
            return False

    def _finds_nothing(self, level: list[object], first: bool) -> bool:
        plain, seen, left = self._plain, set[int](), _MOST_GLANCED
        for _ in range(_MOST_LEVELS):
            kinds = types_in(level)
            below: list[object] = []
            for kind in kinds:
                if id(kind) in plain:
                    continue
                things: list[Any] = level if len(kinds) == 1 else []
                things = things or [each for each in level if type(each) is kind]
                if kind is dict or kind is list or kind is tuple:
                    # All at once: a dataset may be a list of a thousand tuples.
                    if max(map(len, things)) > _MOST_ITEMS:
                        things = [each for each in things if len(each) <= _MOST_ITEMS]
                    left -= sum(map(len, things))
                    items = map(dict.values, things) if kind is dict else things
                    below += itertools.chain.from_iterable(items) if left > 0 else ()
                    continue
                leaves_out = first and self._may_leave_out(kind)
                for thing in things:
                    key = id(thing)
                    if key in seen:
                        continue
                    seen.add(key)
                    is_opened = key in self._opened
                    if leaves_out and not is_opened:
                        self._leave_out(thing)
                    if (left_out := self._left_out.get(key)) is not None and left_out() is thing:
                        left -= _LEFT_OUT_EACH
                        found: list[object] | None = []
                    else:
                        left -= 0 if is_opened else _GLANCED_EACH
                        found = self._held_by(thing) if left > 0 else None
                    if found is None or left <= 0:
                        return False
                    below += found
            if left <= 0:
                return False
            if not below:
                if first:
                    self._opened &= seen
                return self._opened <= seen  # where one is gone, a search may look into others
            level = below
        return False

    def _may_leave_out(self, kind: type) -> bool:
        """Whether objects of a class may be left out that the search has not looked into."""
        known = self._kinds.get(id(kind)) or Kind(kind)
        return not (known.container or self._finds(known))  # a container may have been empty

    def _leave_out(self, thing: object) -> None:
        """Leave an object out, unless nothing tells it from a later one."""
        with suppress(TypeError):
            self._left_out[id(thing)] = weakref.ref(thing)

    def _held_by(self, thing: object) -> list[object] | None:
        """What an object holds; None if the object, or a part of it, may be what is looked for."""
        key = id(type(thing))
        kind = self._kinds.get(key)
        if kind is None or key in self._wanted:
            return None
        if issubclass(kind.kind, type):
            return [] if id(thing) in self._known_classes else None
        if type(thing) is types.FunctionType and not self._function_holds_nothing(thing):
            return None
        if kind.container is not None and kind.container.__len__(thing) > _MOST_ITEMS:
            return []
        return kind.values_of(thing)


def held_by(thing: object) -> Iterator[tuple[str, Any]]:
    """All that an object holds: its items, what :func:`parts_of` names, and its attributes, each with its step."""
    kind = Kind(type(thing))
    if issubclass(kind.kind, type):
        return
    if kind.container is not None:
        for key, item in items_of(thing, kind.container):
            # Only of types whose ``repr`` is not the program's.
            is_plain = is_exactly(key, (str, int, bytes))
            yield _item(key) if is_plain else f"[a {name_of(type(key))}]", item
    yield from parts_of(thing)
    yield from ((f".{name}", each) for name, each in kind.attributes_of(thing))


def failing_part(
    thing: object, error: Exception, failure: Callable[[object], Exception | None]
) -> tuple[str, Any, Exception]:
    """The innermost part of an object for which something fails as it fails for the object.

    A part that fails in another way is none that matters: the object may do without it, or refuses by itself.

    Returns:
        Its path in the object, the part, and its exception.
    """
    path, seen, message = "", {id(thing)}, message_of(error)
    while True:
        # A function may fail only because it refers back to an object that holds the part.
        for step, part in sorted(held_by(thing), key=lambda held: callable(held[1])):
            if id(part) in seen or (inner := failure(part)) is None:
                continue
            if message_of(inner) == message:
                path, thing, error = path + step, part, inner
                seen.add(id(part))
                break
        else:
            return path, thing, error


_WITH_PARTS = (
    *(types.MethodType, types.BuiltinMethodType, types.FunctionType),
    *(functools.partial, defaultdict),
    *(staticmethod, classmethod, property, functools.cached_property),
)
_PARTIAL = {name: vars(functools.partial)[name].__get__ for name in ("func", "args", "keywords")}
_DEFAULT = vars(defaultdict)["default_factory"].__get__
_DESCRIPTORS = {
    id(staticmethod): ("__func__",),
    id(classmethod): ("__func__",),
    id(property): ("fget", "fset", "fdel"),
    id(functools.cached_property): ("func",),
}
"""The functions behind attributes of classes, by the id of the type of the attribute."""


# ---- lengths and sizes ----------------------------------------------------------------------

_NUMBER_BYTES = 8
_MOST_PARTS = 8  # the size of longer lists and dictionaries is extrapolated from their first values
_MOST_LOOKS_OF_SAMPLE = 128  # objects that are looked at in a sample
_TEXTS: tuple[Any, ...] = (str, bytes, bytearray)
_OF_NUMPY = tuple((each, vars(each)["nbytes"].__get__) for each in (np.ndarray, np.generic))
_NBYTES: dict[int, Callable[[Any], int]] = {
    id(np.ndarray): _OF_NUMPY[0][1],
    id(torch.Tensor): lambda tensor: attribute(tensor, "nbytes", 0),  # sparse ones have none
    **dict.fromkeys(map(id, (int, float)), lambda number: _NUMBER_BYTES),
    **dict.fromkeys(map(id, _TEXTS), len),
}
"""Sizes of what most samples consist of, by the id of its very class."""


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
    except Exception:  # of a sparse tensor's nbytes; and another thread may change a dictionary
        return 0


def _nbytes_of(sample: object) -> int:
    total = 0.0
    waiting: list[tuple[Any, float]] = [(sample, 1.0)]
    for value, weight in waiting:  # which grows
        kind = type(value)
        if (known := _NBYTES.get(id(kind))) is not None:
            total += weight * known(value)
            continue
        base: Any = kind if kind is tuple or kind is dict or kind is list else None
        if base is None and derives(kind, UserDict):
            value = (Kind(kind).dict_of(value) or {}).get("data")
            kind = type(value)
        if base is None:
            base = next((base for base in (tuple, dict, list) if issubclass(kind, base)), None)
        if base is None:
            total += weight * _nbytes_of_leaf(value, kind)
        elif (length := base.__len__(value)) and len(waiting) < _MOST_LOOKS_OF_SAMPLE:
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
        return int(attribute(value, "nbytes", 0))
    for base in _TEXTS:
        if issubclass(kind, base):
            return int(base.__len__(value))
    pillow = getattr(sys.modules.get("PIL.Image"), "Image", None)
    if isinstance(pillow, type) and issubclass(kind, pillow):
        width, height = value.size
        return int(width * height * len(value.getbands()))
    return 0
