"""What a loader tells of its slow samples."""

from __future__ import annotations

import time
from typing import Any

import pytest

from minato import Arrival, DataLoader, StragglerPolicy
from minato._support.counters import shared_integers
from minato.engine import engine
from minato.scheduling.slow_samples import SlowThreshold
from tests.datasets import ORDERS, Numbers, Sleepy, flat, indices, wait_until

SLOW = dict.fromkeys((3, 51, 147), 0.8)
SLOW_AFTER_S = 0.7
"""On a busy machine any sample may take as long."""
FIXED = StragglerPolicy(after_s=SLOW_AFTER_S)


class Timed(Sleepy):
    """As ``Sleepy``, and measures how long each sample has taken, for threads and processes."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 0.001, SLOW)
        self._took_ns = shared_integers(size)

    def __getitem__(self, index: int) -> int:
        began_ns = time.monotonic_ns()
        sample = super().__getitem__(index)
        self._took_ns[index] = time.monotonic_ns() - began_ns
        return sample

    def slow(self) -> set[int]:
        took_ns = self._took_ns.tolist()
        return {i for i in range(self.size) if took_ns[i] > SLOW_AFTER_S * 1e9}


def test_before_the_first_epoch_nothing_is_known() -> None:
    known = DataLoader(Numbers(8), 2).slow_samples()
    assert (known.threshold_s, known.why, known.share) == (0.0, "warm-up", 0.0)
    assert (known.lags, known.shares) == ({}, ())
    assert (known.late_share, known.most_late) == (0.0, 0)


@pytest.mark.parametrize(
    ("max_lag", "reads"),
    [
        (5, {"num_workers": 3}),
        (5, {"num_workers": 3, "workers": "thread"}),
        (None, {"num_workers": 2}),
        (None, {"fetch_concurrency": 4}),
    ],
)
def test_lags_and_shares_are_those_of_the_batches(
    max_lag: int | None, reads: dict[str, Any]
) -> None:
    """In strict order, nothing is late."""
    dataset = Timed(200)
    order: Any = "strict" if max_lag is None else Arrival(max_lag)
    loader = DataLoader(dataset, 4, order=order, stragglers=FIXED, **reads)
    batches = indices(loader)
    slow = dataset.slow()
    assert {*SLOW} <= slow
    known = loader.slow_samples()
    assert (known.threshold_s, known.why) == (SLOW_AFTER_S, "fixed")
    assert known.shares == tuple(sum(i in slow for i in batch) / 4 for batch in batches)
    late = [turn - i // 4 for turn, batch in enumerate(batches) for i in batch]
    assert known.lags == {lag: late.count(lag) for lag in late}
    assert 0 <= known.most_late <= (max_lag or 0)
    assert known.late_share == sum(lag > 0 for lag in late) / 200


def test_without_workers_the_share_is_that_of_the_latest_samples() -> None:
    loader = DataLoader(
        Sleepy(64, 0.0, {3: 0.3, 35: 0.3}), 32, stragglers=StragglerPolicy(after_s=0.2)
    )
    for _ in loader:
        assert loader.slow_samples().share >= 1 / 64


class Noted(Sleepy):
    """Notes which samples were asked for, in worker threads."""

    def __getitem__(self, index: int) -> int:
        ASKED.append(index)
        return super().__getitem__(index)


ASKED: list[int] = []


@pytest.mark.parametrize("order", ORDERS)
def test_a_slow_sample_starts_earlier_in_the_second_epoch(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = SlowThreshold.due

    def due_later(*arguments: Any) -> bool:
        time.sleep(0.002)  # as if another program had the processor: costs are read as often
        return due(*arguments)

    monkeypatch.setattr(SlowThreshold, "due", due_later)
    # Nor does processor time count that a host of virtual machines has taken.
    monkeypatch.setattr(engine, "thread_time_ns", int)
    # So slow that it would start first, and that others may take ten times as long.
    dataset = Noted(60, 0.005, {59: 0.7})
    policy = StragglerPolicy(after_s=0.35)
    # All batches of an epoch are open at once.
    threads = {"num_workers": 2, "workers": "thread", "prefetch_factor": 8}
    loader = DataLoader(dataset, 4, order=order, stragglers=policy, **threads)
    places = []
    for _ in range(2):
        ASKED.clear()
        assert sorted(flat(indices(loader))) == list(range(60))
        places.append(ASKED.index(59))
    assert places[0] > 50
    assert places[1] < 45


HELD = 40
SEEN = shared_integers(1)


def holds(index: int) -> int:
    """Is done with one sample when the loop has seen that it runs."""
    time.sleep(0.0005)
    if index == HELD:
        wait_until(lambda: bool(SEEN[0]))
    return index


class Held(Numbers):
    def __getitem__(self, index: int) -> int:
        return holds(index)


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize(
    ("dataset", "transforms", "name"), [(Held, None, None), (Numbers, [abs, holds], "holds")]
)
def test_a_slow_sample_is_named_while_it_runs(
    dataset: Any, transforms: Any, name: Any, looks: bool
) -> None:
    """Also after a look at a batch by an iterator that is gone."""
    SEEN[0] = 0
    options = {"num_workers": 2, "transforms": transforms, "order": "arrival", "prefetch_factor": 1}
    loader = DataLoader(dataset(80), 4, stragglers=StragglerPolicy(after_s=0.02), **options)
    assert loader.slow_samples().running == ()
    seen: list[Any] = []

    def sees_it() -> bool:
        seen.extend(loader.slow_samples().running)
        return any(sample.index == HELD for sample in seen)

    for number, _ in enumerate(loader, 1):
        if number == 1 and looks:
            SEEN[0] = 1
            next(iter(loader))
            SEEN[0] = 0
        if number == 19:  # all others have come
            wait_until(sees_it)
            SEEN[0] = 1
    for sample in seen:
        assert sample.worker in (0, 1)
        assert sample.running_s >= 0.02
        assert sample.index != HELD or sample.transform == name
    wait_until(lambda: loader.slow_samples().running == ())
