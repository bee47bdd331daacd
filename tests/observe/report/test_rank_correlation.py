"""Rank correlation, and whether values depend on groups, by their ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minato.observe.report.bias import rank_correlation, rank_spread


def test_two_groups_have_spearmans_correlation() -> None:
    draw = np.random.default_rng(3)
    groups = draw.integers(0, 2, 3000)
    values = draw.normal(size=3000) + groups
    spread, deviations = rank_spread(values, groups.tolist())
    assert spread == pytest.approx(rank_correlation(values, groups), abs=0.01)
    assert deviations > 50


def test_the_order_of_groups_does_not_matter() -> None:
    values = np.arange(60)
    middle = [10 if 20 <= value < 40 else value % 2 for value in values]  # neither first nor last
    assert abs(rank_correlation(values, middle)) < 0.2
    same = rank_spread((values - 30) ** 2, middle)
    assert same == rank_spread(
        (values - 30) ** 2, [{10: "b", 0: "a", 1: "c"}[each] for each in middle]
    )
    assert same[0] > 0.7


@pytest.mark.parametrize("num_groups", [2, 40, 900])
def test_chance_alone_gives_next_to_nothing(num_groups: int) -> None:
    draw = np.random.default_rng(5)
    for _ in range(20):
        groups = draw.integers(0, num_groups, 2000).tolist()
        spread, deviations = rank_spread(draw.normal(size=2000), groups)
        assert spread < 0.2
        assert abs(deviations) < 6


@pytest.mark.parametrize(
    ("values", "groups"), [([], []), ([1, 2, 3], "aaa"), ([1, 1, 1], "aba"), ([1, 2, 3], "abc")]
)
def test_where_nothing_can_be_said(values: list[int], groups: str) -> None:
    assert rank_spread(values, list(groups)) == (0.0, 0.0)


@settings(max_examples=100)
@given(st.lists(st.integers(-100, 100), min_size=2, max_size=50))
def test_rank_correlation_is_that_of_the_ranks(drawn: list[int]) -> None:
    other = [value**3 for value in drawn]
    expected = 1.0 if len(set(drawn)) > 1 else 0.0
    assert rank_correlation(drawn, other) == pytest.approx(expected)
    assert rank_correlation(drawn, [-value for value in other]) == pytest.approx(-expected)


def test_rank_correlation_by_hand() -> None:
    # Ranks 1, 2.5, 2.5, 4 against 2, 1, 3, 4.
    assert rank_correlation([1, 2, 2, 3], [20, 10, 30, 40]) == pytest.approx(3 / np.sqrt(4.5 * 5))
