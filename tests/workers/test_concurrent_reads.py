"""``fetch_concurrency``: several reads in flight, and nothing else is different."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import minato
from tests.datasets import ORDERS, Journal, Numbers, Sleepy

KINDS = [(0, "process"), (2, "process"), (2, "thread")]


class Waits(Numbers):
    """Reads that take differently long, and note how many run at once in this process."""

    def __init__(self, size: int, longest_s: float = 0.01) -> None:
        super().__init__(size)
        self.longest_s = longest_s
        self.running = 0
        self.most = 0
        self.lock = threading.Lock()

    def delay_s(self, index: int) -> float:
        return self.longest_s * random.Random(index).random()

    def change(self, by: int) -> None:
        with self.lock:
            self.running += by
            self.most = max(self.most, self.running)

    def __getitem__(self, index: int) -> Any:
        self.change(1)
        time.sleep(self.delay_s(index))
        self.change(-1)
        return {"value": index, "most": self.most, "pid": os.getpid()}

    def __getstate__(self) -> Any:
        return {**self.__dict__, "lock": None}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state, lock=threading.Lock())


class Awaits(Waits):
    """The same with coroutines."""

    async def __aget__(self, index: int) -> Any:
        self.change(1)
        await asyncio.sleep(self.delay_s(index))
        self.change(-1)
        return {"value": index, "most": self.most, "pid": os.getpid()}


class Fails(Numbers):
    """Reads of which two raise, the later one of a batch sooner."""

    def __getitem__(self, index: int) -> int:
        if index == 5:
            time.sleep(0.02)
        if index in (5, 6, 21):
            raise ValueError(f"bad {index}")
        return index


class FailsAwaiting(Fails):
    async def __aget__(self, index: int) -> int:
        await asyncio.sleep(0)
        if index in (5, 6, 21):
            raise ValueError(f"bad {index}")
        return index


class Draws(Numbers):
    """Reads that ask minato for their random numbers, after a wait of another length each time."""

    def __getitem__(self, index: int) -> Any:
        first = minato.numpy_rng().random()
        time.sleep(0.004 * np.random.default_rng().random())
        return [first, minato.python_rng().random()]


class DrawsAwaiting(Draws):
    async def __aget__(self, index: int) -> Any:
        first = minato.numpy_rng().random()
        await asyncio.sleep(0.004 * np.random.default_rng().random())
        return [first, minato.python_rng().random()]


def augmented(sample: Any) -> Any:
    return [*sample, random.random(), np.random.rand(), float(torch.rand(())), helper_draw()]


def helper_draw() -> float:
    return float(minato.numpy_rng().random())


def shifted(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "value": sample["value"] + 0, "thread": threading.get_ident()}


def values(loader: Any) -> list[list[int]]:
    return [batch["value"].tolist() for batch in loader]


def assert_fifty_in_fours(batches: list[list[Any]], order: str) -> None:
    """Assert that these are the numbers below 50 in batches of 4, as this order promises."""
    assert sorted(value for batch in batches for value in batch) == list(range(50))
    expected = [list(range(start, min(start + 4, 50))) for start in range(0, 50, 4)]
    if order == "strict":
        assert batches == expected
    elif order == "batch":
        assert sorted(batches) == expected
    assert sorted(map(len, batches)) == [2, *[4] * 12]


@pytest.mark.parametrize("dataset", [Waits, Awaits])
@pytest.mark.parametrize(("num_workers", "method"), KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_each_sample_comes_once_and_in_its_order(
    dataset: Callable[[int], Waits], num_workers: int, method: str, order: str
) -> None:
    loader = minato.DataLoader(
        dataset(50),
        batch_size=4,
        num_workers=num_workers,
        workers=method,
        order=order,
        fetch_concurrency=6,
    )
    assert_fifty_in_fours(values(loader), order)


@pytest.mark.parametrize("dataset", [Waits, Awaits])
def test_reads_run_at_once_beyond_the_bounds_of_batches(dataset: Callable[..., Waits]) -> None:
    loader = minato.DataLoader(
        dataset(64, 0.02), batch_size=2, num_workers=1, fetch_concurrency=8, order="arrival"
    )
    most = max(int(batch["most"].max()) for batch in loader)
    assert 4 < most <= 8


@pytest.mark.parametrize("dataset", [Waits, Awaits])
def test_reads_never_exceed_the_limit_though_whole_batches_are_claimed(
    dataset: Callable[[int], Waits],
) -> None:
    loader = minato.DataLoader(
        dataset(64), batch_size=16, num_workers=1, fetch_concurrency=3, collate_fn=list
    )
    samples = [sample for batch in loader for sample in batch]
    assert [sample["value"] for sample in samples] == list(range(64))
    assert max(sample["most"] for sample in samples) == 3


def test_transforms_run_in_the_worker_thread() -> None:
    loader = minato.DataLoader(Waits(20), batch_size=5, fetch_concurrency=4, transforms=[shifted])
    threads = {ident for batch in loader for ident in batch["thread"].tolist()}
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("dataset", [Fails, FailsAwaiting])
@pytest.mark.parametrize(("num_workers", "method"), KINDS)
@pytest.mark.parametrize("collate", [None, list])
def test_the_first_error_of_a_batch_is_raised_and_the_next_batch_comes(
    dataset: Callable[[int], Any], num_workers: int, method: str, collate: Any
) -> None:
    loader = minato.DataLoader(
        dataset(24),
        batch_size=4,
        num_workers=num_workers,
        workers=method,
        fetch_concurrency=5,
        collate_fn=collate,
    )
    batches, errors = [], []
    iterator = iter(loader)
    while True:
        try:
            batches.append([int(value) for value in next(iterator)])
        except StopIteration:
            break
        except ValueError as error:
            errors.append(error)
    assert batches == [[0, 1, 2, 3], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    assert ["bad 5" in str(errors[0]), "bad 21" in str(errors[1]), len(errors)] == [True, True, 2]
    assert "index 5" in errors[0].__notes__[0]


@pytest.mark.parametrize("order", ["arrival", "fast_first"])
def test_where_places_are_free_only_the_bad_samples_are_lost(order: str) -> None:
    loader = minato.DataLoader(
        Fails(24), batch_size=1, num_workers=2, fetch_concurrency=5, order=order
    )
    iterator, got, failed = iter(loader), [], 0
    while True:
        try:
            got.append(int(next(iterator)))
        except StopIteration:
            break
        except ValueError:
            failed += 1
    assert sorted(got) == [i for i in range(24) if i not in (5, 6, 21)]
    assert failed == 3


class Flaky(Numbers):
    """Samples of which some raise at their first try in each process, and some always."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.tried: set[int] = set()

    def __getitem__(self, index: int) -> int:
        if index % 7 == 3 and index not in self.tried:
            self.tried.add(index)
            raise OSError(f"not yet {index}")
        if index == 8:
            raise ValueError("never")
        return index


@pytest.mark.parametrize(("num_workers", "method"), KINDS)
@pytest.mark.parametrize("order", ["strict", "arrival"])
@pytest.mark.parametrize("collate", [None, torch.utils.data.default_collate])
@pytest.mark.filterwarnings("ignore:1 samples of this epoch were skipped")
def test_samples_that_raise_are_tried_again_or_left_out(
    num_workers: int, method: str, order: str, collate: Any
) -> None:
    loader = minato.DataLoader(
        Flaky(24),
        batch_size=4,
        num_workers=num_workers,
        workers=method,
        fetch_concurrency=5,
        order=order,
        collate_fn=collate and (lambda samples: collate(samples)),
        errors=minato.ErrorPolicy(on_error="skip", retries=1),
    )
    got = [int(value) for batch in loader for value in batch]
    assert sorted(got) == [i for i in range(24) if i != 8]


def test_an_interrupted_loop_in_line_goes_on() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    loader = minato.DataLoader(Sleepy(8, 0.2), batch_size=4, fetch_concurrency=2)
    iterator, got, interrupted = iter(loader), [], 0
    handler = signal.signal(signal.SIGVTALRM, interrupt)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGVTALRM))
    try:
        timer.start()
        while len(got) < 8:
            try:
                got += next(iterator).tolist()
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        timer.join()
        signal.signal(signal.SIGVTALRM, handler)
    assert interrupted == 1
    assert got == list(range(8))


def content(dataset: Any, **arguments: Any) -> dict[int, list[float]]:
    """What each sample holds."""
    loader = minato.DataLoader(
        Keyed(dataset), batch_size=4, seed=7, order="strict", collate_fn=list, **arguments
    )
    return {index: sample for batch in loader for index, *sample in batch}


class Keyed(Numbers):
    """Samples of another dataset with their index before them."""

    def __init__(self, inner: Any) -> None:
        super().__init__(len(inner))
        self.inner = inner
        if hasattr(inner, "__aget__"):
            self.__aget__ = self._aget

    def __getitem__(self, index: int) -> Any:
        return [index, *self.inner[index]]

    async def _aget(self, index: int) -> Any:
        return [index, *await self.inner.__aget__(index)]


def test_content_depends_neither_on_the_concurrency_nor_on_who_reads() -> None:
    plain = content(Draws(24), transforms=[augmented])
    assert len(plain) == 24
    for dataset in (Draws(24), DrawsAwaiting(24)):
        for num_workers in (0, 2):
            arguments = {"num_workers": num_workers, "transforms": [augmented]}
            assert content(dataset, fetch_concurrency=6, **arguments) == plain


@pytest.mark.parametrize("dataset", [Waits, Awaits])
@pytest.mark.parametrize(("num_workers", "method"), KINDS)
def test_an_abandoned_epoch_leaves_no_threads_and_the_next_is_whole(
    dataset: Callable[[int], Waits], num_workers: int, method: str
) -> None:
    loader = minato.DataLoader(
        dataset(40),
        batch_size=4,
        num_workers=num_workers,
        workers=method,
        fetch_concurrency=8,
        persistent_workers=num_workers > 0,
    )
    next(iter(loader))
    assert values(loader) == [list(range(start, start + 4)) for start in range(0, 40, 4)]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(method: str) -> None:
    loader = minato.DataLoader(
        Awaits(12),
        batch_size=3,
        num_workers=1,
        multiprocessing_context=method,
        fetch_concurrency=4,
    )
    assert values(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


class Deadly(Journal):
    """A read that kills its process, twice."""

    def __getitem__(self, index: int) -> int:
        value = super().__getitem__(index)
        if index == 9 and self.begun().count(9) <= 2:
            os._exit(0)  # as one that was asked to leave
        return value


def test_a_worker_that_dies_with_reads_under_way_loses_none() -> None:
    assert_deaths_lose_nothing(Deadly(24), fetch_concurrency=6)


def assert_deaths_lose_nothing(dataset: Any, **options: Any) -> None:
    loader = minato.DataLoader(dataset, batch_size=4, num_workers=2, **options)
    with pytest.warns(RuntimeWarning, match="Another worker takes its place"):
        batches = [batch.tolist() for batch in loader]
    assert batches == [list(range(start, start + 4)) for start in range(0, 24, 4)]


def failing_start(number: int) -> None:
    raise OSError("no licence")


def test_a_worker_that_could_not_start_says_so() -> None:
    loader = minato.DataLoader(
        Numbers(4), num_workers=1, fetch_concurrency=4, worker_init_fn=failing_start
    )
    with pytest.raises(OSError, match="no licence"):
        list(loader)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fetch_concurrency": 0}, "fetch_concurrency=0 is too small"),
        ({"fetch_concurrency": 2, "compat": "torch"}, "contradicts compat='torch'"),
    ],
)
def test_what_contradicts_itself_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        minato.DataLoader(Numbers(4), **arguments)


def test_an_iterable_dataset_has_no_keys_to_read_at_once() -> None:
    with pytest.raises(ValueError, match="an iterable dataset has none"):
        minato.DataLoader(Stream(), fetch_concurrency=2)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(())
