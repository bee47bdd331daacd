"""What the ranks of a node say to each other: JSON, each field of which is checked where it arrives."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

from minato.batching.arena import Slot
from minato.shared_pool.descriptors import Parcel

__all__ = ["Greeting", "Had", "encoded", "from_host", "from_rank"]

_LARGEST = 1 << 63
_MODULUS = 1 << 64
Pairs = tuple[tuple[int, int], ...]


class Greeting(NamedTuple):
    """What a rank says when it comes.

    Attributes:
        local_rank: Among those of the node.
        rank: Among all of the job.
        loader: What must be the same for all that share a pool: values by their names, as text.
    """

    local_rank: int
    rank: int
    loader: dict[str, str]


class Had(NamedTuple):
    """What a rank has had of a pass in earlier runs (see :class:`minato.sampling.completed.Completed`).

    Attributes:
        ranges: Ordinals ``[first, end)`` of the keys.
        batches: How many batches.
        delivered, skipped: How many keys, and the sum of their hashes.
    """

    ranges: Pairs
    batches: int
    delivered: tuple[int, int]
    skipped: tuple[int, int]


def encoded(message: tuple[Any, ...]) -> bytes:
    """A message as bytes.

    Raises:
        TypeError: It holds something else than tuples, texts, integers, truth values and None.
    """
    match message:
        case ("batch", number, arena, Parcel() as parcel, (ranges, samples, hashes)):
            # Flat lists: there may be a pair for each sample.
            parts = parcel._replace(texts=_flat(parcel.texts))  # type: ignore[arg-type]
            message = "batch", number, arena, parts, (_flat(ranges), samples, hashes)
    # numpy's integers become Python's.
    return json.dumps(message, separators=(",", ":"), default=operator.index).encode()


def _flat(pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(pairs))


def from_rank(data: bytes) -> tuple[str, int, Pairs, Any]:
    """What another rank says to the host: ``(kind, number of the pass, places it has dropped, more)``.

    Raises:
        ValueError: These bytes are no such message.
    """
    match _parsed(data):
        case ["hello", 0, [], [local_rank, rank, dict(loader)]]:
            facts = {_text(name): _text(value) for name, value in loader.items()}
            return "hello", 0, (), Greeting(_count(local_rank), _count(rank), facts)
        case ["enter", number, dropped, [int(epoch), before]]:
            had = None if before is None else _had(before)
            return "enter", _count(number), _pairs(dropped), (epoch, had)
        case [("next" | "leave" | "bye") as kind, number, dropped, None]:
            return kind, _count(number), _pairs(dropped), None
    raise ValueError("no message of a rank")


def from_host(data: bytes) -> tuple[Any, ...]:
    """What the host says to another rank: its kind, and what belongs to it.

    Raises:
        ValueError: These bytes are no such message.
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
        case ["batch", number, arena, parcel, [ranges, samples, hashes]]:
            portion = list(_unflat(ranges)), _count(samples), _count(hashes, _MODULUS)
            return "batch", _count(number), _count(arena), _parcel(parcel), portion
    raise ValueError("no message of a host")


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None


def _count(value: Any, limit: int = _LARGEST) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError("a number is out of its range, or none")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("a text is none")
    return value


def _pair(value: Any) -> tuple[int, int]:
    first, second = _items(value)
    return _count(first), _count(second)


def _pairs(value: Any) -> Pairs:
    return tuple(map(_pair, _items(value)))


def _unflat(value: Any) -> Pairs:
    """Pairs of what they are one after the other."""
    items = _items(value)
    if len(items) % 2 or set(map(type, items)) - {int} or min(items, default=0) < 0:
        raise ValueError("a list of pairs is none")
    _count(max(items, default=0))
    return tuple(zip(items[::2], items[1::2], strict=True))


def _items(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("a list is none")
    return value


def _slot(value: Any) -> Slot:
    start, end = _pair(value)
    if start > end:
        raise ValueError("a slot ends before it starts")
    return Slot(start, end)


def _place(value: Any) -> tuple[int, Slot]:
    arena, slot = _items(value)
    return _count(arena), _slot(slot)


def _parcel(value: Any) -> Parcel:
    slot, layout, result, failed, texts, nbytes = _items(value)
    if type(failed) is not bool:
        raise ValueError("a truth value is none")
    return Parcel(
        _slot(slot), _count(layout), _pair(result), failed, _unflat(texts), _count(nbytes)
    )


def _tally(value: Any) -> tuple[int, int]:
    samples, hashes = _items(value)
    return _count(samples), _count(hashes, _MODULUS)


def _had(value: Any) -> Had:
    ranges, batches, delivered, skipped = _items(value)
    return Had(_pairs(ranges), _count(batches), _tally(delivered), _tally(skipped))
