"""Foretelling costs: by index, by size, by plan, and knowing how good that is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minato.source.prediction import (
    CostByIndex,
    CostByPlan,
    CostBySize,
    Predictor,
    Quality,
)
from minato.stats.ranks import rank_correlation


def test_a_cost_is_remembered_by_index_and_the_latest_counts_half():
    costs = CostByIndex()
    assert costs.predict(5, None, ()) is None
    costs.observe(5, None, (), 100.0)
    assert costs.predict(5, None, ()) == 100
    costs.observe(5, None, (), 200.0)
    assert costs.predict(5, None, ()) == 150
    assert costs.predict(4, None, ()) is None


def test_ten_million_indices_take_a_bounded_amount_of_memory():
    costs = CostByIndex()
    for index in range(0, 10_000_000, 1000):
        costs.observe(index, None, (), 1.0 + index)
    assert costs.nbytes <= 64 << 20
    assert costs.predict(9_999_000, None, ()) == pytest.approx(9_999_001)


@pytest.mark.parametrize("key", ["name", (1, 2), -1, 10**12, None])
def test_keys_that_are_no_indices_are_not_remembered(key):
    costs = CostByIndex()
    costs.observe(key, None, (), 100.0)
    assert costs.predict(key, None, ()) is None
    assert costs.nbytes == 0


def test_size_foretells_a_cost_that_grows_with_it():
    model, rng = CostBySize(), np.random.default_rng(0)
    for size in rng.uniform(1e6, 1e8, 200):
        model.observe(0, size, (), 5e6 + 3.0 * size)
    assert model.predict(0, 5e7, ()) == pytest.approx(5e6 + 1.5e8, rel=0.01)
    assert model.predict(0, None, ()) is None


def test_equal_sizes_foretell_nothing():
    model = CostBySize()
    for _ in range(100):
        model.observe(0, 1e6, (), 5e6)
    assert model.predict(0, 1e6, ()) is None


def test_plans_foretell_the_sum_of_what_was_decided():
    """The costs of SpeedyLoader's table 1: the decision, not the size, makes them."""
    model, rng = CostByPlan(), np.random.default_rng(0)
    for _ in range(600):
        flip, noise = bool(rng.random() < 0.5), bool(rng.random() < 0.2)
        cost_ns = (32e6 if flip else 3e3) + 3e6 + (149e6 if noise else 2e3)
        model.observe(0, None, [flip, None, noise], cost_ns)
    assert model.predict(0, None, [True, None, False]) == pytest.approx(35e6, rel=0.1)
    assert model.predict(0, None, [True, None, True]) == pytest.approx(184e6, rel=0.1)
    assert model.predict(0, None, [None, None, None]) is None


def test_decisions_without_number_are_kept_together():
    model, rng = CostByPlan(), np.random.default_rng(0)
    for _ in range(2000):
        model.observe(0, None, [rng.random(), rng.random(3), int(rng.integers(10**6))], 6.0)
    assert model.predict(0, None, [0.5, np.zeros(3), -1]) == pytest.approx(6.0)
    assert sum(map(len, model._added)) < 300


def feed(predictor: Predictor, costs_ns, sizes=None, epochs=1):
    for _ in range(epochs):
        for index, cost_ns in enumerate(costs_ns):
            predictor.observe(index, None if sizes is None else sizes[index], (), cost_ns)


def test_it_takes_the_model_that_foretells_best():
    rng = np.random.default_rng(0)
    sizes = rng.uniform(63e6, 299e6, 300)
    by_size = Predictor()
    feed(by_size, 4.7 * sizes * rng.normal(1, 0.05, 300), sizes)
    assert by_size.model == "size"
    assert by_size.quality().rank_correlation > 0.9
    by_index = Predictor()
    feed(by_index, rng.gamma(2.0, 1e7, 300), rng.uniform(1e5, 1e6, 300), epochs=3)
    assert by_index.model == "index"
    assert by_index.quality(2e7) == Quality(512, pytest.approx(1), 1, 1)


def test_costs_that_follow_nothing_are_not_foretold():
    rng = np.random.default_rng(0)
    predictor = Predictor()
    for epoch in range(3):
        feed(predictor, rng.gamma(2.0, 1e7, 300), rng.uniform(1e5, 1e6, 300))
        assert predictor.model is None, epoch
    assert predictor.predict(0, 1e5) is None
    assert predictor.quality() == Quality()


def test_hits_and_false_alarms_are_told_apart():
    class Said:
        def predict(self, index, size, plans):
            return size

        def observe(self, *_):
            pass

    predictor = Predictor({"said": Said()})
    for came, said in [(1, 1)] * 60 + [(9, 9)] * 15 + [(8, 2)] * 5 + [(2, 8)] * 5:
        predictor.observe(0, said, (), came)
    quality = predictor.quality(threshold_ns=5)
    assert quality.hit_rate == pytest.approx(15 / 20)
    assert quality.precision == pytest.approx(15 / 20)


finite = st.lists(st.integers(-100, 100), min_size=2, max_size=50)


@settings(max_examples=100, deadline=None)
@given(finite)
def test_rank_correlation_is_that_of_the_ranks(drawn):
    other = [value**3 for value in drawn]
    expected = 1.0 if len(set(drawn)) > 1 else 0.0
    assert rank_correlation(drawn, other) == pytest.approx(expected)
    assert rank_correlation(drawn, [-value for value in other]) == pytest.approx(-expected)


def test_rank_correlation_by_hand():
    # Ranks 1, 2.5, 2.5, 4 against 2, 1, 3, 4.
    assert rank_correlation([1, 2, 2, 3], [20, 10, 30, 40]) == pytest.approx(3 / np.sqrt(4.5 * 5))
