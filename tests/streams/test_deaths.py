"""Workers that host readers die at random moments: nothing is lost, nothing comes twice, and all content stays."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

import minato
from minato import DataLoader, ErrorPolicy, Readers
from minato._support.counters import shared_integers
from tests.datasets import ORDERS, add_draws
from tests.selection import numbers_for
from tests.streams.streams import (
    RAISES,
    DatasetState,
    Decoding,
    Draws,
    IteratorState,
    Raises,
    Seekable,
    Split,
    items,
    numbers,
    slowly,
)

SIZE, BATCH = 240, 4
_DEATHS = 2
"""In an epoch: three on one item are an error."""


def slowly_drawn(number: int) -> list[float]:
    time.sleep(0.001)
    return add_draws([float(number)])


def mixed(size: int) -> Any:
    """Two streams that draw, mixed and shuffled; one of them is read again from its beginning."""
    first, second = IteratorState(size // 2), Draws(size // 2)
    first.pause_s = second.pause_s = 0.001
    return minato.shuffle(minato.mix({"a": minato.shuffle(first, 4), "b": second}), 16)


KINDS: dict[str, tuple[Callable[[int], Any], bool]] = {
    "mixed": (mixed, False),
    **{stream.__name__: (stream, False) for stream in (Draws, DatasetState, IteratorState)},
    **{f"{stream.__name__}-transforms": (stream, True) for stream in (Split, DatasetState)},
    "Raises": (Raises, False),
    "Decoding": (Decoding, False),
    "Seekable-transforms": (Seekable, True),
}


def make(kind: str, readers: int, **options: Any) -> Any:
    stream, transforms = KINDS[kind]
    dataset = stream(SIZE)
    if options["num_workers"]:
        dataset.pause_s = 0.001
    if transforms:
        options["transforms"] = [slowly_drawn]
    if stream is Raises:
        options["errors"] = ErrorPolicy(on_error="skip")
    return DataLoader(dataset, BATCH, readers=readers, seed=6, **options)


def under_fire(loader: Any, rng: random.Random, deaths: int) -> Iterator[Any]:
    """Batches, between which one of the workers is killed now and then, so many times in all."""
    killed, due = 0, time.monotonic()
    iterator = iter(loader)
    for batch in iterator:
        yield batch
        if killed == deaths or time.monotonic() < due:
            continue
        time.sleep(rng.random() * 0.005)
        pids = [process.pid for process in iterator._source.workers]
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(rng.choice(pids), signal.SIGKILL)
            killed += 1
            due = time.monotonic() + rng.random() * 0.06


def check_deaths(seed: int, kind: str, order: str, deaths: int) -> int:
    """An epoch with deaths has the items of one without; returns how many died."""
    rng = random.Random(seed)
    readers, num_workers = rng.choice([1, 3, 4]), rng.choice([1, 2, 3])
    with warnings.catch_warnings(record=True, action="always") as told:
        expected = items(make(kind, readers, num_workers=0, order="strict"))
        loader = make(kind, readers, num_workers=num_workers, order=order)
        got = items(under_fire(loader, rng, deaths))
    assert len(expected) == SIZE - len(RAISES) * (kind == "Raises")
    if order == "strict":
        assert got == expected
    assert sorted(got) == sorted(expected)
    return sum("takes its place" in str(one.message) for one in told)


def test_a_few_deaths() -> None:
    for seed, kind in enumerate(KINDS):
        while not check_deaths(seed, kind, ORDERS[seed % len(ORDERS)], _DEATHS):
            pass  # the epoch may be over before it is known that one has died


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_many_deaths(kind: str) -> None:
    seeds, died = itertools.count(100), 0
    while died < 11:
        seed = next(seeds)
        died += check_deaths(seed, kind, ORDERS[seed % len(ORDERS)], _DEATHS)


@pytest.mark.stress
def test_deaths(stress_s: float) -> None:
    for seed in numbers_for(stress_s, 1000):
        rng = random.Random(seed)
        check_deaths(seed, rng.choice([*KINDS]), rng.choice(ORDERS), _DEATHS)


class Different(Split):
    """It gives other items each time that it is read, and has no state."""

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers():
            time.sleep(0.001)
            yield number + os.getpid() / (1 << 22)  # which no pid reaches


def test_a_reader_that_comes_back_different_is_an_error() -> None:
    loader = DataLoader(Different(SIZE), BATCH, num_workers=1, readers=1)
    with pytest.warns(RuntimeWarning, match="takes its place"):  # noqa: SIM117
        with pytest.raises(RuntimeError, match="reader 0 was made again.* gives other items"):
            list(under_fire(loader, random.Random(1), 1))


class Deadly(Split):
    """One item ends every process that reads it."""

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers():
            if number == 37 and get_worker_info() is not None:
                os._exit(3)
            yield number


@pytest.mark.filterwarnings("ignore:.*takes its place")
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_item_that_ends_every_reader_is_named(on_error: str) -> None:
    """No reader gets past it."""
    loader = DataLoader(Deadly(60), BATCH, num_workers=2, readers=3, errors=on_error)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        list(loader)
    assert "while it ran item 4 of reader 2. 3 workers died there" in str(caught.value.__cause__)


def deadly(number: int) -> int:
    if number == 37 and get_worker_info() is not None:
        os._exit(3)
    return number


@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_an_item_whose_transform_ends_every_worker_is_skipped(order: str) -> None:
    how: Any = {"order": order, "transforms": [deadly], "errors": "skip"}
    loader = DataLoader(Split(60), BATCH, num_workers=2, readers=3, **how)
    with warnings.catch_warnings(record=True, action="always") as told:
        assert sorted(numbers(loader)) == sorted({*range(60)} - {37})
    assert any("1 sample of this epoch was skipped" in str(one.message) for one in told)


class DeadlyAgain(Split):
    """One item ends every process that reads it after another has."""

    read = shared_integers(1, 1)

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers():
            if number == 38:
                self.read[0, 0] += 1
                if self.read[0, 0] > 1:
                    os._exit(3)
            yield number


@pytest.mark.filterwarnings("ignore:.*takes its place")
def test_what_a_reader_no_longer_gives_is_not_skipped() -> None:
    """A transform ends its process, and then the reader does not get past an item that it gave before."""
    how: Any = {"transforms": [deadly], "errors": "skip"}
    loader = DataLoader(DeadlyAgain(60), BATCH, num_workers=1, readers=1, **how)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        list(loader)
    assert "item 36 of reader 0. 3 workers died there" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "options", [{"errors": ErrorPolicy(on_worker_death="raise")}, {"compat": "torch"}], ids=str
)
def test_deaths_may_be_errors(options: dict[str, Any]) -> None:
    stream = Draws(SIZE)
    stream.pause_s = 0.001
    loader = DataLoader(stream, BATCH, num_workers=2, readers=3, **options)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(under_fire(loader, random.Random(2), 1))


class Counted(DatasetState):
    """It counts what it reads, in any process."""

    read = shared_integers(1, 1)

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            self.read[0, 0] += 1
            yield number


@pytest.mark.parametrize("resume", ["state", "read"])
def test_a_reader_with_a_state_is_not_read_again_from_its_beginning(resume: str) -> None:
    stream = Counted(SIZE)
    before = int(stream.read[0, 0])
    how: Any = {
        "prefetch_factor": 2,  # what is ahead is read again
        "snapshot_every_n_steps": 1,
        "multiprocessing_context": "fork",  # so that it counts here
    }
    loader = DataLoader(stream, BATCH, num_workers=1, readers=Readers(2, resume=resume), **how)
    iterator = iter(loader)
    got = [next(iterator) for _ in range(40)]
    os.kill(iterator._source.workers[0].pid, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="takes its place"):
        got += iterator
    assert sorted(numbers(got)) == list(range(SIZE))
    again = int(stream.read[0, 0]) - before - SIZE
    assert again >= 100 if resume == "read" else again < 40


@pytest.mark.filterwarnings("ignore:.*takes its place")
@pytest.mark.parametrize("kind", [Draws, DatasetState])
def test_persistent_readers_go_on_as_if_no_worker_had_died(kind: Any) -> None:
    """In the epoch after one in which a worker died early, or after its readers had ended, or in one later on."""

    def epochs(stop: int | None, readers: int) -> list[Any]:
        torch.manual_seed(1)
        how: Any = {"num_workers": 2, "persistent_workers": True, "transforms": [slowly]}
        loader = DataLoader(kind(60), BATCH, readers=readers, **how)
        found, iterator = [], iter(loader)
        for number, batch in enumerate(itertools.chain(iterator, loader)):
            found.append(batch)
            if number == stop:
                os.kill(iterator._source.workers[stop % 2].pid, signal.SIGKILL)
        return [items(found), items(loader)]

    for readers, stops in ((1, (4,)), (3, (12, 20))):
        expected = epochs(None, readers)
        for stop in stops:
            assert epochs(stop, readers) == expected
