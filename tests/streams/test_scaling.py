"""A stream whose number of workers changes: its readers stay where they are, and all content stays."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterDataPipe

from minato import AutoScale, DataLoader, Readers
from tests.datasets import ORDERS, wait_until
from tests.pairwise import pairwise
from tests.selection import mostly_slow
from tests.streams.streams import DatasetState, Draws, Split, in_runs, numbers, plain, slowly

SIZE, BATCH, EPOCHS = 160, 4, 2
HERE = Readers(1, where="main")
PATIENCE_S = 60.0
"""For what never comes, however busy the machine."""


@functools.cache
def torchs(readers: int, size: int | None, persistent: bool) -> list[Any]:
    torch.manual_seed(3)
    options: dict[str, Any] = {"num_workers": readers, "persistent_workers": persistent}
    loader = TorchLoader(Draws(SIZE), size, multiprocessing_context="fork", **options)
    return [plain(batch) for _ in range(EPOCHS) for batch in loader]


def watched(loader: Any, active: list[int]) -> Iterator[Any]:
    """The batches of an epoch; notes how many workers are active."""
    iterator = iter(loader)
    for batch in iterator:
        active.append(iterator._source._state.active.count)
        yield batch


SOME: list[tuple[str, str, Any, int | None, bool]] = [
    ("fork", "strict", 3, BATCH, False),
    ("thread", "arrival", 3, BATCH, False),
    ("fork", "fast_first", 8, BATCH, True),
    ("fork", "batch", 3, None, False),
    ("thread", "strict", HERE, None, True),
    ("fork", "arrival", HERE, BATCH, False),
    ("forkserver", "strict", 3, BATCH, False),
    ("spawn", "arrival", 3, BATCH, True),
    ("fork", "strict", 1, BATCH, True),
]
OTHERS = pairwise(
    each
    for each in itertools.product(
        ("fork", "thread"), ORDERS, (1, 3, 8, HERE), (BATCH, None), (False, True)
    )
    if each[3] or each[1] in ("strict", "batch")  # only batches can mix
)


@mostly_slow(
    ("method", "order", "readers", "size", "persistent"), SOME, OTHERS, quick=len(SOME) - 1
)
def test_content_stays_while_workers_come_and_go(
    method: str, order: str, readers: Any, size: int | None, persistent: bool, forced: Any
) -> None:
    """Strict order is torch's with as many workers as readers; in threads nothing draws."""
    forced(5, 1, 3, 6, 2)
    kind = {"workers": method} if method == "thread" else {"multiprocessing_context": method}
    how: Any = {"order": order, "persistent_workers": persistent, "transforms": [slowly], **kind}
    draws = method != "thread" and readers is not HERE
    stream, scale = (Draws if draws else Split)(SIZE), AutoScale(start=2, max=6)
    torch.manual_seed(3)
    loader = DataLoader(stream, size, num_workers=scale, readers=readers, **how)
    active: list[int] = []
    got: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    epochs = 0
    while epochs < EPOCHS or len(set(active)) < 2:  # a change waits until all have had an item
        assert time.monotonic() < deadline, loader._minato_history.autoscale
        got += watched(loader, active)
        epochs += 1
    if draws and order == "strict":
        expected = torchs(readers, size, persistent)
        assert [plain(batch) for batch in got[: len(expected)]] == expected
    assert sorted(numbers(got)) == sorted([*range(SIZE)] * epochs)
    assert min(active) >= (1 if readers is HERE else min(readers, 2))  # those that host


@pytest.mark.parametrize("workers", [{}, {"workers": "thread"}])
@pytest.mark.parametrize(("readers", "start", "expected"), [(3, 2, 2), (2, 4, 2), (1, 1, 1)])
def test_without_transforms_no_other_worker_has_work(
    readers: int, start: int, expected: int, workers: Any, forced: Any
) -> None:
    forced(6, 1)
    scale = AutoScale(start=start, min=start, max=6)
    loader = DataLoader(Split(2000), BATCH, num_workers=scale, readers=readers, **workers)
    active: list[int] = []
    assert sorted(numbers(watched(loader, active))) == list(range(2000))
    assert set(active) == {expected}
    pool = iter(loader)._source._pool
    assert len(pool.processes or pool.threads) == expected


def tenfold(number: int) -> int:
    """It sleeps for longer than it waits for a core of a busy machine, on which more workers would not help."""
    time.sleep(0.05)
    return number * 10


def watch_until(loader: Any, count: int, step_s: float = 0.0) -> list[int]:
    """Go through an epoch until so many workers are active; returns how many were."""
    deadline = time.monotonic() + PATIENCE_S
    active: list[int] = []
    for _ in watched(loader, active):
        time.sleep(step_s)
        if active[-1] == count:
            return active
        assert time.monotonic() < deadline, loader._minato_history.autoscale
    raise AssertionError("the epoch has ended")


ENDLESS = 1_000_000
"""More than a test takes."""


@mostly_slow(
    ("readers", "workers"),
    [(2, {}), (HERE, {"workers": "thread"})],
    [(HERE, {}), (2, {"workers": "thread"})],
)
def test_workers_become_more_while_the_loop_waits_for_transforms(
    readers: Any, workers: Any
) -> None:
    options: dict[str, Any] = {"transforms": [tenfold], "readers": readers, **workers}
    scale = AutoScale(start=1, max=5)
    watch_until(DataLoader(Split(ENDLESS), BATCH, num_workers=scale, **options), 5)


def test_workers_that_no_item_is_left_for_become_fewer() -> None:
    options: dict[str, Any] = {"transforms": [slowly], "readers": 2}
    scale = AutoScale(start=5, min=1)
    loader = DataLoader(Split(ENDLESS), BATCH, num_workers=scale, **options)
    assert min(watch_until(loader, 2, step_s=0.05)) == 2


def under_fire(loader: Any, victim: int) -> Iterator[Any]:
    """The batches of an epoch, in which a worker is killed twice."""
    iterator = iter(loader)
    for number, batch in enumerate(iterator):
        yield batch
        if number in (1, 12):
            pool = iterator._source._pool
            os.kill(pool.processes[victim].pid, signal.SIGKILL)
            # The epoch may be over before the thread that watches has its turn.
            wait_until(lambda: pool._watch.first_ended() is not None)  # noqa: B023


@mostly_slow("order", ["strict", "arrival"])
@mostly_slow("victim", [0, 2, 4], [1])
def test_any_worker_may_die(victim: int, order: str, forced: Any) -> None:
    """Two host, one comes and goes, one stands by."""
    forced(2, 4)
    how: Any = {"order": order, "transforms": [slowly], "multiprocessing_context": "fork"}
    scale, stream = AutoScale(start=2, max=5), DatasetState(SIZE)
    loader = DataLoader(stream, BATCH, num_workers=scale, readers=3, **how)
    expected = numbers(DataLoader(DatasetState(SIZE), BATCH, readers=3))
    with pytest.warns(RuntimeWarning, match="takes its place"):
        got = numbers(under_fire(loader, victim))
    if order == "strict":
        assert got == expected
    assert sorted(got) == sorted(expected)


@pytest.mark.parametrize("stream", [Draws, DatasetState])
def test_a_run_goes_on_with_other_workers(stream: Any, forced: Any) -> None:
    forced(5, 1, 3, 6, 2)

    def loader(num_workers: Any) -> Any:
        options: dict[str, Any] = {"readers": 3, "seed": 5, "transforms": [slowly]}
        return DataLoader(stream(SIZE), BATCH, num_workers=num_workers, **options)

    loaders = (loader(AutoScale(start=start, max=6) if start else 0) for start in (2, 4, 1, 0))
    assert in_runs(loaders, (3, 11, 9, None), plain) == plain(list(loader(0)))


@pytest.mark.parametrize("scale", ["auto", AutoScale(max=3)])
@pytest.mark.parametrize("readers", [None, Readers(resume="read")])
def test_content_may_not_depend_on_the_machine(scale: Any, readers: Any) -> None:
    with pytest.raises(ValueError, match="needs readers= .* give readers=4, or readers=1 for"):
        DataLoader(Split(SIZE), num_workers=scale, readers=readers)


class Pipe(IterDataPipe[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_data_pipes_have_no_readers() -> None:
    loader = DataLoader(Pipe(), num_workers="auto", readers=2)
    with pytest.raises(ValueError, match="readers= is not for data pipes"):
        iter(loader)
