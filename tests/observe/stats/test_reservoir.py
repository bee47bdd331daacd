"""Samples drawn at random from all that were delivered."""

from __future__ import annotations

import numpy as np

from minato.observe.stats.lateness import DeliveredSample, Reservoir


def fed(batches: int, size: int = 16) -> tuple[Reservoir, int]:
    """A reservoir after so many batches, and how often it asked for the samples of one."""
    reservoir, asked = Reservoir(), 0
    for batch in range(batches):

        def samples(batch: int = batch) -> list[tuple[int, int, int, int]]:
            nonlocal asked
            asked += 1
            return [(batch * size + i, 7 * (batch * size + i), 5, 3) for i in range(size)]

        reservoir.offer(samples, lambda position: position % 4)
    return reservoir, asked


def test_rows_are_those_of_the_samples() -> None:
    reservoir, _ = fed(10)
    assert len(reservoir.rows) == 80
    for row in reservoir.rows:
        assert row == DeliveredSample(row.key, row.key // 7 % 4, 5, 3)
        assert 0 <= row.key < 7 * 160


def test_no_sample_of_a_batch_is_taken_twice() -> None:
    reservoir, asked = fed(10, size=4)
    assert sorted(row.key for row in reservoir.rows) == [7 * number for number in range(40)]
    assert asked == 10


def test_memory_is_bounded_and_late_batches_are_rarely_looked_at() -> None:
    reservoir, asked = fed(20_000)
    assert len(reservoir.rows) == 4096
    assert asked < 10_000  # all of the first 512, then fewer and fewer


def test_early_and_late_batches_are_as_likely() -> None:
    reservoir, _ = fed(20_000)
    numbers = np.array([row.key // 7 // 16 for row in reservoir.rows])
    counts = np.histogram(numbers, 8, (0, 20_000))[0]
    assert abs(counts - 512).max() < 5 * 512**0.5


def test_batches_of_which_nothing_is_known_are_left_out() -> None:
    reservoir = Reservoir()
    reservoir.offer(list, lambda position: 0)
    assert reservoir.rows == []
