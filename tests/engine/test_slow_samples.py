"""What a loader tells of its slow samples."""

from __future__ import annotations

import time
from typing import Any

import pytest

from minato import Arrival, DataLoader, StragglerPolicy
from minato.scheduling.slow_samples import SlowThreshold
from tests.datasets import ORDERS, Journal, Numbers, Sleepy, flat, indices, wait_until

SLOW = dict.fromkeys((3, 51, 147), 0.8)
SLOW_AFTER_S = 0.7
"""On a busy machine a sample of 1 ms can take a hundred of them."""


def test_before_the_first_epoch_nothing_is_known() -> None:
    known = DataLoader(Numbers(8), 2).slow_samples()
    assert (known.threshold_s, known.why, known.share) == (0.0, "warm-up", 0.0)
    assert (known.lags, known.shares) == ({}, ())
    assert (known.late_share, known.most_late) == (0.0, 0)


@pytest.mark.parametrize("workers", [{"num_workers": 3}, {"num_workers": 3, "workers": "thread"}])
def test_lags_and_shares_are_those_of_the_batches(workers: dict[str, Any]) -> None:
    loader = DataLoader(
        Sleepy(200, 0.001, SLOW),
        4,
        order=Arrival(5),
        stragglers=StragglerPolicy(after_s=SLOW_AFTER_S),
        **workers,
    )
    batches = indices(loader)
    known = loader.slow_samples()
    assert (known.threshold_s, known.why) == (SLOW_AFTER_S, "fixed")
    assert known.shares == tuple(sum(i in SLOW for i in batch) / 4 for batch in batches)
    late = [turn - i // 4 for turn, batch in enumerate(batches) for i in batch]
    assert known.lags == {lag: late.count(lag) for lag in late}
    assert 0 <= known.most_late <= 5
    assert known.late_share == sum(lag > 0 for lag in late) / 200


def test_in_strict_order_nothing_is_late() -> None:
    loader = DataLoader(
        Sleepy(60, 0.001, SLOW), 4, num_workers=2, stragglers=StragglerPolicy(after_s=SLOW_AFTER_S)
    )
    assert flat(indices(loader)) == list(range(60))
    known = loader.slow_samples()
    assert known.lags == {0: 60}
    assert known.shares == tuple(float(i in (0, 12)) / 4 for i in range(15))


class Noted(Sleepy):
    """Notes which samples were asked for, in worker threads."""

    def __init__(self, size: int, seconds: float, slower: dict[int, float]) -> None:
        super().__init__(size, seconds, slower)
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("order", ORDERS)
def test_a_slow_sample_starts_earlier_in_the_second_epoch(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = SlowThreshold.due

    def due_later(*arguments: Any) -> bool:
        time.sleep(0.002)  # as if another program had the processor: costs are read as often
        return due(*arguments)

    monkeypatch.setattr(SlowThreshold, "due", due_later)
    dataset = Noted(60, 0.005, {59: 0.15})
    loader = DataLoader(
        dataset,
        4,
        num_workers=2,
        workers="thread",
        prefetch_factor=8,  # all batches of an epoch are open at once
        order=order,
        stragglers=StragglerPolicy(after_s=0.08),
    )
    places = []
    for _ in range(2):
        assert sorted(flat(indices(loader))) == list(range(60))
        places.append(dataset.asked[:60].index(59))
        del dataset.asked[:60]
    assert places[0] > 50
    assert places[1] < 45  # 20 where nothing else runs


class Held(Journal):
    """Sample 40 is done when all others have begun; the others take no time."""

    def __getitem__(self, index: int) -> int:
        super().__getitem__(index)
        time.sleep(0.0005)
        if index == 40:
            wait_until(lambda: len(self.begun()) == self.size, 60)
        return index


def test_a_slow_sample_is_named_while_it_runs() -> None:
    loader = DataLoader(
        Held(80), 4, num_workers=2, order="arrival", stragglers=StragglerPolicy(after_s=0.02)
    )
    assert loader.slow_samples().running == ()
    seen = [sample for _ in loader for sample in loader.slow_samples().running]
    assert 40 in {sample.index for sample in seen}
    for sample in seen:
        assert sample.transform is None
        assert sample.worker in (0, 1)
        assert sample.running_s >= 0.02
    assert loader.slow_samples().running == ()


def test_the_transform_that_runs_is_named() -> None:
    dataset = Journal(80)

    def lingers(index: int) -> int:
        time.sleep(0.002)
        if index == 9:
            wait_until(lambda: len(dataset.begun()) == 80)
        return index

    loader = DataLoader(
        dataset,
        4,
        num_workers=2,
        transforms=[abs, lingers],
        order="arrival",
        stragglers=StragglerPolicy(after_s=0.02),
    )
    seen = [sample for _ in loader for sample in loader.slow_samples().running]
    name = "test_the_transform_that_runs_is_named.lingers"
    assert (9, name) in {(sample.index, sample.transform) for sample in seen}
