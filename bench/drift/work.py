"""The simulation's drift, slept in real time by a chain of transforms."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.simulate.control import DRIFT

SCALE = 0.1
"""Real seconds to a second of the simulation."""
_DRAWN = 2000


class Drifting:
    """Gives what a sample shall cost in seconds, and its index; the later ones cost more.

    Args:
        duration_s: About how long an epoch lasts where the consumer never waits.
    """

    def __init__(self, duration_s: float) -> None:
        size = DRIFT.workload.batch_size
        batches = round(duration_s / SCALE * DRIFT.samples_per_s / size)
        self._length = batches * size
        self._costs_s = DRIFT.workload.costs_s(_DRAWN, np.random.default_rng(0))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[float, int]:
        drawn_s = self._costs_s[index % _DRAWN] * SCALE
        return float(drawn_s * DRIFT.cost_factor(index / self._length)), index

    def mean_s(self, first: int, last: int) -> float:
        """Mean cost of the samples from ``first`` to ``last``."""
        return statistics.fmean(self[index][0] for index in range(first, last + 1))


class InTurn:
    """A sampler that gives one index after the other."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))


class Sleeps:
    """A transform that takes a share of a sample's cost."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __call__(self, sample: Any) -> Any:
        time.sleep(sample[0] * self._share)
        return sample


def chain() -> list[Sleeps]:
    """The transforms, with the shares of the paper's chain."""
    return [Sleeps(share) for share in DRIFT.workload.shares]
