"""In strict order a stream is, batch for batch and bit for bit, what torch gives with as many workers as readers."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import get_worker_info

from minato import DataLoader
from tests.datasets import forked
from tests.pairwise import pairwise
from tests.selection import mostly_slow
from tests.streams.streams import Draws, Dying, IteratorState, Split, drawing_collate, plain

SIZE = 45
READERS, WORKERS = (1, 3, 4, 8), (0, 1, 2, 5)


def epoch(loader: Any) -> Iterator[Any]:
    yield from loader


def epochs(loader: Any) -> Iterator[Any]:
    for _ in range(2):
        yield from loader
        yield "end"


def chosen_epochs(loader: Any) -> Iterator[Any]:
    for epoch in (4, 0, 7):
        loader.dataset.set_epoch(epoch)
        yield from loader


def broken_off(loader: Any) -> Iterator[Any]:
    yield from itertools.islice(loader, 5)
    yield from loader


def caught(loader: Any) -> Iterator[Any]:
    for _ in range(2):
        iterator = iter(loader)
        while True:
            try:
                yield next(iterator)
            except StopIteration:
                break
            except Exception as error:
                yield type(error).__name__


def initialised(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert (info.id, isinstance(info.dataset, Split)) == (number, True)
    info.dataset.size -= 9
    torch.rand(number)
    random.seed(info.seed % 1000)


def draws() -> Split:
    return Draws(SIZE)


COLLATED = {"collate_fn": drawing_collate}
CASES: dict[str, tuple[Callable[[], Split], Callable[[Any], Iterator[Any]], dict[str, Any]]] = {
    "epochs": (draws, epochs, COLLATED),
    "persistent": (draws, epochs, {**COLLATED, "persistent_workers": True}),
    "drop_last": (draws, epoch, {"drop_last": True}),
    "single": (draws, epoch, {"batch_size": None}),
    "single_collated": (draws, epoch, {**COLLATED, "batch_size": None}),
    "set_epoch": (draws, chosen_epochs, COLLATED),
    "init_fn": (draws, epoch, {**COLLATED, "worker_init_fn": initialised}),
    "iterators": (lambda: IteratorState(SIZE), epochs, COLLATED),
    "raises": (lambda: IteratorState(SIZE, (0, 7, 8, 20, 33, 44)), caught, {}),
    "raises_single": (lambda: IteratorState(SIZE, (0, 7, 8, 33, 44)), caught, {"batch_size": None}),
    "dies": (lambda: Dying(SIZE, (6, 20, 21)), caught, {}),
    "break": (draws, broken_off, COLLATED),
    "break_persistent": (lambda: Split(SIZE), broken_off, {"persistent_workers": True}),
    "empty_readers": (lambda: Split(3), epoch, {}),
    "nothing": (lambda: Split(0), epoch, {}),
}


def delivered(kind: Any, case: str, **options: Any) -> list[Any]:
    """All batches of a case, and then a draw of each of the program's generators."""
    make, program, own = CASES[case]
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    loader = kind(make(), **{"batch_size": 4, **own, **options})
    with warnings.catch_warnings():
        # Those about readers without items, and readers that have died, have tests of their own.
        warnings.filterwarnings("ignore", r"reader \d+ |.* readers received nothing")
        got = [plain(batch) for batch in program(loader)]
    return [*got, random.random(), float(np.random.random()), float(torch.rand(()).item())]


@functools.cache
def torchs(case: str, readers: int) -> list[Any]:
    return delivered(TorchLoader, case, **forked(readers))


EACH_NUMBER = [(1, 5), (3, 1), (8, 2)]
"""Fewer workers than readers, and more; the cases below have none."""


@mostly_slow(("readers", "num_workers"), EACH_NUMBER, itertools.product(READERS, WORKERS))
def test_every_number_of_readers_and_workers(readers: int, num_workers: int) -> None:
    got = delivered(DataLoader, "epochs", num_workers=num_workers, readers=readers)
    assert got == torchs("epochs", readers)


POSSIBLE = [
    each
    for each in itertools.product(CASES, READERS, WORKERS)
    if each[2] or "persistent" not in each[0]  # torch has none that persist without workers
]
QUICK = [each for each in POSSIBLE if each[1:] in ((3, 2), (3, 0))]
OTHERS = pairwise((*each, each[1] > each[2]) for each in POSSIBLE)


@mostly_slow(("case", "readers", "num_workers"), QUICK, (each[:3] for each in OTHERS))
def test_every_way_to_iterate(case: str, readers: int, num_workers: int) -> None:
    got = delivered(DataLoader, case, num_workers=num_workers, readers=readers)
    assert got == torchs(case, readers)


@mostly_slow(
    ("method", "case", "readers"),
    [("forkserver", "init_fn", 3), ("forkserver", "raises", 3), ("spawn", "init_fn", 3)],
)
def test_workers_that_are_not_forked(method: str, case: str, readers: int) -> None:
    how: Any = {"num_workers": 2, "readers": readers, "multiprocessing_context": method}
    assert delivered(DataLoader, case, **how) == torchs(case, readers)


@mostly_slow("readers", [3, 1, 8])
def test_readers_in_threads(readers: int) -> None:
    """All threads share the three generators, so nothing draws here."""
    for num_workers in (1, 2, 4):
        how: Any = {"num_workers": num_workers, "readers": readers, "workers": "thread"}
        got = delivered(DataLoader, "break_persistent", **how)
        assert got[:-3] == torchs("break_persistent", readers)[:-3]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_without_readers_there_are_as_many_as_workers(num_workers: int) -> None:
    """Without workers the program itself iterates."""
    assert delivered(DataLoader, "epochs", num_workers=num_workers) == torchs("epochs", num_workers)
