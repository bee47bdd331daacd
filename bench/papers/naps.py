"""Samples that sleep for as long as the paper's workloads take, scaled down; they need workers but no cores."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from bench.simulate.workloads import (
    DETECTION,
    SEGMENTATION,
    SPEECH_3S_RANDOM,
    Workload,
)


class Naps(Dataset[tuple[int, float]]):
    """``(index, seconds that it slept)``."""

    def __init__(self, costs_s: list[float]) -> None:
        self.costs_s = costs_s

    def __len__(self) -> int:
        return len(self.costs_s)

    def __getitem__(self, index: int) -> tuple[int, float]:
        time.sleep(self.costs_s[index])
        return index, self.costs_s[index]


class Scaled(NamedTuple):
    """A workload of the simulation, so many times as fast.

    Attributes:
        workload: Whose costs are drawn.
        scale: Times are multiplied by this.
        samples: How many, usually.
    """

    workload: Workload
    scale: float
    samples: int

    @property
    def step_s(self) -> float:
        """What the loop takes for a batch."""
        return self.scale * self.workload.step_s

    def naps(self, count: int | None = None) -> Naps:
        """So many samples; always the same ones."""
        costs_s = self.workload.costs_s(count or self.samples, np.random.default_rng(0))
        return Naps((self.scale * costs_s).tolist())

    def bound_s(self, naps: Naps, workers: int) -> float:
        """The least time of an epoch: of the workers or of the loop, whichever is longer."""
        batches = -(-len(naps) // self.workload.batch_size)
        return max(sum(naps.costs_s) / workers, batches * self.step_s)


SCALED = (
    Scaled(SEGMENTATION, 0.04, 480),
    Scaled(DETECTION, 0.2, 2400),
    Scaled(SPEECH_3S_RANDOM, 0.02, 1200),
)
