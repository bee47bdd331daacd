"""The timeout policy, fed with drawn costs and no clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minato._core import Histogram
from minato.observe.meters import share_above
from minato.scheduling.slow_samples import SlowThreshold, ThresholdDecision
from tests.observe.histograms import histogram

MS = 1_000_000


def fed(policy: SlowThreshold, costs_ns: Iterable[float], times: Histogram | None = None):
    """Every decision that was taken on the way, with the number of samples before it."""
    times = times or Histogram()
    taken: list[tuple[int, ThresholdDecision]] = []
    for cost_ns in costs_ns:
        times.record(int(cost_ns))
        if policy.due(times.count):
            taken.append((times.count, policy.observe(times)))
    return taken


def bimodal(count: int, share: float = 0.2, seed: int = 0) -> np.ndarray:
    """The paper's speech workload: about 508 ms, every so often 3008 ms."""
    rng = np.random.default_rng(seed)
    light, heavy = 508 * MS * rng.normal(1, 0.003, count), 3008 * MS * rng.normal(1, 0.001, count)
    return np.where(rng.random(count) < share, heavy, light)


def test_nothing_is_slow_during_the_warm_up():
    policy = SlowThreshold(warm_up_samples=100)
    assert fed(policy, bimodal(99)) == []
    assert policy.decision == ThresholdDecision(0, 0.75, 0.0, "warm-up")
    assert fed(SlowThreshold(warm_up_samples=100), bimodal(100))


def test_the_warm_up_ends_by_seconds_too():
    policy, times = SlowThreshold(warm_up_samples=1000, warm_up_s=60), Histogram()
    for cost_ns in bimodal(20):
        times.record(int(cost_ns))
    assert policy.observe(times, elapsed_s=59.9).phase == "warm-up"
    assert policy.observe(times, elapsed_s=60).phase == "following"


@pytest.mark.parametrize("percentile", [0.5, 0.6, 0.75, 0.9])
def test_the_threshold_is_the_percentile_asked_for(percentile):
    costs_ns = np.random.default_rng(0).gamma(2.0, 50 * MS, 20_000)
    policy = SlowThreshold(percentile=percentile, panes=80)
    fed(policy, costs_ns)
    exact = max(np.quantile(costs_ns, percentile), 1.2 * np.median(costs_ns))
    assert policy.decision.threshold_ns == pytest.approx(exact, rel=0.04)
    assert policy.decision.percentile == percentile


def test_a_fixed_threshold_holds_from_the_first_sample_on():
    policy = SlowThreshold(fixed_s=1.5)
    assert policy.decision.threshold_ns == 1_500 * MS
    fed(policy, bimodal(3000))
    assert policy.decision.threshold_ns == 1_500 * MS
    assert policy.decision.slow_share == pytest.approx(0.2, abs=0.08)


@pytest.mark.parametrize("deviation", [0.0, 0.01, 0.1])
def test_uniform_costs_have_no_slow_samples(deviation):
    costs_ns = 30 * MS * np.random.default_rng(0).normal(1, deviation, 20_000)
    taken = fed(SlowThreshold(), costs_ns)
    assert {(decision.threshold_ns, decision.phase) for _, decision in taken} == {(0, "uniform")}


def test_cheap_samples_are_never_slow():
    policy = SlowThreshold()
    fed(policy, np.where(np.arange(1000) % 5 == 0, 20_000, 1_000))
    assert policy.decision.threshold_ns == 100_000


@pytest.mark.parametrize(("share", "times"), [(0.05, 3), (0.005, 100)])
def test_rare_samples_are_slow_only_if_they_stand_out(share, times):
    rng = np.random.default_rng(1)
    costs_ns = 10 * MS * np.where(rng.random(10_000) < share, times, rng.normal(1, 0.05, 10_000))
    policy = SlowThreshold()
    fed(policy, costs_ns)
    assert 20 * MS <= policy.decision.threshold_ns < 10 * MS * times


def test_a_gate_does_not_flutter_at_its_ratio():
    rng = np.random.default_rng(2)
    # P90 is 1.5 times the median, give or take what 2048 samples leave open.
    costs_ns = 10 * MS * np.exp(rng.normal(0, np.log(1.5) / 1.2816, 100_000))
    phases = [decision.phase for _, decision in fed(SlowThreshold(), costs_ns)]
    assert sum(one != other for one, other in itertools.pairwise(phases)) <= 1


def test_a_bimodal_load_leaves_the_threshold_where_it_is_for_100_000_samples():
    taken = fed(SlowThreshold(), bimodal(100_000))
    settled = [decision for count, decision in taken if count >= 512]
    assert len(settled) > 300
    assert all(509 * MS < decision.threshold_ns < 3000 * MS for decision in settled)
    assert {decision.percentile for decision in settled} == {0.75}
    shares = [decision.slow_share for decision in settled]
    assert np.mean(shares) == pytest.approx(0.2, abs=0.01)


def test_the_threshold_follows_a_drift():
    policy, times = SlowThreshold(), Histogram()
    fed(policy, bimodal(4000), times)
    before = policy.decision.threshold_ns
    fed(policy, 3 * bimodal(4000, seed=1), times)
    assert policy.decision.threshold_ns == pytest.approx(3 * before, rel=0.05)
    fed(policy, bimodal(4000, seed=2) / 2, times)
    assert policy.decision.threshold_ns == pytest.approx(before / 2, rel=0.05)


def test_two_panes_are_needed_to_fall_back_and_four_to_return():
    policy, times = SlowThreshold(), Histogram()
    costs_ns = np.random.default_rng(0).gamma(2.0, 50 * MS, 20_000)
    fed(policy, costs_ns[:16_384], times)

    def pane(factor: float) -> float:
        ((_, decision),) = fed(policy, factor * costs_ns[:256], times)
        return decision.percentile

    assert [pane(2.5), pane(1), pane(2.5), pane(2.5)] == [0.75, 0.75, 0.75, 0.9]
    assert [pane(1), pane(1), pane(1), pane(1)] == [0.9, 0.9, 0.9, 0.75]


def test_unfinished_samples_that_are_slow_already_count():
    costs_ns = np.random.default_rng(0).gamma(2.0, 50 * MS, 512).astype(int).tolist()
    plain, aware = SlowThreshold(), SlowThreshold()
    first, times = histogram(*costs_ns[:256]), histogram(*costs_ns)
    plain.observe(first)
    aware.observe(first)
    young, old = [MS] * 100, [900 * MS] * 100
    with_old = aware.observe(times, running_ns=young + old)
    assert with_old.threshold_ns > plain.observe(times, running_ns=young).threshold_ns


def test_a_known_profile_saves_the_warm_up():
    first = SlowThreshold()
    fed(first, bimodal(5000))
    second = SlowThreshold(known=first.recent)
    assert second.decision.phase == "following"
    assert second.decision.threshold_ns == first.decision.threshold_ns
    fed(second, bimodal(5000) / 10)
    assert second.decision.threshold_ns == pytest.approx(first.decision.threshold_ns / 10, rel=0.05)


@settings(max_examples=50)
@given(
    costs=st.lists(st.integers(0, 2**40), min_size=1, max_size=600),
    percentile=st.floats(0.01, 0.99),
)
def test_no_costs_upset_it(costs, percentile):
    policy = SlowThreshold(percentile=percentile, pane_samples=16, warm_up_samples=8)
    times = Histogram()
    for count, decision in fed(policy, costs, times):
        assert decision.percentile in (percentile, policy.fall_back)
        assert 0 <= decision.slow_share <= 1
        assert decision.threshold_ns == 0 or decision.threshold_ns >= 100_000
        assert count <= len(costs)
    if policy.decision.threshold_ns:
        # A percentile never flags more than its share of the costs that it was taken from.
        limit = 1 - policy.decision.percentile + 0.01
        assert share_above(policy.recent, policy.decision.threshold_ns) <= limit
