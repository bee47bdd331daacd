"""The record of how far batches are from the sampler's order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato.observe.lateness import Lateness


def record(asked: list[int], delivered: list[list[int]], start: int = 100) -> Lateness:
    lateness = Lateness()
    for batch, count in enumerate(asked):
        lateness.asked(count, batch)
    for batch, numbers in enumerate(delivered):
        positions = [number + start if number >= 0 else -1 for number in numbers]
        lateness.delivered(positions, start, sum(number % 5 == 0 for number in numbers), batch)
    return lateness


def test_samples_that_were_skipped_do_not_count():
    lateness = record([3, 1], [[0, -1, 2], [-1]])
    assert lateness.lags == {0: 2}
    assert list(lateness.slow_shares) == pytest.approx([1 / 2, 0])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.randoms())
def test_the_lags_are_those_of_a_plain_count(sizes: list[int], draw) -> None:
    home = [batch for batch, size in enumerate(sizes) for _ in range(size)]
    order = list(range(len(home)))
    draw.shuffle(order)
    delivered, turns = [], []
    for turn, size in enumerate(sizes):
        delivered.append([order.pop() for _ in range(size)])
        turns += [turn - home[number] for number in delivered[-1]]
    lateness = record(sizes, delivered)
    assert {lag: turns.count(lag) for lag in turns} == lateness.lags
    worst = [
        max(0, *(turn - home[number] for number in numbers))
        for turn, numbers in enumerate(delivered)
    ]
    latest = lateness.latest
    assert (latest.count, latest.total, latest.max) == (len(worst), sum(worst), max(worst))
