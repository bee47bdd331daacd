"""Messages between the ranks of a node: JSON, every field of which the receiver checks."""

from __future__ import annotations

import functools
import itertools
import json
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from minato.batching.arena import Slot
from minato.sampling.progress import BatchPart, Completed, Tally

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


class BatchDescriptor(NamedTuple):
    """The data from which a process builds the batch of a slot.

    Attributes:
        slot: The slot that holds the batch.
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
    texts: tuple[tuple[int, int], ...]
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
    portion: Any


def encoded(message: tuple[object, ...]) -> bytes:
    """Return a message as bytes.

    Raises:
        TypeError: It holds other types than tuples, strings, integers, bools and None.
    """
    match message:
        case BatchMessage(descriptor=BatchDescriptor() as descriptor, portion=portion):
            # Flat lists: there may be a pair for each sample.
            ranges, samples, hashes = portion
            parts = descriptor._replace(texts=_flat(descriptor.texts))  # type: ignore[arg-type]  # only to be sent
            message = message._replace(descriptor=parts, portion=(_flat(ranges), samples, hashes))
    # numpy's integers become Python's.
    return json.dumps(message, separators=(",", ":"), default=operator.index).encode()


def _flat(pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(pairs))


def from_rank(data: bytes) -> RankMessage:
    """Decode a client's message.

    Raises:
        ValueError: The bytes are no such message.
    """
    match _parsed(data):
        case ["hello", 0, [], [local_rank, rank, dict(loader)]]:
            facts = {name: _checked(value, str) for name, value in loader.items()}
            who = Hello(_checked(local_rank, int), _checked(rank, int), facts)
            return RankMessage("hello", 0, (), who)
        case ["enter", number, dropped, [int(epoch), before]]:
            done = None if before is None else _checked(before, Completed)
            more = epoch, done
            return RankMessage("enter", _checked(number, int), _checked(dropped, Pairs), more)
        case [("next" | "leave" | "bye") as kind, number, dropped, None]:
            return RankMessage(kind, _checked(number, int), _checked(dropped, Pairs), None)
    raise ValueError("not a message of a client")


def from_host(data: bytes) -> tuple[Any, ...]:
    """Decode a message of the server: its kind and its fields.

    Raises:
        ValueError: The bytes are no such message.
    """
    match _parsed(data):
        case [("welcome" | "open" | "end") as kind, number]:
            return kind, _checked(number, int)
        case [("broken" | "refused") as kind, why]:
            return kind, _checked(why, str)
        case ["failed", number, why]:
            return "failed", _checked(number, int), _checked(why, str)
        case ["arena", number, nbytes]:
            return "arena", _checked(number, int), _checked(nbytes, int)
        case ["given back", places]:
            return "given back", _checked(places, tuple[tuple[int, Slot], ...])
        case ["batch", number, arena, [*fields, texts, nbytes], [ranges, *tally]]:
            slot, layout, result, failed = _checked(fields, _Fields)
            end = _unflat(texts), _checked(nbytes, int)
            portion = BatchPart(list(_unflat(ranges)), *_checked(tally, Tally))
            descriptor = BatchDescriptor(slot, layout, result, failed, *end)
            number, arena = _checked(number, int), _checked(arena, int)
            return BatchMessage("batch", number, arena, descriptor, portion)
    raise ValueError("not a message of a server")


_Fields = tuple[Slot, int, tuple[int, int], bool]
"""The first fields of a :class:`BatchDescriptor`."""


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None


def _checked(value: Any, kind: Any) -> Any:
    """Return a decoded value as an int, a bool, a str, or a tuple or a named tuple of them.

    Raises:
        ValueError: It is another one, or a number out of range.
    """
    kinds = _items_of(kind)
    if kinds is None:
        if type(value) is not kind or (kind is int and not 0 <= value < _LIMIT):
            raise ValueError(f"{kind.__name__} is missing or out of range")
        return value
    if type(value) is not list:
        raise ValueError("a list is missing")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    items = [_checked(item, kind) for item, kind in zip(value, kinds, strict=True)]
    return tuple(items) if get_origin(kind) is tuple else kind(*items)


@functools.cache
def _items_of(kind: type) -> tuple[Any, ...] | None:
    """The types of the items of a tuple; None: it is no tuple."""
    if get_origin(kind) is tuple:
        return get_args(kind)
    return tuple(get_type_hints(kind).values()) if issubclass(kind, tuple) else None


def _unflat(value: object) -> Pairs:
    """Return the pairs of a flat list."""
    if type(value) is not list or len(value) % 2 or set(map(type, value)) - {int}:
        raise ValueError("a list of pairs is missing")
    for number in (min(value, default=0), max(value, default=0)):
        _checked(number, int)
    return tuple(zip(value[::2], value[1::2], strict=True))
