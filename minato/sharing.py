"""Datasets whose Python objects lie in memory that all workers share.

A forked worker shares the memory of the training process until one of them writes to it, and reading a Python object
writes its reference count: a dataset that keeps a list of paths is copied into every worker, page by page. Workers that
are not forked get a copy each from the start. :func:`share` lays such lists once into memory without reference counts.
"""

from __future__ import annotations

import itertools
import logging
import numbers
import pickle
from bisect import bisect_left
from collections import deque
from collections.abc import (
    Callable,
    Hashable,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    ValuesView,
)
from enum import Enum
from io import BytesIO
from operator import is_not
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import Dataset

from minato._core import Column
from minato._core.read_only import ReadOnlyMemory, shared_base, view_of
from minato._support.hashes import key_hash
from minato._support.objects import Kind, Node, derives, items_of, name_of, path_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SharedDict", "SharedList", "is_looked_through", "share"]

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Layout: TypeAlias = tuple[str, int, int, int, tuple[Any, ...], tuple[Any, ...]]
"""See the pure form of :class:`~minato._core.Column`."""

_log = logging.getLogger("minato")

LEAST_ITEMS = 1000
"""Shorter lists and dictionaries in a dataset stay; what they hold is looked at."""
LEAST_ARRAY_NBYTES = 1 << 16
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_CHUNK = 1 << 16
"""Items that are converted at a time: what the conversion takes on top of its result is small."""


def share(dataset: T) -> T:
    """Lay the large lists, dictionaries and arrays of a dataset into memory that all processes share.

    Looked through are the attributes of the object, of datasets and dataclasses that it holds, and of what short lists,
    tuples and dictionaries hold. Each list or tuple of 1,000 items or more becomes a :class:`SharedList`, each such
    dictionary a :class:`SharedDict`, each array of 64 KiB or more an array that is read-only. Tensors and single
    strings stay: reading them writes nothing next to their data.

    The memory has no name, is the same for all workers, however they are started, and is freed with its last user.
    With Ray there is one copy for each node. Other pickles, such as those of ``torch.save``, hold the content.

    Args:
        dataset: Changed in place. A list, tuple, dictionary or array, of any size, is not changed.

    Returns:
        The dataset; or the shared form of the list, tuple, dictionary or array.

    Raises:
        TypeError: A large container cannot be shared; names it, the element and its type. Nothing is changed.
        OSError: There is no memory left, or no file descriptor.
    """
    walk = _Walk(dataset)
    found = list(walk.found.values())
    if not found:
        return dataset

    def write(file: BinaryIO) -> None:
        writer = _Writer(file)
        for each in found:
            each.write(writer)

    memory = ReadOnlyMemory.written_by(write)
    forms = {id(each.value): each.attach(memory) for each in found}
    for each in found:
        _log.info("shared %s: %d items", each.path, len(each.value))
    return cast(T, walk.replace(forms))


def is_looked_through(kind: Kind) -> bool:
    """Whether :func:`share` looks at the attributes of objects of a class: of datasets and dataclasses."""
    return issubclass(kind.kind, Dataset) or kind.defines("__dataclass_fields__")


class _Walk:
    """Finds the large containers of a dataset, and replaces them.

    Args:
        root: A dataset or a container.

    Attributes:
        found: What is to be replaced, by id.

    Raises:
        TypeError: A large container cannot be shared.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self.found: dict[int, _Found] = {}
        self._kinds: dict[int, Kind] = {}
        self._seen: set[int] = set()
        self._holders: list[Node] = []
        self._held: list[list[tuple[Any, Any]]] = []
        """What each holder holds, with keys, positions or names."""
        kind = self._kind(root)
        name = name_of(kind.kind)
        if derives(kind.kind, *_CONTAINERS, np.ndarray, SharedList, SharedDict):
            self._look(Node(root, None, name), least=0)
            return
        if not kind.has_attributes or issubclass(kind.kind, type):
            raise TypeError(
                f"a {name} has nothing to share: pass a dataset, or a list, tuple, dictionary or array"
            )
        self._hold(Node(root, None, "dataset"))
        for node in self._holders:  # which grows
            kind = self._kind(node.thing)
            if kind.container is None:
                held = kind.attributes_of(node.thing)
                nodes = [Node(value, node, f".{key}") for key, value in held]
            else:
                held = items_of(node.thing, kind.container)
                nodes = [Node(value, node, (key,)) for key, value in held]
            self._held.append(held)
            for each in nodes:
                self._look(each)

    def _kind(self, value: Any) -> Kind:
        kind = self._kinds.get(id(type(value)))
        if kind is None:
            kind = self._kinds[id(type(value))] = Kind(type(value))
        return kind

    def _hold(self, node: Node) -> None:
        if id(node.thing) not in self._seen:
            self._seen.add(id(node.thing))
            self._holders.append(node)

    def _look(self, node: Node, least: int = LEAST_ITEMS) -> None:
        """Note a container that is large, and look into other ones later."""
        value = node.thing
        kind = self._kind(value)
        if issubclass(kind.kind, np.ndarray):
            if _nbytes(value) >= min(LEAST_ARRAY_NBYTES, least) and shared_base(value) is None:
                self._check_array(node)
                self.found.setdefault(id(value), _Found(value, node))
            return
        base = next((base for base in _CONTAINERS if issubclass(kind.kind, base)), None)
        if base is None:
            if is_looked_through(kind):
                self._hold(node)
        elif base.__len__(value) >= least:
            if not (kind.kind is list or kind.kind is tuple or kind.kind is dict):
                raise TypeError(
                    f"{path_of(node)} is a {name_of(kind.kind)} of {base.__len__(value)} items, which cannot be "
                    "shared: make it a list or a dictionary, or share the other attributes, as in dataset.paths = "
                    "minato.share(dataset.paths)"
                )
            self.found.setdefault(id(value), _Found(value, node))
        elif base in (list, tuple, dict):
            self._hold(node)

    def _check_array(self, node: Node) -> None:
        array = node.thing
        if type(array) is not np.ndarray or array.dtype.hasobject:
            raise TypeError(
                f"{path_of(node)} is a {name_of(type(array))} of {array.dtype}, which cannot be shared: make it a "
                "list, or an array of another dtype"
            )

    def replace(self, forms: dict[int, Any]) -> Any:
        """Replace what was found by its form, by id; returns the root, or its form."""
        new = dict(forms)
        kept: list[Any] = []  # keeps the ids in ``new`` unique
        holders = list(zip(self._holders, self._held, strict=False))
        # Tuples first, from the innermost out: a tuple with another item is another tuple.
        tuples = [
            pair for pair in reversed(holders) if self._kind(pair[0].thing).container is tuple
        ]
        changes = True
        while changes:
            changes = False
            for node, held in tuples:
                items = [new.get(id(value), value) for _, value in held]
                before = new.get(id(node.thing), node.thing)
                if any(map(is_not, items, tuple.__iter__(before))):
                    new[id(node.thing)] = self._tuple_like(node.thing, items)
                    kept.append(before)
                    changes = True
        for node, held in holders:
            kind = self._kind(node.thing)
            for key, value in held:
                if id(value) not in new or kind.container is tuple:
                    continue
                if kind.container is None:
                    kind.set_attribute(node.thing, key, new[id(value)])
                else:
                    kind.container.__setitem__(node.thing, key, new[id(value)])
        return new.get(id(self._root), self._root)

    def _tuple_like(self, given: Any, items: list[Any]) -> Any:
        made = tuple.__new__(type(given), items)
        kind = self._kind(given)
        for name, value in kind.attributes_of(given):
            dict.__setitem__(cast(Any, kind.dict_of(made)), name, value)
        return made


_nbytes: Callable[[Any], int] = vars(np.ndarray)["nbytes"].__get__


class _Found:
    """A container that is to be shared."""

    def __init__(self, value: Any, node: Node) -> None:
        self.value = value
        self.path = path_of(node)
        self._layout: Any = None

    def write(self, writer: _Writer) -> None:
        value = self.value
        if isinstance(value, np.ndarray):
            self._layout = writer.append(np.ascontiguousarray(value))
        elif isinstance(value, dict):
            self._layout = writer.table(value, self.path)
        else:
            self._layout = writer.column(value, lambda i: f"{self.path}[{i}]")

    def attach(self, memory: ReadOnlyMemory) -> Any:
        value = self.value
        if isinstance(value, np.ndarray):
            return view_of(memory, value.dtype, self._layout, value.shape)
        return _attach(SharedDict if isinstance(value, dict) else SharedList, memory, self._layout)


class SharedList(Column, Sequence[T]):
    """A list that cannot be changed, in memory that all workers share.

    Each access makes new objects, equal to those that were stored: changing one that was returned changes nothing here.
    Tuples, lists and dictionaries of plain values come sooner if all items have the same length or keys.

    Args:
        items: Strings, bytes, numbers, tuples, lists, dictionaries, arrays, or other objects that pickle can copy and
            that compare by value.

    Raises:
        TypeError: An item cannot be shared; names it and its type.
    """

    _memory: ReadOnlyMemory
    _layout: Layout

    def __init__(self, items: Iterable[T]) -> None:
        kept = items if isinstance(items, (list, tuple)) else list(items)
        layouts: list[Layout] = []
        memory = ReadOnlyMemory.written_by(
            lambda file: layouts.append(_Writer(file).column(kept, lambda i: f"SharedList[{i}]"))
        )
        self._attach(memory, layouts[0])

    def _attach(self, memory: ReadOnlyMemory, layout: Layout) -> None:
        super().__init__(layout, memory.array)
        self._memory, self._layout = memory, layout

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (type(self), self._memory, self._layout)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, tuple, SharedList)):
            return NotImplemented
        return len(self) == len(other) and all(map(_equal, self, other))

    def __add__(self, other: Any) -> list[T]:
        return [*self, *other]

    def __radd__(self, other: Any) -> list[T]:
        return [*other, *self]

    def __array__(self, dtype: Any = None, copy: object = None) -> np.ndarray[Any, Any]:
        return np.asarray(list(self), dtype)

    def __repr__(self) -> str:
        return f"SharedList({_summary(self)})"

    def _read_only(self, *_: object) -> NoReturn:
        raise TypeError("a SharedList cannot be changed: change the list before minato.share()")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _read_only
    append = extend = insert = pop = remove = reverse = sort = clear = _read_only


class SharedDict(Mapping[K, V]):
    """A dictionary that cannot be changed, in memory that all workers share.

    A lookup is a binary search, and makes a new object, equal to the one that was stored.

    Args:
        items: Keys are strings, bytes, numbers but NaN, None, or tuples of them, and are found by any key that equals
            them, of whichever type; values as in :class:`SharedList`.

    Raises:
        TypeError: A key or value cannot be shared; names it and its type.
    """

    _memory: ReadOnlyMemory
    _layout: tuple[Layout, Layout, int]

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]]) -> None:
        layouts: list[Any] = []
        memory = ReadOnlyMemory.written_by(
            lambda file: layouts.append(_Writer(file).table(dict(items), type(self).__qualname__))
        )
        self._attach(memory, layouts[0])

    def _attach(self, memory: ReadOnlyMemory, layout: tuple[Layout, Layout, int]) -> None:
        self._memory, self._layout = memory, layout
        keys, values, start = layout
        self._keys: Any = Column(keys, memory.array)
        self._values: Any = Column(values, memory.array)
        middle, end = start + 8 * len(self._keys), start + 16 * len(self._keys)
        self._hashes = memoryview(memory.array[start:middle].view(np.uint64))
        self._places = memoryview(memory.array[middle:end].view(np.int64))

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (type(self), self._memory, self._layout)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __getitem__(self, key: K) -> V:
        hash(key)  # raises TypeError as a dictionary does
        if not _can_be_key(key):
            raise KeyError(key)
        wanted = key_hash(key)
        for i in range(bisect_left(self._hashes, wanted), len(self._hashes)):
            if self._hashes[i] != wanted:
                break
            place = self._places[i]
            if self._keys[place] == key:
                return cast(V, self._values[place])
        raise KeyError(key)

    def __iter__(self) -> Iterator[K]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def values(self) -> ValuesView[V]:
        """All values, in order."""
        return _Values(self)

    def items(self) -> ItemsView[K, V]:
        """All pairs of key and value, in order."""
        return _Items(self)

    def pairs(self) -> tuple[Any, Any]:
        """The columns of keys and values."""
        return self._keys, self._values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return len(self) == len(other) and all(
            key in other and _equal(value, other[key]) for key, value in self.items()
        )

    def __repr__(self) -> str:
        return f"SharedDict({_summary(self)})"

    def _read_only(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "a SharedDict cannot be changed: change the dictionary before minato.share()"
        )

    __setitem__ = __delitem__ = __ior__ = _read_only
    clear = pop = popitem = setdefault = update = _read_only


class _Values(ValuesView[V]):
    _mapping: SharedDict[Any, V]

    def __iter__(self) -> Iterator[V]:
        return iter(self._mapping.pairs()[1])


class _Items(ItemsView[K, V]):
    _mapping: SharedDict[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return zip(*self._mapping.pairs(), strict=True)


def _attach(kind: type[Any], memory: ReadOnlyMemory, layout: Any) -> Any:
    container = cast(Any, kind).__new__(kind)
    container._attach(memory, layout)
    return container


def _equal(one: object, other: object) -> bool:
    if isinstance(one, (np.ndarray, torch.Tensor)):
        return type(one) is type(other) and bool(np.all(np.asarray(one == other)))
    return bool(one == other)


def _within(where: Callable[[int], str], key: object) -> Callable[[int], str]:
    return lambda i: f"{where(i)}[{key!r}]"


def _summary(items: Any) -> str:
    shown = ", ".join(map(repr, itertools.islice(items, 3)))
    return f"{len(items)} items: {shown}{', …' if len(items) > 3 else ''}"


def _can_be_key(key: object) -> bool:
    """Whether a key is found by all that equal it: their hashes are the same in every process."""
    if isinstance(key, tuple):
        return all(map(_can_be_key, key))
    if isinstance(key, (numbers.Number, np.bool_)):
        return bool(key == key)  # not NaN
    return key is None or isinstance(key, (str, bytes))


class _ItemPickler(pickle.Pickler):
    """Refuses objects that would come back unequal. Called for all but plain objects."""

    def reducer_override(self, value: Any) -> Any:
        if (
            "__eq__" not in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}
            and not isinstance(value, (type, FunctionType, BuiltinFunctionType, Enum))
            and not isinstance(value, (torch.UntypedStorage, torch.storage.TypedStorage))
            and value is not ...
            and value is not NotImplemented
        ):
            raise TypeError(
                f"a {type(value).__qualname__}, which equals only itself: each access would return another one"
            )
        return NotImplemented


class _Writer:
    """Writes containers into a file, each part at a multiple of 8."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        file.write(bytes(8))  # memory cannot be empty

    def append(self, content: Any) -> int:
        """Write bytes or an array; returns where they begin."""
        start = self._align()
        self._file.write(content.data if isinstance(content, np.ndarray) else content)
        return start

    def _align(self) -> int:
        self._file.write(bytes(-self._file.tell() % 8))
        return self._file.tell()

    def table(self, items: dict[Any, Any], path: str) -> tuple[Layout, Layout, int]:
        """Write a dictionary: its keys, its values, and the sorted hashes of the keys with their places."""
        keys = list(items)
        hashes = np.empty(len(keys), np.uint64)
        for i, key in enumerate(keys):
            if not _can_be_key(key):
                raise TypeError(
                    f"{path} cannot be shared: its key {key!r} is a {type(key).__qualname__}; keys can be strings, "
                    "bytes, numbers but NaN, None, and tuples of them"
                )
            hashes[i] = key_hash(key)
        places = np.argsort(hashes, kind="stable").astype(np.int64, copy=False)
        layout = (
            self.column(keys, lambda i: f"the key {keys[i]!r} of {path}"),
            self.column(list(items.values()), lambda i: f"{path}[{keys[i]!r}]"),
        )
        start = self.append(hashes[places])
        self.append(places)
        return *layout, start

    def column(self, items: Sequence[Any], where: Callable[[int], str]) -> Layout:
        """Write a list in the form that is read soonest; ``where`` names an item in errors."""
        kinds = set(map(type, items))
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is int:
            try:
                return "int", len(items), self.append(np.array(items, np.int64)), 0, (), ()
            except OverflowError:
                kind = None
        if kind is bool or kind is float:
            array = np.array(items, np.bool_ if kind is bool else np.float64)
            return kind.__name__, len(items), self.append(array), 0, (), ()
        if kind is str or kind is bytes:
            return self._strings(items, kind.__name__)
        if kind is tuple and len(set(map(len, items))) == 1 and len(items[0]):
            children = tuple(
                self.column(part, _within(where, k))
                for k, part in enumerate(zip(*items, strict=True))
            )
            return "tuple", len(items), 0, 0, (), children
        if kind is list:
            lengths = np.fromiter(map(len, items), np.int64, len(items))
            ends = np.cumsum(lengths)

            def place(j: int) -> str:
                i = int(np.searchsorted(ends, j, "right"))
                return f"{where(i)}[{j - int(ends[i] - lengths[i])}]"

            child = self.column(list(itertools.chain.from_iterable(items)), place)
            return "list", len(items), 0, self._offsets([lengths]), (), (child,)
        if kind is dict and all(list(item) == list(items[0]) for item in items) and items[0]:
            keys = tuple(items[0])
            if set(map(type, keys)) == {str}:
                children = tuple(
                    self.column([item[key] for item in items], _within(where, key)) for key in keys
                )
                return "dict", len(items), 0, 0, keys, children
        return self._pickles(items, where)

    def _strings(self, items: Sequence[Any], kind: str) -> Layout:
        start = self._align()
        lengths = []
        for begin in range(0, len(items), _CHUNK):
            chunk = items[begin : begin + _CHUNK]
            joined = chunk[0][:0].join(chunk)
            if kind == "str" and not joined.isascii():
                chunk = [item.encode("utf-8", "surrogatepass") for item in chunk]
                joined = b"".join(chunk)
            self._file.write(joined.encode() if isinstance(joined, str) else joined)
            lengths.append(np.fromiter(map(len, chunk), np.int64, len(chunk)))
        return kind, len(items), start, self._offsets(lengths), (), ()

    def _pickles(self, items: Sequence[Any], where: Callable[[int], str]) -> Layout:
        start = self._align()
        lengths = np.empty(len(items), np.int64)
        buffer = BytesIO()
        pickler = _ItemPickler(buffer, 5)
        for i, item in enumerate(items):
            try:
                pickler.dump(item)
            except Exception as error:
                raise TypeError(
                    f"{where(i)}, a {type(item).__qualname__}, cannot be shared: {error}. Keep such objects in a list "
                    "of their own, or store what they are made of"
                ) from error
            pickler.clear_memo()
            lengths[i] = buffer.tell()
            self._file.write(buffer.getbuffer())
            buffer.seek(0)
            buffer.truncate()
        return "pickle", len(items), start, self._offsets([lengths]), (), ()

    def _offsets(self, lengths: Sequence[np.ndarray[Any, Any]]) -> int:
        counts = np.concatenate([np.zeros(1, np.int64), *lengths])
        return self.append(np.cumsum(counts))
