"""What a loader tells of its slow samples."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from minato import DataLoader
from minato.report.figures import Prediction
from minato.source.prediction import Quality
from tests.datasets import Journal, Numbers, Sleepy, flat, indices, wait_until

SLOW = dict.fromkeys(range(3, 200, 20), 0.15)
SLOW_AFTER_S = 0.1
"""On a busy machine a sample of 1 ms can take tens of them."""


def test_before_the_first_epoch_nothing_is_known() -> None:
    known = DataLoader(Numbers(8), 2).slow_samples()
    assert (known.threshold_s, known.why, known.share) == (0.0, "warm-up", 0.0)
    assert (known.lags, known.shares, known.prediction) == ({}, (), Quality())
    assert (known.late_share, known.most_late) == (0.0, 0)


@pytest.mark.parametrize(
    "workers", [{"num_workers": 3}, {"num_workers": 3, "worker_method": "thread"}]
)
def test_lags_and_shares_are_those_of_the_batches(workers: dict[str, Any]) -> None:
    loader = DataLoader(
        Sleepy(200, 0.001, SLOW),
        4,
        order="arrival",
        max_lag=5,
        slow_after_s=SLOW_AFTER_S,
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
    loader = DataLoader(Sleepy(60, 0.001, SLOW), 4, num_workers=2, slow_after_s=SLOW_AFTER_S)
    assert flat(indices(loader)) == list(range(60))
    known = loader.slow_samples()
    assert known.lags == {0: 60}
    assert known.shares == tuple(float(i % 5 == 0) / 4 for i in range(15))


def test_the_second_epoch_was_foretold() -> None:
    loader = DataLoader(
        Sleepy(200, 0.001, SLOW), 4, num_workers=2, slow_after_s=SLOW_AFTER_S, seed=0
    )
    list(loader)
    assert loader.slow_samples().prediction == Quality()
    list(loader)
    quality = loader.slow_samples().prediction
    assert quality.samples > 100
    assert (quality.hit_rate, quality.precision) == (1.0, 1.0)


class SomeNoise:
    """Three samples in ten take 12 ms, if the dice say so."""

    def plan(self, rng: np.random.Generator, meta: Any) -> bool:
        return bool(rng.random() < 0.3)

    def apply(self, sample: int, plan: bool) -> int:
        time.sleep(0.012 if plan else 0.002)
        return sample

    def __call__(self, sample: int) -> int:
        return self.apply(sample, self.plan(np.random.default_rng(), None))


def test_plans_foretell_what_no_history_can() -> None:
    loader = DataLoader(
        Numbers(400), 4, num_workers=2, transforms=[SomeNoise()], slow_after_s=0.008, seed=1
    )
    list(loader)
    quality = loader.slow_samples().prediction
    assert quality.samples > 100
    assert quality.rank_correlation > 0.3
    assert quality.hit_rate > 0.5
    assert quality.precision > 0.5


class Weighed(Sleepy):
    """A sample takes so many milliseconds as it is large."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 0.002, dict.fromkeys(range(4, size, 5), 0.06))

    def size_of(self, index: int) -> int:
        return round(1000 * self.slower.get(index, self.seconds))


def test_sizes_foretell_costs_in_a_first_epoch() -> None:
    loader = DataLoader(Weighed(200), 4, num_workers=2, slow_after_s=0.03)
    assert loader.report().prediction == Prediction("none", 0, 0.0, 0.0, 0.0)
    list(loader)
    prediction = loader.report().prediction
    assert prediction.model == "size"
    assert prediction.samples > 50
    assert prediction.hit_rate > 0.5
    assert prediction.precision > 0.5
    assert "foretells them best" in str(loader.report())


def test_a_dataset_whose_sizes_cannot_be_told_says_so() -> None:
    class Unweighed(Weighed):
        def size_of(self, index: int) -> int:
            raise KeyError(f"no size of {index}")

    loader = DataLoader(Unweighed(400), 4, num_workers=2, slow_after_s=0.008)
    with pytest.raises(KeyError, match="no size of"):
        list(loader)


class Held(Journal):
    """Sample 40 is done when all others have begun; the others take no time."""

    def __getitem__(self, index: int) -> int:
        super().__getitem__(index)
        time.sleep(0.0005)
        if index == 40:
            wait_until(lambda: len(self.begun()) == self.size, 60)
        return index


def test_a_slow_sample_is_named_while_it_runs() -> None:
    loader = DataLoader(Held(80), 4, num_workers=2, order="arrival", slow_after_s=0.02)
    assert loader.slow_samples().running == ()
    seen = [sample for _ in loader for sample in loader.slow_samples().running]
    assert 40 in {sample.index for sample in seen}
    for sample in seen:
        assert sample.transform is None
        assert sample.worker in (0, 1)
        assert sample.running_s >= 0.02
    assert loader.slow_samples().running == ()


def lingers(index: int) -> int:
    time.sleep(0.4 if index == 9 else 0.002)
    return index


def test_the_transform_that_runs_is_named() -> None:
    loader = DataLoader(
        Numbers(80), 4, num_workers=2, transforms=[abs, lingers], order="arrival", slow_after_s=0.02
    )
    seen = [sample for _ in loader for sample in loader.slow_samples().running]
    assert (9, "lingers") in {(sample.index, sample.transform) for sample in seen}
