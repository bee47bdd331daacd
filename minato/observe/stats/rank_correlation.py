"""Whether two things rise and fall together, whatever their scales."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["rank_correlation", "rank_spread", "ranks_of"]


def rank_correlation(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Spearman's rank correlation of two equally long sequences; equal values share their mean rank.

    Returns:
        From -1 to 1; 0 where one of them is constant or has fewer than two values.
    """
    ranks = [ranks_of(np.asarray(values, np.float64)) for values in (first, second)]
    if len(ranks[0]) < 2 or any(np.ptp(rank) == 0 for rank in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def ranks_of(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rank of each value, from 1 on."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle: npt.NDArray[np.float64] = last - (counts - 1) / 2.0
    return middle[place]


def rank_spread(values: npt.ArrayLike, groups: Sequence[object]) -> tuple[float, float]:
    """How much of the ranks of values depends on the group: Kruskal and Wallis's test.

    Returns:
        The correlation ratio, from 0 to 1, without what chance alone gives; for two groups it is the amount of
        Spearman's correlation. And by how many standard deviations the test's statistic exceeds what chance gives.
    """
    ranks = ranks_of(np.asarray(values, np.float64))
    _, place = np.unique(np.array([repr(group) for group in groups]), return_inverse=True)
    counts = np.bincount(place)
    count, num_groups = len(ranks), len(counts)
    whole = float(np.sum((ranks - (count + 1) / 2) ** 2))
    if num_groups < 2 or num_groups >= count or whole == 0:
        return 0.0, 0.0
    means = np.bincount(place, ranks) / counts
    between = float(np.sum(counts * (means - (count + 1) / 2) ** 2))
    statistic, expected = (count - 1) * between / whole, num_groups - 1
    share = max((statistic - expected) / (count - num_groups), 0.0)
    return min(share, 1.0) ** 0.5, (statistic - expected) / (2 * expected) ** 0.5
