"""Messages between the ranks of a node: JSON, every field of which the receiver checks."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

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

_LARGEST = 1 << 63
_MODULUS = 1 << 64
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


def encoded(message: tuple[Any, ...]) -> bytes:
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
            facts = {_text(name): _text(value) for name, value in loader.items()}
            return RankMessage("hello", 0, (), Hello(_count(local_rank), _count(rank), facts))
        case ["enter", number, dropped, [int(epoch), before]]:
            had = None if before is None else _completed(before)
            return RankMessage("enter", _count(number), _pairs(dropped), (epoch, had))
        case [("next" | "leave" | "bye") as kind, number, dropped, None]:
            return RankMessage(kind, _count(number), _pairs(dropped), None)
    raise ValueError("not a message of a client")


def from_host(data: bytes) -> tuple[Any, ...]:
    """Decode a message of the server: its kind and its fields.

    Raises:
        ValueError: The bytes are no such message.
    """
    match _parsed(data):
        case [("welcome" | "open" | "end") as kind, number]:
            return kind, _count(number)
        case [("broken" | "refused") as kind, why]:
            return kind, _text(why)
        case ["failed", number, why]:
            return "failed", _count(number), _text(why)
        case ["arena", number, nbytes]:
            return "arena", _count(number), _count(nbytes)
        case ["given back", list(places)]:
            return "given back", tuple(map(_place, places))
        case ["batch", number, arena, descriptor, [ranges, samples, hashes]]:
            portion = BatchPart(list(_unflat(ranges)), _count(samples), _count(hashes, _MODULUS))
            return BatchMessage(
                "batch", _count(number), _count(arena), _descriptor(descriptor), portion
            )
    raise ValueError("not a message of a server")


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None


def _count(value: object, limit: int = _LARGEST) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError("a number is missing or out of range")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError("expected a string")
    return value


def _pair(value: object) -> tuple[int, int]:
    first, second = _items(value)
    return _count(first), _count(second)


def _pairs(value: object) -> Pairs:
    return tuple(map(_pair, _items(value)))


def _unflat(value: object) -> Pairs:
    """Return the pairs of a flat list."""
    items = _items(value)
    if len(items) % 2 or set(map(type, items)) - {int} or min(items, default=0) < 0:
        raise ValueError("expected a list of pairs")
    _count(max(items, default=0))
    return tuple(zip(items[::2], items[1::2], strict=True))


def _items(value: object) -> list[Any]:
    if type(value) is not list:
        raise ValueError("expected a list")
    return value


def _slot(value: object) -> Slot:
    start, end = _pair(value)
    if start > end:
        raise ValueError("a slot ends before it starts")
    return Slot(start, end)


def _place(value: object) -> tuple[int, Slot]:
    arena, slot = _items(value)
    return _count(arena), _slot(slot)


def _descriptor(value: object) -> BatchDescriptor:
    slot, layout, result, failed, texts, nbytes = _items(value)
    if type(failed) is not bool:
        raise ValueError("expected a bool")
    return BatchDescriptor(
        _slot(slot), _count(layout), _pair(result), failed, _unflat(texts), _count(nbytes)
    )


def _tally(value: object) -> Tally:
    samples, hashes = _items(value)
    return Tally(_count(samples), _count(hashes, _MODULUS))


def _completed(value: object) -> Completed:
    ranges, batches, delivered, skipped = _items(value)
    return Completed(_pairs(ranges), _count(batches), _tally(delivered), _tally(skipped))
