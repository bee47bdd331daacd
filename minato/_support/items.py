"""Names of the items of an iterable dataset, and the integers that stand for them where samples have indices."""

from __future__ import annotations

import math
import threading
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from types import GeneratorType
from typing import Any, NamedTuple, TypeVar

from minato._support.values import text_of

T = TypeVar("T")

ERRORS = (Exception, GeneratorExit, SystemExit, CancelledError)
"""What a sample or an item may raise as its error; others, such as KeyboardInterrupt, are those of signals."""
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


class Reading:
    """What a loader says to the dataset that it reads; a loader within that dataset has its own."""

    __slots__ = ("resumed", "skips", "was_asked")

    def __init__(self) -> None:
        self.skips = self.was_asked = False
        self.resumed: Sequence[Any] = ()


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.reading = Reading()


class _ReadingAgain(threading.local):
    items: object = None
    count: float = 0


_this_thread, _again = _ThisThread(), _ReadingAgain()


def set_reading(reading: Reading) -> Reading:
    """Set the one of this thread's datasets; returns the one before."""
    before, _this_thread.reading = _this_thread.reading, reading
    return before


def skipping() -> bool:
    """Whether the item that an iterable dataset is asked for is dropped, because an earlier run has delivered it.

    A dataset may leave out work on it that does not change its own state, such as decoding, and yield anything. It must
    not if its items go to a filter, or to another loader than minato's: these need them all.
    """
    reading = _this_thread.reading
    reading.was_asked = True
    return reading.skips


def set_skipping(is_on: bool) -> bool:
    """Set what ``skipping`` returns in this thread; returns whether it was asked since the last call."""
    reading = _this_thread.reading
    was_asked, reading.was_asked, reading.skips = reading.was_asked, False, is_on
    return was_asked


def resumed_states() -> list[Any]:
    """Of all readers, the states of their iterators with which the epoch goes on that begins in this thread.

    An iterable dataset may ask for them within ``__iter__``, where a reader without a state must know what others know.

    Returns:
        For each reader what ``state_dict()`` of its iterator returned, or None if it has no state. Empty outside of
        ``__iter__``, and if an epoch begins.
    """
    return list(_this_thread.reading.resumed)


def set_resumed(states: Sequence[object]) -> None:
    """Set what ``resumed_states`` returns in this thread."""
    _this_thread.reading.resumed = states


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


def has_ended(items: object) -> bool:
    """Whether an iterator that has raised, or was interrupted, cannot go on."""
    return isinstance(items, GeneratorType) and items.gi_frame is None


def receive(got: list[T], items: Iterator[T], *, drops: bool) -> None:
    """Append the next item of a dataset that keeps or drops it, whatever the loader does with its own.

    It is one step: handlers of signals raise before it or after it.
    """
    reading = _this_thread.reading
    before, reading.skips = (reading.skips, reading.was_asked), drops
    try:
        got += islice(items, 1)
    finally:
        reading.skips, reading.was_asked = before
