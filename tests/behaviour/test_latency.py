"""The same seed gives the same batches, however long each read takes and however often it fails first."""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato.caching import DiskCache, MemoryCache
from minato.sources.base import Retry
from minato.sources.sql import SQLite
from tests.datasets import flat, indices, tally
from tests.pairwise import pairwise
from tests.selection import mostly_slow

COUNT, BATCH, EPOCHS, SEED = 42, 5, 2, 11
LONGEST_S = 0.004
FAILS = 0.1
CHANCE = random.SystemRandom()
"""Different in every run and every process, so nothing can be the same by chance."""


def delay_s() -> float:
    return LONGEST_S * CHANCE.random() ** 3


def fail_now_and_then() -> None:
    if CHANCE.random() < FAILS:
        raise ConnectionError("lost")


class Unsteady(SQLite):
    """Rows that take a random while, after tries that fail at random."""

    transient = (*SQLite.transient, ConnectionError)

    def read_value(self, key: Any) -> Any:
        time.sleep(delay_s())
        fail_now_and_then()
        return super().read_value(key)


class UnsteadyLater(Unsteady):
    """The same, awaited."""

    async def __aget__(self, index: int) -> Any:
        key = self.keys[index]
        row = await self.attempt_async(f"key {key!r}", lambda: self._fetch_later(key))
        return self.decoded(key, row)

    async def _fetch_later(self, key: Any) -> Any:
        await asyncio.sleep(delay_s())
        fail_now_and_then()
        return SQLite.read_value(self, key)


def of_row(row: dict[str, Any]) -> Any:
    return np.frombuffer(row["x"], np.float32)


def halved(sample: Any) -> Any:
    return sample / 2


def augmented(sample: Any) -> Any:
    time.sleep(delay_s() / 4)
    noise = np.random.rand(len(sample)) + random.random() + float(torch.rand(()))
    return sample + noise + minato.numpy_rng().random()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "samples.db"
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, x BLOB)")
        rows = [(i, np.full(6, i, np.float32).tobytes()) for i in range(COUNT)]
        connection.executemany("INSERT INTO samples VALUES (?, ?)", rows)
    connection.close()
    return path


def source(kind: type[SQLite], database: Path) -> SQLite:
    retry = Retry(attempts=50, first_s=0.001, longest_s=0.002)
    return kind(database, "samples", key="id", decode=of_row, retry=retry)


def delivered(dataset: SQLite, transforms: list[Any], **arguments: Any) -> list[list[Any]]:
    """What each batch of each epoch holds, in the order of their delivery."""
    options = {"shuffle": True, "seed": SEED, "transforms": transforms, **arguments}
    loader = minato.DataLoader(dataset, BATCH, **options)
    found = [indices(loader) for _ in range(EPOCHS)]
    dataset.close()
    return found


WORKERS: dict[str, dict[str, Any]] = {
    "in-line": {"num_workers": 0},
    "processes": {"num_workers": 2},
    "persistent": {"num_workers": 3, "persistent_workers": True},
}


FETCH: dict[str, Any] = {
    "1": 1,
    "7": 7,
    "all": minato.FetchOptions(4, max_in_flight=6, slow_start=2, hedge_percentile=70),
}


@mostly_slow(
    ("kind", "workers", "fetch"),
    pairwise(itertools.product((Unsteady, UnsteadyLater), WORKERS, FETCH)),
    quick=5,
)
def test_batches_do_not_depend_on_latency(
    kind: type[SQLite], workers: str, fetch: str, database: Path, tmp_path: Path
) -> None:
    transforms = [halved, augmented]
    expected = delivered(source(SQLite, database), transforms)
    assert len(tally(flat(map(flat, expected)))) == EPOCHS * COUNT
    how = {"order": "strict", "fetch_concurrency": FETCH[fetch], **WORKERS[workers]}
    assert delivered(source(kind, database), transforms, **how) == expected
    # Half of the first epoch fits; the second run finds it there.
    for _ in range(2):
        cache = DiskCache(tmp_path / "cache", quota_bytes=20 * COUNT * 8, after=1)
        assert delivered(source(kind, database), transforms, cache=cache, **how) == expected
        report = cache.report()
        assert report.hits
        assert report.full
        cache.close()


def drawn(sample: Any) -> Any:
    return sample + minato.numpy_rng().random(len(sample))


@pytest.mark.parametrize("kind", [Unsteady, UnsteadyLater])
def test_nor_do_they_in_worker_threads(kind: type[SQLite], database: Path) -> None:
    threads = {"num_workers": 3, "workers": "thread", "fetch_concurrency": 4, "order": "strict"}
    expected = delivered(source(SQLite, database), [halved, drawn])
    for cache in (None, MemoryCache(1 << 20, after=1)):
        got = delivered(source(kind, database), [halved, drawn], cache=cache, **threads)
        assert got == expected


@mostly_slow("order", ["arrival", "fast_first", "batch"], quick=2)
def test_in_other_orders_the_samples_are_the_same(order: str, database: Path) -> None:
    how = {"num_workers": 2, "fetch_concurrency": 5, "order": order}
    expected = delivered(source(SQLite, database), [augmented])
    got = delivered(source(Unsteady, database), [augmented], **how)
    assert [sorted(flat(epoch)) for epoch in got] == [sorted(flat(epoch)) for epoch in expected]
