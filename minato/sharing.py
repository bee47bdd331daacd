"""Datasets whose Python objects lie in memory that all workers share.

A forked worker shares the memory of the training process until one of them writes to it, and reading a Python object
writes its reference count: a dataset that keeps a list of paths is copied into every worker, page by page. Workers that
are not forked get a copy each from the start. :func:`share` lays such lists once into memory without reference counts.
"""

from __future__ import annotations

import itertools
import mmap
import numbers
import pickle
from bisect import bisect_left
from collections import deque
from collections.abc import (
    Callable,
    Collection,
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
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import Dataset

from minato._core.read_only import ReadOnlyMemory, shared_base, view_of
from minato._core.segment import Segment
from minato._support.hashes import key_hash
from minato._support.objects import (
    Kind,
    Node,
    Search,
    derives,
    failing_part,
    items_of,
    mro_of,
    name_of,
    path_of,
    vars_of,
)
from minato._support.pickling import ViewPickler, span_of
from minato.errors import log

if TYPE_CHECKING:
    from typing import Self

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
S = TypeVar("S", bound="_Shared")


LEAST_ITEMS = 1000  # shorter lists and dictionaries in a dataset stay; what they hold is looked at
LEAST_ARRAY_NBYTES = 1 << 16
_SHAREABLE = (list, tuple, dict)
_CONTAINERS = (*_SHAREABLE, set, frozenset, deque)
_CHUNK = 1 << 16
"""Items that are converted at a time: what the conversion takes on top of its result is small."""
_NUMBERS: dict[Any, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
"""Types of items that lie in an array, with its dtype."""
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "str": bytes.decode,
    "bytes": bytes,
    "pickle": pickle.loads,
}
"""How an item is made of its bytes."""


def share(dataset: T) -> T:
    """Lay the large lists, dictionaries and arrays of a dataset into memory that all processes share.

    Looked through are the attributes of the object, of datasets and dataclasses that it holds, and of what short lists,
    tuples and dictionaries hold. Each list or tuple of 1,000 items or more becomes a :class:`SharedList`, each such
    dictionary a :class:`SharedDict`, each array of 64 KiB or more an array that is read-only. Tensors and single
    strings stay: reading them writes nothing next to their data. Arrays in a mapped file (``np.memmap``) stay too:
    forked workers share its pages.

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
    found, holders = _large_parts(dataset)
    if not found:
        return dataset
    memory, layouts = _written(lambda writer: list(map(writer.container, found)))
    forms: dict[int, Any] = {}
    for node, layout in zip(found, layouts, strict=True):
        value = node.thing
        form: Any
        if type(value) is np.ndarray:
            start, strides = layout
            form, size = view_of(memory, value.dtype, start, value.shape, strides), value.size
        else:
            kind = SharedDict if type(value) is dict else SharedList
            form, size = _attached(kind, memory, layout), len(value)
        forms[id(value)] = form
        log("shared %s: %d items", path_of(node), size)
    _replace(holders, forms)
    return cast(T, forms.get(id(dataset), dataset))


def is_looked_through(kind: Kind) -> bool:
    """Whether :func:`share` looks at the attributes of objects of a class: of datasets and dataclasses."""
    classes = map(vars_of, mro_of(kind.kind))
    return issubclass(kind.kind, Dataset) or any("__dataclass_fields__" in own for own in classes)


def _large_parts(root: object) -> tuple[list[Node], list[Node]]:
    """The containers that are to be shared, and all objects that may hold one; holders come before what they hold."""
    kind = Kind(type(root))
    if derives(kind.kind, *_CONTAINERS, np.ndarray, SharedList, SharedDict):
        node = Node(root, None, name_of(kind.kind))
        found = [node] if _is_large(root, 0) else []
        holders = []
    elif kind.has_attributes and not issubclass(kind.kind, type):
        search = Search(
            lambda kind: derives(kind.kind, *_CONTAINERS, np.ndarray),
            wants=_is_large,
            opens=is_looked_through,
            samples=False,
        )
        found, holders = search.run({"dataset": root}), search.opened
    else:
        raise TypeError(
            f"a {name_of(kind.kind)} has nothing to share: pass a dataset, or a list, tuple, dictionary or array"
        )
    for node in found:
        _check(node)
    return found, holders


def _is_large(value: Any, least: int = LEAST_ITEMS) -> bool:
    kind = type(value)
    if issubclass(kind, np.ndarray):
        nbytes = np.ndarray.nbytes.__get__(value)
        return nbytes >= min(LEAST_ARRAY_NBYTES, least) and not _is_mapped(value)
    return any(issubclass(kind, base) and base.__len__(value) >= least for base in _CONTAINERS)


def _is_mapped(array: np.ndarray) -> bool:
    """Whether an array views shared memory, or a file, whose pages all processes share."""
    if shared_base(array) is not None:
        return True
    base: Any = array
    while (kind := type(base)) is memoryview or issubclass(kind, np.ndarray):
        base = base.obj if kind is memoryview else np.ndarray.base.__get__(base)
    return issubclass(kind, mmap.mmap)


def _check(node: Node) -> None:
    value, kind = node.thing, type(node.thing)
    if issubclass(kind, np.ndarray):
        if kind is not np.ndarray or value.dtype.hasobject:
            raise TypeError(
                f"{path_of(node)} is a {name_of(kind)} of {value.dtype}, which cannot be shared: make it a list, or an "
                "array of another dtype"
            )
    elif not any(kind is each for each in _SHAREABLE):
        length = next(base.__len__(value) for base in _CONTAINERS if issubclass(kind, base))
        raise TypeError(
            f"{path_of(node)} is a {name_of(kind)} of {length} items, which cannot be shared: make it a list or a "
            "dictionary, or share the other attributes, as in dataset.paths = minato.share(dataset.paths)"
        )


def _replace(holders: Sequence[Node], forms: dict[int, Any]) -> None:
    """Put the shared forms, by id, in the place of the containers that some objects hold."""
    kept: list[Any] = []  # keeps the ids in ``forms`` unique
    # Tuples first, from the innermost out: a tuple with another item is another tuple.
    tuples = [node.thing for node in reversed(holders) if issubclass(type(node.thing), tuple)]
    changes = True
    while changes:
        changes = False
        for given in tuples:
            items = [forms.get(id(value), value) for value in tuple.__iter__(given)]
            before = forms.get(id(given), given)
            if any(map(is_not, items, tuple.__iter__(before))):
                kind, made = Kind(type(given)), tuple.__new__(type(given), items)
                for name, value in kind.attributes_of(given):
                    dict.__setitem__(cast(Any, kind.dict_of(made)), name, value)
                forms[id(given)] = made
                kept.append(before)
                changes = True
    for node in holders:
        kind = Kind(type(node.thing))
        if kind.container is not None and kind.container is not tuple:
            for key, value in items_of(node.thing, kind.container):
                if id(value) in forms:
                    kind.container.__setitem__(node.thing, key, forms[id(value)])
        if node.parent is None or is_looked_through(kind):
            for name, value in kind.attributes_of(node.thing):
                if id(value) in forms:
                    kind.set_attribute(node.thing, name, forms[id(value)])


class _Layout(NamedTuple):
    """Where a list lies in its memory.

    ``kind`` is the name of a type of ``_NUMBERS``, or one of ``_DECODERS``. From ``start`` on, at a multiple of 8, lie
    the numbers; or ``length + 1`` int64: the i-th says where the bytes of item i begin, the next one where they end.
    """

    kind: str
    length: int
    start: int


class _Shared:
    """What a list and a dictionary have in common: they lie in memory that nobody can write to."""

    _memory: ReadOnlyMemory
    _layout: Any
    _original: str  # the type that it has been made of

    def _attach(self, memory: ReadOnlyMemory, layout: Any) -> None:
        self._memory, self._layout = memory, layout

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (type(self), self._memory, self._layout)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def _read_only(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be changed: change the {self._original} before minato.share()"
        )

    __setitem__ = __delitem__ = __iadd__ = __imul__ = __ior__ = _read_only


class SharedList(_Shared, Sequence[T]):
    """A list that cannot be changed, in memory that all workers share.

    Each access makes new objects, equal to those that were stored: changing one that was returned changes nothing here.
    Numbers, strings and bytes come soonest, if all items are of one type; others are unpickled.

    Args:
        items: Strings, bytes, numbers, tuples, lists, dictionaries, arrays, or other objects that pickle can copy and
            that compare by value.

    Raises:
        TypeError: An item cannot be shared; names it and its type.
    """

    _layout: _Layout
    _original = "list"

    def __init__(self, items: Iterable[T]) -> None:
        kept = items if isinstance(items, (list, tuple)) else list(items)
        self._attach(*_written(lambda to: to.column(kept, lambda i: f"SharedList[{i}]")))

    def _attach(self, memory: ReadOnlyMemory, layout: _Layout) -> None:
        super()._attach(memory, layout)
        kind, length, start = layout
        dtype = next((each for of, each in _NUMBERS.items() if of.__name__ == kind), None)
        self._numbers: Any = None if dtype is None else memory.words(dtype, start, length)
        if dtype is None:
            # A view of a mapping would be a memoryview, of which ``bytes.decode`` knows nothing.
            whole = memory.buffer
            self._bytes: Any = whole if type(whole) in (bytes, mmap.mmap) else _Copied(whole)
            places = memory.words(np.int64, start, length + 1)
            self._begins, self._ends = places[:-1], places[1:]
            self._decode = _DECODERS[kind]

    def __len__(self) -> int:
        return self._layout.length

    def __getitem__(self, index: Any) -> Any:
        if type(index) is slice:
            return [self[i] for i in range(*index.indices(len(self)))]
        try:
            if self._numbers is not None:
                return self._numbers[index]
            content = self._bytes[self._begins[index] : self._ends[index]]
        except IndexError:
            raise IndexError(f"index {index} is out of range for {len(self)} items") from None
        return self._decode(content)

    def __iter__(self) -> Iterator[T]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, tuple, SharedList)):
            return NotImplemented
        return len(self) == len(other) and all(map(_equal, self, other))

    def copy(self) -> list[T]:
        """A list of all items, which can be changed."""
        return [*self]

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self, *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self]

    def __array__(self, dtype: np.dtype | None = None, copy: object = None) -> np.ndarray:
        return np.asarray(list(self), dtype)

    def __repr__(self) -> str:
        return f"SharedList({_summary(self)})"

    append = extend = insert = pop = remove = reverse = sort = clear = _Shared._read_only


class SharedDict(_Shared, Mapping[K, V]):
    """A dictionary that cannot be changed, in memory that all workers share.

    A lookup is a binary search, and makes a new object, equal to the one that was stored.

    Args:
        items: Keys are strings, bytes, numbers but NaN, None, or tuples of them, and are found by any key that equals
            them, of whichever type; values as in :class:`SharedList`.

    Raises:
        TypeError: A key or value cannot be shared; names it and its type.
    """

    _layout: _TableLayout
    _original = "dictionary"

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]]) -> None:
        self._attach(*_written(lambda to: to.table(dict(items), type(self).__qualname__)))

    def _attach(self, memory: ReadOnlyMemory, layout: _TableLayout) -> None:
        super()._attach(memory, layout)
        self._keys = _attached(SharedList, memory, layout.keys)
        self._values = _attached(SharedList, memory, layout.values)
        self._hashes = memory.words(np.uint64, layout.hashes, len(self._keys))
        self._places = memory.words(np.int64, layout.places, len(self._keys))

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

    def copy(self) -> dict[K, V]:
        """A dictionary of all items, which can be changed."""
        return dict(self.items())

    def pairs(self) -> tuple[SharedList[K], SharedList[V]]:
        """The lists of keys and values."""
        return self._keys, self._values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return len(self) == len(other) and all(
            key in other and _equal(value, other[key]) for key, value in self.items()
        )

    def __repr__(self) -> str:
        return f"SharedDict({_summary(self)})"

    clear = pop = popitem = setdefault = update = _Shared._read_only


class _Values(ValuesView[V]):
    _mapping: SharedDict[Any, V]

    def __iter__(self) -> Iterator[V]:
        return iter(self._mapping.pairs()[1])


class _Items(ItemsView[K, V]):
    _mapping: SharedDict[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return zip(*self._mapping.pairs(), strict=True)


class _Copied:
    """Gives parts of a memory as bytes, which have methods that views of it lack."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memoryview(memory)

    def __getitem__(self, part: slice) -> bytes:
        return bytes(self._memory[part])


def _written(write: Callable[[_Writer], T]) -> tuple[ReadOnlyMemory, T]:
    """What a function writes, in memory of its own, and what it returns."""
    returned: list[T] = []
    segment = Segment.filled(lambda file: returned.append(write(_Writer(file))))
    return ReadOnlyMemory(segment), returned[0]


def _attached(kind: type[S], memory: ReadOnlyMemory, layout: object) -> S:
    container = kind.__new__(kind)
    container._attach(memory, layout)
    return container


def _equal(one: object, other: object) -> bool:
    if isinstance(one, (np.ndarray, torch.Tensor)):
        alike = type(one) is type(other) and one.shape == other.shape
        return alike and bool(np.all(np.asarray(one == other)))
    return bool(one == other)


def _summary(items: Collection[object]) -> str:
    shown = ", ".join(map(repr, itertools.islice(items, 3)))
    return f"{len(items)} items: {shown}{', …' if len(items) > 3 else ''}"


def _can_be_key(key: object) -> bool:
    """Whether a key is found by all that equal it: their hashes are the same in every process."""
    if isinstance(key, tuple):
        return all(map(_can_be_key, key))
    if isinstance(key, (numbers.Number, np.bool_)):
        return bool(key == key)  # not NaN
    return key is None or isinstance(key, (str, bytes))


_COMES_BACK = (
    *(type, FunctionType, BuiltinFunctionType, Enum),
    *(torch.UntypedStorage, torch.storage.TypedStorage, torch.layout),
)
"""Objects that come back the same, or with equal content."""


class _ItemPickler(ViewPickler):
    """Refuses objects that would come back unequal. Called for all but plain objects."""

    def reducer_override(self, value: object) -> Any:
        compares = any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1])
        comes_back = compares or isinstance(value, _COMES_BACK)
        # A text is the name of a global one.
        if not comes_back and not isinstance(value.__reduce_ex__(5), str):
            raise TypeError(
                f"a {type(value).__qualname__}, which equals only itself: each access would return another one"
            )
        return super().reducer_override(value)


def _failure(item: object) -> Exception | None:
    """Why an item cannot be shared; None if it can."""
    try:
        _ItemPickler(BytesIO(), 5).dump(item)
    except Exception as error:
        return error
    return None


class _TableLayout(NamedTuple):
    """Where a dictionary lies: its keys, its values, the sorted hashes of the keys, and the position of each."""

    keys: _Layout
    values: _Layout
    hashes: int
    places: int


class _Writer:
    """Writes containers into a file, each part at a multiple of 8."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        file.write(bytes(8))  # memory cannot be empty

    def container(self, node: Node) -> Any:
        """Write a list, tuple, dictionary or array; returns its layout."""
        value, path = node.thing, path_of(node)
        if type(value) is np.ndarray:
            return self._array(value)
        if type(value) is dict:
            return self.table(value, path)
        return self.column(value, lambda i: f"{path}[{i}]")

    def _array(self, array: np.ndarray) -> tuple[int, tuple[int, ...] | None]:
        """Write an array, and what its items share once; returns its start and, if they are kept, its strides."""
        span, before = span_of(array)
        if span.nbytes <= array.nbytes:
            return self._append(span) + before, array.strides
        return self._append(np.ascontiguousarray(array)), None

    def table(self, items: Mapping[K, object], path: str) -> _TableLayout:
        """Write a dictionary; ``path`` names it in errors."""
        keys = list(items)
        for key in keys:
            if not _can_be_key(key):
                raise TypeError(
                    f"{path} cannot be shared: its key {key!r} is a {type(key).__qualname__}; keys can be strings, "
                    "bytes, numbers but NaN, None, and tuples of them"
                )
        hashes = np.fromiter(map(key_hash, keys), np.uint64, len(keys))
        places = np.argsort(hashes, kind="stable").astype(np.int64, copy=False)
        return _TableLayout(
            self.column(keys, lambda i: f"the key {keys[i]!r} of {path}"),
            self.column(list(items.values()), lambda i: f"{path}[{keys[i]!r}]"),
            self._append(hashes[places]),
            self._append(places),
        )

    def column(self, items: Sequence[object], where: Callable[[int], str]) -> _Layout:
        """Write a list in the form that is read soonest; ``where`` names an item in errors."""
        kinds = set(map(type, items))
        kind = kinds.pop() if len(kinds) == 1 else None
        try:
            if kind is not None and kind in _NUMBERS:
                array = np.array(items, _NUMBERS[kind])
                return _Layout(kind.__name__, len(items), self._append(array))
            if kind is str or kind is bytes:
                return self._strings(items, kind)
        except (OverflowError, UnicodeEncodeError):  # beyond 64 bits, or lone surrogates
            pass
        return self._pickles(items, where)

    def _strings(self, items: Sequence[Any], kind: type) -> _Layout:
        start = self._align()
        lengths = []
        for begin in range(0, len(items), _CHUNK):
            chunk = items[begin : begin + _CHUNK]
            joined = kind().join(chunk)
            if kind is str and not joined.isascii():
                chunk = [item.encode() for item in chunk]
                joined = b"".join(chunk)
            self._file.write(joined.encode() if isinstance(joined, str) else joined)
            lengths.append(np.fromiter(map(len, chunk), np.int64, len(chunk)))
        return _Layout(kind.__name__, len(items), self._offsets(start, lengths))

    def _pickles(self, items: Sequence[object], where: Callable[[int], str]) -> _Layout:
        start = self._align()
        lengths = np.empty(len(items), np.int64)
        buffer = BytesIO()
        pickler = _ItemPickler(buffer, 5)
        for i, item in enumerate(items):
            try:
                pickler.dump(item)
            except Exception as error:
                path, part, reason = failing_part(item, error, _failure)
                raise TypeError(
                    f"{where(i)}{path}, a {type(part).__qualname__}, cannot be shared: {reason}. Keep such objects in "
                    "a list of their own, or store what they are made of"
                ) from error
            pickler.clear_memo()
            lengths[i] = buffer.tell()
            self._file.write(buffer.getbuffer())
            buffer.seek(0)
            buffer.truncate()
        return _Layout("pickle", len(items), self._offsets(start, [lengths]))

    def _offsets(self, start: int, lengths: Sequence[np.ndarray]) -> int:
        counts = np.concatenate([np.array([start], np.int64), *lengths])
        return self._append(np.cumsum(counts))

    def _append(self, content: np.ndarray) -> int:
        start = self._align()
        self._file.write(content.reshape(-1).view(np.uint8).data)  # not all dtypes have buffers
        return start

    def _align(self) -> int:
        self._file.write(bytes(-self._file.tell() % 8))
        return self._file.tell()
