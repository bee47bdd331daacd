"""Standby workers: a slow sample holds up nobody else, and nothing is done twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minato import DataLoader
from tests.datasets import (
    ORDERS,
    Journal,
    Numbers,
    Sleepy,
    flat,
    indices,
    wait_until,
    worker_number,
)

SLOW = {5: 0.15, 61: 0.15, 62: 0.15}


class Waits(Numbers):
    """Sample 20 is done when sample 60 is."""

    def __init__(self, size: int, mark: Path) -> None:
        super().__init__(size)
        self.mark = mark

    def __getitem__(self, index: int) -> int:
        time.sleep(0.001)
        if index == 20:
            wait_until(self.mark.exists, 60)
        if index == 60:
            self.mark.touch()
        return index


class Held(Journal):
    """Sample 40 is done when all others have begun, the others take no time."""

    def __getitem__(self, index: int) -> int:
        super().__getitem__(index)
        time.sleep(0.0005)
        if index == 40:
            wait_until(lambda: len(self.begun()) == self.size, 60)
        return index


class Numbered(Numbers):
    """Samples are the number of the worker that ran them; every thirtieth takes long."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        time.sleep(0.15 if index % 30 == 9 else 0.001)
        return index, worker_number()


@pytest.mark.parametrize("method", ["process", "thread"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_sample_comes_once(order: str, method: str) -> None:
    loader = DataLoader(
        Sleepy(160, 0.0005, SLOW),
        4,
        order=order,
        worker_method=method,
        num_workers=2,
        standby_workers=2,
        slow_after_s=0.01,
    )
    for _ in range(2):
        batches = indices(loader)
        assert sorted(flat(batches)) == list(range(160))
        if order == "strict":
            assert flat(batches) == list(range(160))
    assert loader.report().run.slowness.stand_ins >= 1


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_work_beyond_a_sample_that_waits_for_it(start_method: str, tmp_path: Path) -> None:
    """With one worker and none on standby this would never end."""
    loader = DataLoader(
        Waits(100, tmp_path / "mark"),
        4,
        num_workers=1,
        standby_workers=1,
        slow_after_s=0.01,
        multiprocessing_context=start_method,
    )
    assert flat(indices(loader)) == list(range(100))
    assert loader.report().run.slowness.stand_ins >= 1


def test_nothing_is_begun_twice() -> None:
    dataset = Held(120)
    loader = DataLoader(
        dataset, 4, num_workers=1, standby_workers=1, order="arrival", max_lag=30, slow_after_s=0.01
    )
    found = flat(indices(loader))
    assert sorted(found) == dataset.begun() == list(range(120))
    assert found[-4:].count(40) == 1


def drawn(sample: tuple[int, float]) -> tuple[int, float, float]:
    """Slow, now and then, after the dataset has drawn and before the transform draws."""
    index, first = sample
    time.sleep(0.05 if index % 31 == 5 else 0.0005)
    return index, first, float(np.random.standard_normal())


class Dice(Numbers):
    """Samples of one draw."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random()


@pytest.mark.parametrize("order", ["strict", "fast_first"])
def test_content_does_not_depend_on_who_works(order: str) -> None:
    def content(**arguments: Any) -> list[Any]:
        loader = DataLoader(
            Dice(160),
            4,
            shuffle=True,
            seed=3,
            transforms=[drawn, list],
            slow_after_s=0.005,
            **arguments,
        )
        columns = ((column.tolist() for column in batch) for _ in range(2) for batch in loader)
        return sorted(row for batch in columns for row in zip(*batch, strict=True))

    assert content(num_workers=2, standby_workers=2, order=order) == content()


def test_only_those_that_are_called_work() -> None:
    loader = DataLoader(
        Numbered(240), 4, num_workers=2, standby_workers=2, slow_after_s=0.01, order="arrival"
    )
    workers = [number for _, numbers in loader for number in numbers.tolist()]
    assert {0, 1, 2} <= set(workers) <= {0, 1, 2, 3}
    quick = DataLoader(Numbered(8), 4, num_workers=2, standby_workers=2, slow_after_s=10.0)
    assert {number for _, numbers in quick for number in numbers.tolist()} <= {0, 1}


def test_a_slow_sample_is_named_while_it_runs() -> None:
    loader = DataLoader(
        Held(80), 4, num_workers=2, standby_workers=1, order="arrival", slow_after_s=0.02
    )
    assert loader.slow_samples().running == ()
    seen = [sample for _ in loader for sample in loader.slow_samples().running]
    assert 40 in {sample.index for sample in seen}
    for sample in seen:
        assert sample.transform is None
        assert sample.worker in (0, 1, 2)
        assert sample.running_s >= 0.02
    assert loader.slow_samples().running == ()


def test_the_transform_that_runs_is_named() -> None:
    loader = DataLoader(
        Numbers(80), 4, num_workers=2, transforms=[abs, lingers], order="arrival", slow_after_s=0.02
    )
    seen = [sample for _ in loader for sample in loader.slow_samples().running]
    assert (9, "lingers") in {(sample.index, sample.transform) for sample in seen}


def lingers(index: int) -> int:
    time.sleep(0.4 if index == 9 else 0.002)
    return index


@pytest.mark.parametrize("victim", ["asleep", "at work", "held up"])
def test_a_standby_worker_that_is_killed_is_replaced(victim: str) -> None:
    loader = DataLoader(
        Sleepy(400, 0.002, {20: 0.6, 21: 0.6} if victim != "asleep" else {20: 0.6}),
        4,
        num_workers=1,
        standby_workers=1,
        slow_after_s=0.01,
        persistent_workers=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        batches = iter(loader)
        source: Any = loader._iterator
        engine, pool = source._source, source._source._pool
        doomed = pool.processes[1]

        def kill() -> None:
            if victim == "at work":
                wait_until(
                    lambda: engine.ledger.activity(1)[0] > 0 or bool(engine.ledger.begun()[1:]), 20
                )
            elif victim == "held up":
                wait_until(lambda: len(engine.running(20_000_000)) == 2, 20)
            with contextlib.suppress(ProcessLookupError):
                os.kill(doomed.pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        found = flat(batch.tolist() for batch in batches)
        thread.join()
    assert found == list(range(400))
    assert flat(indices(loader)) == list(range(400))
    wait_until(lambda: pool.check() is None and pool.processes[1] is not doomed)


def test_with_a_changing_number_of_workers() -> None:
    loader = DataLoader(
        Sleepy(300, 0.001, {30: 0.2, 150: 0.2}),
        4,
        num_workers=2,
        max_workers=3,
        standby_workers=1,
        slow_after_s=0.01,
        order="arrival",
    )
    for _ in range(2):
        assert sorted(flat(indices(loader))) == list(range(300))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_workers": 0}, "num_workers=0 has none"),
        ({"schedule": "round_robin"}, "has no meaning with schedule='round_robin'"),
        ({"fetch_concurrency": 4}, "has no meaning with fetch_concurrency"),
        ({"standby_workers": -1}, "standby_workers=-1 is too small"),
    ],
)
def test_what_has_no_use_for_them_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataLoader(Numbers(8), **{"num_workers": 1, "standby_workers": 1, **given})


def test_their_number_is_a_number() -> None:
    for given in (None, 1.5, True):
        with pytest.raises(TypeError, match="give an integer"):
            DataLoader(Numbers(8), num_workers=1, standby_workers=given)  # type: ignore[arg-type]
