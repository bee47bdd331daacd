"""Messages between the ranks of a node: JSON, every field of which the receiver checks."""

from __future__ import annotations

import functools
import itertools
import json
import operator
from collections.abc import Mapping
from types import UnionType
from typing import Any, NamedTuple, NewType, get_args, get_origin, get_type_hints

from minato.batching.arena import Slot
from minato.sampling.progress import BatchPart, Completed

__all__ = [
    "WITH_DESCRIPTOR",
    "BatchDescriptor",
    "BatchMessage",
    "Hello",
    "RankMessage",
    "encoded",
    "from_host",
    "from_rank",
]

WITH_DESCRIPTOR = "arena"
"""The kind of message that a file descriptor follows; only the server sends it."""

_LIMIT = 1 << 64
"""Of numbers: hashes have 64 bits."""
Pairs = tuple[tuple[int, int], ...]
_LISTS_OF_PAIRS = (Pairs, list[tuple[int, int]])
_Signed = NewType("_Signed", int)


class BatchDescriptor(NamedTuple):
    """The data from which a process builds the batch of a slot.

    Attributes:
        layout: Arena offset of the batch's layout; 0: it has none.
        result: Arena offset and bytes of the pickled batch, or of the pickled error; ``(0, 0)``: none.
        failed: Whether a sample or the collation raised.
        texts: Arena offset and bytes of each sample's strings; ``(0, 0)``: it has none.
        nbytes: Number of bytes written to the slot.
    """

    slot: Slot
    layout: int
    result: tuple[int, int]
    failed: bool
    texts: Pairs
    nbytes: int


class Hello(NamedTuple):
    """The first message of a client.

    Attributes:
        local_rank: Its rank on the node.
        rank: Its rank in the job.
        loader: Settings that must be equal in all ranks that share a pool, as strings by name.
    """

    local_rank: int
    rank: int
    loader: dict[str, str]


class RankMessage(NamedTuple):
    """A message of a client.

    Attributes:
        kind: ``hello``, ``enter``, ``next``, ``leave`` or ``bye``.
        number: Number of the epoch in the pool.
        dropped: Arena and start of each slot that the rank has dropped since its last message.
        more: ``hello``: :class:`Hello`. ``enter``: epoch number, and the part done before a resume. Otherwise None.
    """

    kind: str
    number: int
    dropped: Pairs
    more: Any


class BatchMessage(NamedTuple):
    """A batch for a client: ``kind`` is ``batch``, ``portion`` the part of the epoch that the batch covers."""

    kind: str
    number: int
    arena: int
    descriptor: BatchDescriptor
    portion: BatchPart


_OF_RANK: dict[str, Any] = {
    "hello": tuple[str, int, Pairs, Hello],
    "enter": tuple[str, int, Pairs, tuple[_Signed, Completed | None]],
    **dict.fromkeys(("next", "leave", "bye"), tuple[str, int, Pairs, None]),
}
"""The types of the clients' messages."""
_OF_HOST: dict[str, Any] = {
    **dict.fromkeys(("welcome", "open", "end"), tuple[str, int]),
    **dict.fromkeys(("broken", "refused"), tuple[str, str]),
    "failed": tuple[str, int, str],
    WITH_DESCRIPTOR: tuple[str, int, int],
    "given back": tuple[str, tuple[tuple[int, Slot], ...]],
    "batch": BatchMessage,
}
"""The types of the server's messages."""


def encoded(message: tuple[object, ...]) -> bytes:
    """Return a message as bytes.

    Raises:
        TypeError: It holds other types than tuples, strings, integers, bools and None.
    """
    # numpy's integers become Python's.
    return json.dumps(message, separators=(",", ":"), default=operator.index).encode()


def from_rank(data: bytes) -> RankMessage:
    """Decode a client's message.

    Raises:
        ValueError: The bytes are no such message.
    """
    return RankMessage(*_decoded(data, _OF_RANK))


def from_host(data: bytes) -> tuple[Any, ...]:
    """Decode a message of the server: its kind and its fields.

    Raises:
        ValueError: The bytes are no such message.
    """
    return _decoded(data, _OF_HOST)


def _decoded(data: bytes, types: Mapping[str, object]) -> tuple[Any, ...]:
    try:
        message = json.loads(data)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None
    kind = message[0] if type(message) is list and message else None
    if type(kind) is not str or kind not in types:
        raise ValueError("no message of this direction")
    found: tuple[Any, ...] = _checked(message, types[kind])
    return found


def _checked(value: object, kind: Any) -> Any:
    """Return a decoded value as its type has it: with tuples and named tuples in place of lists.

    Raises:
        ValueError: It is another one, or a number out of range.
    """
    origin = get_origin(kind)
    if origin is UnionType:
        return None if value is None else _checked(value, get_args(kind)[0])
    if kind in _LISTS_OF_PAIRS:
        return origin(_pairs(value))
    if kind == dict[str, str] and type(value) is dict:
        return {name: _checked(item, str) for name, item in value.items()}
    kinds = _items_of(kind)
    if kinds is None:
        if type(value) is not {_Signed: int, None: type(None)}.get(kind, kind):
            raise ValueError(f"a value of type {kind} is missing")
        if type(value) is int and kind is int and not 0 <= value < _LIMIT:
            raise ValueError("a number is out of range")
        return value
    if type(value) is not list:
        raise ValueError("a list is missing")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    items = [_checked(item, kind) for item, kind in zip(value, kinds, strict=True)]
    return tuple(items) if origin is tuple else kind(*items)


@functools.cache
def _items_of(kind: object) -> tuple[Any, ...] | None:
    """The types of the items of a tuple; None: it is no tuple."""
    if get_origin(kind) is tuple:
        return get_args(kind)
    is_named = isinstance(kind, type) and issubclass(kind, tuple)
    return tuple(get_type_hints(kind).values()) if is_named else None


def _pairs(value: object) -> Pairs:
    """Check pairs of numbers together: there may be one for each sample."""
    if type(value) is not list or any(type(pair) is not list or len(pair) != 2 for pair in value):
        raise ValueError("a list of pairs is missing")
    numbers = [*itertools.chain(*value)]
    if set(map(type, numbers)) - {int}:
        raise ValueError("a pair holds another value than numbers")
    if min(numbers, default=0) < 0 or max(numbers, default=0) >= _LIMIT:
        raise ValueError("a number is out of range")
    return tuple(map(tuple, value))
