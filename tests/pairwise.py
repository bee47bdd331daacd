"""Selections of a sweep, where all combinations would take long: most faults need two values to meet."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations
from typing import Any, TypeVar

__all__ = ["pairwise"]

Case = TypeVar("Case", bound="tuple[Any, ...]")


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """Few cases in which any two values meet that meet in one of all.

    Each brings the most pairs that those before it lack, so that the first are the best sample. The order is always
    the same.

    Args:
        cases: The combinations that are possible: tuples of one length.
    """
    shuffled = [*cases]
    random.Random(0).shuffle(shuffled)  # of equals the first is chosen: not all of one value
    left = [(case, set(combinations(enumerate(case), 2))) for case in shuffled]
    chosen = []
    while left:
        case, covered = max(left, key=lambda each: len(each[1]))
        chosen.append(case)
        left = [(other, rest) for other, pairs in left if (rest := pairs - covered)]
    return chosen
