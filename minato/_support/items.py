"""Names of the items of an iterable dataset, and the integers that stand for them where samples have indices."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, ParamSpec, TypeVar

from minato._support.values import text_of

__all__ = [
    "Item",
    "announced_reader",
    "item_of",
    "key_of",
    "name_of",
    "next_of",
    "reading_again",
    "reading_apart",
    "resumed_states",
    "set_announce",
    "set_resumed",
    "set_skipping",
    "short_name_of",
    "skipping",
    "to_read_again",
]

P = ParamSpec("P")
T = TypeVar("T")


_ORDINAL_BITS = 40


class Item(NamedTuple):
    """Name of an item of an iterable dataset: its reader, and how many ``next()`` this had in its epoch before it."""

    reader: int
    ordinal: int

    def __str__(self) -> str:
        return f"item {self.ordinal} of reader {self.reader}"


def key_of(reader: int, ordinal: int) -> int:
    """Return the integer that stands for an item."""
    return reader << _ORDINAL_BITS | ordinal


def item_of(key: int) -> Item:
    """Return the item that an integer stands for."""
    return Item(key >> _ORDINAL_BITS, key & (1 << _ORDINAL_BITS) - 1)


def short_name_of(index: object) -> str:
    """Return a few words for a sample in messages."""
    return str(index) if type(index) is Item else f"index {text_of(index)}"


def name_of(index: object) -> str:
    """Return the words for a sample in messages."""
    short = short_name_of(index)
    return short if type(index) is Item else f"the sample with {short}"


class _Skipping(threading.local):
    is_on = was_asked = False


class _Resumed(threading.local):
    states: Sequence[Any] = ()


class _ReadingAgain(threading.local):
    items: object = None
    count: float = 0


class _Announcing(threading.local):
    announce: Callable[[], AbstractContextManager[None]] = nullcontext


_skipping, _resumed, _announcing = _Skipping(), _Resumed(), _Announcing()
_again = _ReadingAgain()


def skipping() -> bool:
    """Whether the item that an iterable dataset is asked for is dropped, because an earlier run has delivered it.

    A dataset may leave out work on it that does not change its own state, such as decoding, and yield anything. It must
    not if its items go to a filter, or to another loader than minato's: these need them all.
    """
    _skipping.was_asked = True
    return _skipping.is_on


def set_skipping(is_on: bool) -> bool:
    """Set what ``skipping`` returns in this thread; returns whether it was asked since the last call."""
    was_asked, _skipping.was_asked, _skipping.is_on = _skipping.was_asked, False, is_on
    return was_asked


def resumed_states() -> list[Any]:
    """Of all readers, the states of their iterators with which the epoch goes on that begins in this thread.

    An iterable dataset may ask for them within ``__iter__``, where a reader without a state must know what others know.

    Returns:
        For each reader what ``state_dict()`` of its iterator returned, or None if it has no state. Empty outside of
        ``__iter__``, and if an epoch begins.
    """
    return list(_resumed.states)


def set_resumed(states: Sequence[object]) -> None:
    """Set what ``resumed_states`` returns in this thread."""
    _resumed.states = states


@contextmanager
def reading_again(items: object, count: float) -> Iterator[None]:
    """Have an iterator load a state after which an earlier run has read on; at most ``count`` items come again."""
    before = _again.items, _again.count
    _again.items, _again.count = items, count
    try:
        yield
    finally:
        _again.items, _again.count = before


def to_read_again(items: object) -> float:
    """How many items an iterator that loads a state gives again, at most; infinity: nobody knows."""
    if not _again.count or _again.items is items:
        return _again.count
    return math.inf  # of an iterator around it


def announced_reader() -> AbstractContextManager[None]:
    """Have ``get_worker_info()`` describe the reader that is read in this thread, where it does not do so anyway."""
    return _announcing.announce()


def set_announce(announce: Callable[[], AbstractContextManager[None]]) -> None:
    """Set what ``announced_reader`` calls in this thread."""
    _announcing.announce = announce


def reading_apart(read: Callable[P, T]) -> Callable[P, T]:
    """Have a loader read in this thread: if that is within a dataset of another loader, neither changes the other."""

    @functools.wraps(read)
    def apart(
        *args: P.args, **kwargs: P.kwargs
    ) -> T:  # no context manager: that takes as long as a small batch
        before = _skipping.is_on, _skipping.was_asked, _resumed.states, _announcing.announce
        _skipping.is_on, _resumed.states = False, ()
        try:
            return read(*args, **kwargs)
        finally:
            _skipping.is_on, _skipping.was_asked, _resumed.states, _announcing.announce = before

    return apart


def next_of(items: Iterator[T], *, drops: bool) -> T:
    """What ``next()`` returns for a dataset that keeps or drops the item, whatever the loader does with its own."""
    before = _skipping.is_on, _skipping.was_asked
    _skipping.is_on = drops
    try:
        return next(items)
    finally:
        _skipping.is_on, _skipping.was_asked = before
