"""Iterable datasets that the tests of streams share, importable by workers that are not forked."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from minato import ShardedDataset, skipping
from minato._support.counters import shared_integers
from tests import datasets
from tests.behaviour.states import saved
from tests.datasets import three_draws


class Split(IterableDataset[Any]):
    """Numbers, and 1000 for each epoch; later readers have longer parts. Some wait ``pause_s`` before each item."""

    pause_s = 0.0

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self) -> range:
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        first, end = (round(self.size * (i / count) ** 1.5) for i in (number, number + 1))
        return range(1000 * self.epoch + first, 1000 * self.epoch + end)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers())


class Draws(Split):
    """As ``Split``, and each item draws from all three global generators."""

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers():
            time.sleep(self.pause_s)
            yield [float(number), *three_draws()]
            random.random()


class DatasetState(Split):
    """As ``Split``, and the dataset has a state."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = self.numbers()
        while self.at < len(numbers):
            time.sleep(self.pause_s)
            self.at += 1
            yield numbers[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class EpochState(DatasetState):
    """As ``DatasetState``, and its state holds the epoch, too."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Cursor(datasets.Cursor):
    """An iterator with a state; it draws from all three generators, raises at some numbers, and goes on then."""

    def __init__(self, numbers: range, raises: Iterable[int] = (), pause_s: float = 0.0) -> None:
        super().__init__(numbers)
        self.raises, self.pause_s = frozenset(raises), pause_s

    def __next__(self) -> Any:
        if self.at < len(self.numbers):
            time.sleep(self.pause_s)
        number = super().__next__()
        if number % 1000 in self.raises:
            raise KeyError(number)
        return [float(number), *three_draws()]


class IteratorState(Split):
    """As ``Draws``, with iterators that have a state."""

    def __init__(self, size: int, raises: Iterable[int] = ()) -> None:
        super().__init__(size)
        self.raises = frozenset(raises)

    def __iter__(self) -> Any:
        return Cursor(self.numbers(), self.raises, self.pause_s)


RAISES = (3, 31, 32, 100, 177)


class Raises(IteratorState):
    """``next()`` raises for some items."""

    def __init__(self, size: int) -> None:
        super().__init__(size, RAISES)


class Seeking:
    """An iterator that can pass over items, without a state; ``read`` counts those that it gives, in any process."""

    def __init__(self, numbers: range, read: Any) -> None:
        self.numbers, self.read = iter(numbers), read

    def __iter__(self) -> Seeking:
        return self

    def __next__(self) -> int:
        number = next(self.numbers)
        self.read[os.getpid() % 1024, 0] += 1
        return number

    def skip(self, count: int) -> None:
        for _ in range(count):
            next(self.numbers)


class Seekable(Split):
    """Its iterators are ``Seeking``; all copies in this process and those that are forked count in ``read``."""

    read = shared_integers(1024, 1)

    def __iter__(self) -> Any:
        return Seeking(self.numbers(), self.read)


class Decoding(Seekable):
    """It does no work on items that are dropped; it counts the others."""

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers():
            if skipping():
                yield None
                continue
            time.sleep(self.pause_s)
            self.read[os.getpid() % 1024, 0] += 1
            yield number


class Dying(Split):
    """A generator that raises at some numbers, and cannot go on then."""

    def __init__(self, size: int, raises: Iterable[int]) -> None:
        super().__init__(size)
        self.raises = frozenset(raises)

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers():
            if number in self.raises:
                raise KeyError(number)
            yield number


def sequence_of(number: int) -> list[float]:
    """A sequence of one to six numbers that are equal."""
    return [float(number)] * (1 + number * number % 7 % 6)


class Sequences(Split):
    """Sequences of different lengths, which draw nothing; ``first`` is added to each number."""

    def __init__(self, size: int, first: int = 0) -> None:
        super().__init__(size)
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        return (sequence_of(self.first + number) for number in self.numbers())


class Listed(Sequences):
    """Sequences of an iterator with a state, which draws nothing."""

    def __iter__(self) -> Any:
        return datasets.Cursor([sequence_of(self.first + number) for number in self.numbers()])


class SequenceCursor(Cursor):
    """An iterator over sequences with a state, which draws and may raise."""

    def __init__(self, numbers: Any, first: int = 0, raises: Iterable[int] = ()) -> None:
        super().__init__(numbers, raises)
        self.first = first

    def __next__(self) -> Any:
        number, *drawn = super().__next__()
        return [*sequence_of(self.first + int(number)), *drawn[: int(4 * drawn[0])]]


class DrawingSequences(Sequences):
    """Sequences that draw, from iterators with a state."""

    cursor: type[SequenceCursor] = SequenceCursor
    raises: frozenset[int] = frozenset()

    def __iter__(self) -> Any:
        return self.cursor(self.numbers(), self.first, self.raises)


class SequenceState(DatasetState):
    """Sequences of a dataset with a state, which draw now and then."""

    def __init__(self, size: int, first: int = 0) -> None:
        super().__init__(size)
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield [*sequence_of(self.first + number), *([] if number % 5 else three_draws())]


class StartingOver(SequenceState):
    """Its iterator begins where a state was loaded, and otherwise from the start, wherever another one is."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.start = self.start, 0
        return super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


class ShardedSequences(ShardedDataset[Any]):
    """Sequences in four shards, of iterators with a state."""

    cursor: type[SequenceCursor] = SequenceCursor

    def __init__(self, size: int, first: int = 0) -> None:
        super().__init__(seed=first)
        self.size, self.first = size, first

    def shards(self) -> list[str]:
        return ["0", "1", "2", "3"]

    def iter_shard(self, name: str, state: Any = None) -> Any:
        start = 1000 * self.epoch + self.size * int(name) // 4
        cursor = self.cursor(range(start, start + self.size // 4), self.first)
        if state is not None:
            cursor.load_state_dict(state)
        return cursor


class Shards(ShardedDataset[int]):
    """Shard ``"n"`` has so many numbers, from 1000 * n on; the one that is ``closed`` cannot be opened."""

    closed = ""

    def __init__(
        self,
        lengths: Mapping[str, int],
        cursor: Any = iter,
        says_sizes: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.lengths, self.cursor, self.says_sizes = lengths, cursor, says_sizes

    def shards(self) -> Sequence[str] | Mapping[str, float]:
        return dict(self.lengths) if self.says_sizes else [*self.lengths]

    def iter_shard(self, name: str, state: Any = None) -> Iterator[int]:
        if name == self.closed:
            raise OSError(f"no {name}")
        found = self.cursor(items_of(name, self.lengths[name]))
        if state is not None:
            found.at = state["at"]
        return found


def items_of(name: str, length: int) -> range:
    return range(1000 * int(name), 1000 * int(name) + length)


def all_of(lengths: Mapping[str, int]) -> list[int]:
    return sorted(itertools.chain(*(items_of(*each) for each in lengths.items())))


class DrawsAtOnce(IteratorState):
    """As ``IteratorState``, and ``iter()`` draws, too."""

    def __iter__(self) -> Any:
        three_draws()
        return super().__iter__()


STREAMS: list[Callable[[int], Split]] = [Split, Draws, DatasetState, IteratorState, DrawsAtOnce]


def drawing_collate(samples: list[Any]) -> list[Any]:
    """Draws, too."""
    return [default_collate(samples), *three_draws()]


def slowly(item: Any) -> Any:
    time.sleep(0.002)
    return item


def plain(batch: Any) -> Any:
    """A batch as lists and numbers, whose types and dtypes are kept as their names."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return [str(batch.dtype), batch.tolist()]
    return [plain(one) for one in batch] if isinstance(batch, list | tuple) else batch


def numbers(batches: Iterable[Any]) -> list[int]:
    """The numbers of all items, which come without draws, before them, or as rows of Hugging Face."""
    found: list[int] = []
    for batch in batches:
        first = batch[0] if isinstance(batch, list | tuple) else batch
        first = first["row"] if isinstance(first, dict) else first
        found += [int(number) for number in torch.as_tensor(first).reshape(-1)]
    return found


def items(batches: Iterable[Any]) -> list[tuple[float, ...]]:
    """All items with what was drawn for them."""
    found: list[tuple[float, ...]] = []
    for batch in batches:
        values = plain(batch)
        drawn = len(values) > 2
        found += zip(*(one[1] for one in values), strict=True) if drawn else zip(values[1])
    return found


def hugging_face(size: int, num_shards: int) -> Any:
    """An iterable dataset of Hugging Face; each row says its number."""
    table = pytest.importorskip("datasets").Dataset.from_dict({"row": list(range(size))})
    return table.to_iterable_dataset(num_shards=num_shards)


def resumed(state: Any, loader: Any) -> Any:
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def interrupted(
    first: Any, stop: int, later: Any, content: Callable[[Any], list[Any]] = numbers
) -> list[Any]:
    """What so many batches of a loader hold, and what another one gives that goes on from its state."""
    got = content(itertools.islice(first, stop)) if stop else []
    return got + content(resumed(saved(first), later))


def check_refused(make: Callable[[], Any], words: str) -> None:
    """A call is refused in a sentence with these words."""
    with pytest.raises((TypeError, ValueError), match=re.escape(words)) as caught:
        make()
    assert "\n" not in str(caught.value)


def in_runs(
    loaders: Iterable[Any],
    stops: Iterable[int | None],
    content: Callable[[Any], list[Any]] = numbers,
) -> list[Any]:
    """What an epoch gives in several runs, each of so many batches, that go on with what the one before has left."""
    got, state = list[Any](), None
    for loader, stop in zip(loaders, stops, strict=False):
        if state is not None:
            resumed(state, loader)
        batches = list(itertools.islice(loader, stop))
        got += content(batches)
        if stop is None or len(batches) < stop:
            break
        state = saved(loader)
    return got
