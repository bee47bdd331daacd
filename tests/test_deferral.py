"""Loaders whose workers set slow samples aside: the same samples, each transform once, also when a worker dies."""

from __future__ import annotations

import mmap
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch

from minato import DataLoader
from minato.engine import Engine
from minato.scheduler import runner
from tests.datasets import TOO_MANY_WORKERS, Numbers, three_draws

pytestmark = pytest.mark.filterwarnings(TOO_MANY_WORKERS)

SIZE = 60
METHODS = {"processes": {}, "threads": {"worker_method": "thread"}}


class Arrays(Numbers):
    """The index in an array that transforms may write to."""

    def __getitem__(self, index: int) -> Any:
        return np.full(5, float(index))


class Tally:
    """A transform that counts its calls for each sample, over all processes, and changes it in place."""

    def __init__(self) -> None:
        self.counts = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)

    def __call__(self, sample: Any) -> Any:
        self.counts[int(sample[0])] += 1
        sample[1] += 1
        return sample


class Pause:
    """A transform that takes its time."""

    def __init__(self, seconds: float = 0.0005) -> None:
        self.seconds = seconds

    def __call__(self, sample: Any) -> Any:
        time.sleep(self.seconds)
        return sample


def draw(sample: Any) -> Any:
    """A transform that draws where draws are bound to samples."""
    sample[2:] += three_draws()[:3]
    return sample


def square(sample: Any) -> Any:
    """A transform that must not be applied twice."""
    return np.concatenate([sample[:1], sample[1:] ** 2])


@pytest.fixture
def everything_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """After any stage, time is up."""
    monkeypatch.setattr(Engine, "_mark_slow", lambda self: setattr(self.ledger, "slow_ns", 1))


def samples_of(loader: DataLoader[Any], epochs: int = 1) -> list[list[Any]]:
    rows = []
    for _ in range(epochs):
        batches = list(loader)
        rows.append(sorted(row.tolist() for row in torch.cat(batches)))
    return rows


@pytest.mark.usefixtures("everything_is_slow")
@pytest.mark.parametrize("order", ["strict", "batch", "arrival", "fast_first"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_deferred_samples_are_what_they_are_in_one_go(method: dict[str, Any], order: str) -> None:
    tally = Tally()
    chain = [tally, square, Pause(), *([] if method else [draw]), square]
    options: dict[str, Any] = {"batch_size": 4, "transforms": chain, "seed": 3}
    expected = samples_of(DataLoader(Arrays(SIZE), **options), epochs=2)
    assert (tally.counts == 2).all()
    options.update(num_workers=2, order=order, **method)
    assert samples_of(DataLoader(Arrays(SIZE), **options)) == expected[:1]
    assert (tally.counts == 3).all()
    ahead = DataLoader(Arrays(SIZE), **options, persistent_workers=True)
    assert samples_of(ahead, epochs=2) == expected


@pytest.mark.usefixtures("everything_is_slow")
@pytest.mark.parametrize("order", ["arrival", "fast_first"])
def test_order_bounds_hold_for_deferred_samples(order: str) -> None:
    loader = DataLoader(
        Arrays(SIZE), 4, transforms=[Pause(), Pause(), Pause()], num_workers=3, order=order,
        max_lag=2,
    )  # fmt: skip
    batches = [[int(row[0]) for row in batch] for batch in loader]
    assert sorted(i for batch in batches for i in batch) == list(range(SIZE))
    assert max(n - i // 4 for n, batch in enumerate(batches) for i in batch) <= 2


class DiesOnce:
    """A transform whose process is killed when it first meets a certain sample."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.died = np.frombuffer(mmap.mmap(-1, 1), np.uint8)

    def __call__(self, sample: Any) -> Any:
        if int(sample[0]) == self.index and not self.died[0]:
            self.died[0] = 1
            os.kill(os.getpid(), signal.SIGKILL)
        return sample


@pytest.mark.usefixtures("everything_is_slow")
@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
def test_what_a_killed_worker_had_set_aside_is_not_lost() -> None:
    chain = [square, Pause(), draw, DiesOnce(23), square]
    expected = samples_of(DataLoader(Arrays(SIZE), 4, transforms=[square, draw, square], seed=3))
    loader = DataLoader(
        Arrays(SIZE), 4, transforms=chain, seed=3, num_workers=2, order="fast_first"
    )
    assert samples_of(loader) == expected
    assert chain[3].died[0]


def test_what_samples_cost_is_measured_in_all_workers() -> None:
    chain = [Pause(0.004), square]
    iterator: Any = iter(DataLoader(Arrays(SIZE), 4, transforms=chain, num_workers=2))
    engine = iterator._source
    assert len(list(iterator)) == SIZE // 4
    profile = engine.profile()
    assert profile.run["total"].count == SIZE
    assert profile.run["0 Pause"].count == profile.run["1 square"].count == SIZE
    assert profile.run["dataset"].count == profile.run["cpu"].count == SIZE
    assert profile.run["bytes"].total == SIZE * 5 * 8
    assert 4_000_000 <= profile.run["0 Pause"].percentile(0.5) <= profile.run["total"].max
    assert profile.run["1 square"].total < profile.run["0 Pause"].total


def test_of_rather_dear_samples_every_eighth_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_WORTH_MEASURING_NS", 1 << 60)
    monkeypatch.setattr(runner, "_RATHER_DEAR", 1 << 60)  # however long they take on this machine
    iterator: Any = iter(DataLoader(Arrays(400), 4, transforms=[Pause(0.001)], num_workers=1))
    engine = iterator._source
    assert len(list(iterator)) == 100
    profile = engine.profile()
    assert profile.run["total"].count == 400
    assert profile.run["0 Pause"].count == 400 // 8


def test_of_cheap_samples_few_are_measured() -> None:
    iterator: Any = iter(DataLoader(Numbers(20_000), 50, transforms=[str, int], num_workers=1))
    engine = iterator._source
    assert len(list(iterator)) == 400
    profile = engine.profile()
    assert profile.run["total"].count == 20_000
    assert 0 < profile.run["0 str"].count < 2_000
