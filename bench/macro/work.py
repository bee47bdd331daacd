"""Datasets whose content and cost depend on the index alone, so every loader does the same work."""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

Sample = tuple[Any, int]
"""What every dataset here returns: the payload, and the index as its label."""


class Work(Protocol):
    """A map-style dataset that can also tell what it would have returned."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def content(self, index: int) -> Sample:
        """Return ``self[index]`` without its cost."""


class SleepingWork(Dataset[Sample]):
    """Samples that sleep: work that needs a worker but no core, such as reading from a network.

    Args:
        costs_s: how long each sample sleeps, in seconds; its length is the dataset's.
    """

    def __init__(self, costs_s: list[float]) -> None:
        self.costs_s = costs_s

    def __len__(self) -> int:
        return len(self.costs_s)

    def __getitem__(self, index: int) -> Sample:
        time.sleep(self.costs_s[index])
        return self.costs_s[index], index

    def content(self, index: int) -> Sample:
        return self.costs_s[index], index

    @property
    def total_s(self) -> float:
        """Time that all samples of one epoch sleep, in seconds."""
        return math.fsum(self.costs_s)


class StoredTensors(Dataset[Sample]):
    """Float32 tensors returned from a pool in memory: no cost but the loader's own copies.

    Args:
        shape: shape of one sample.
        pool_size: how many different samples there are; the index wraps around.
        length: samples in one epoch.
    """

    def __init__(self, shape: tuple[int, ...], pool_size: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pool = torch.rand((pool_size, *shape), generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        return self.pool[index % len(self.pool)], index

    content = __getitem__

    @property
    def sample_bytes(self) -> int:
        return self.pool[0].nbytes


class StoredRows(Dataset[Sample]):
    """Rows of a table in memory: the cheapest samples there are, all cost is per sample.

    Args:
        width: numbers in one row.
        length: rows, and samples in one epoch.
        as_floats: whether a row is a list of Python floats; otherwise it is a float32 NumPy vector.
    """

    def __init__(self, width: int, length: int, as_floats: bool) -> None:
        table = np.random.default_rng(0).random((length, width), dtype=np.float32)
        self.rows: Any = table.tolist() if as_floats else table

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.rows[index], index

    content = __getitem__


def straggler_costs_s(
    count: int, usual_s: float, straggler_s: float, share: float, seed: int = 0
) -> list[float]:
    """Give a random ``share`` of ``count`` samples (rounded) the cost ``straggler_s``."""
    costs_s = np.full(count, usual_s)
    stragglers = np.random.default_rng(seed).choice(count, round(share * count), replace=False)
    costs_s[stragglers] = straggler_s
    return [float(cost_s) for cost_s in costs_s]


def lognormal_costs_s(
    count: int, mean_s: float, relative_deviation: float, seed: int = 0
) -> list[float]:
    """Draw log-normal costs, scaled so that the mean of this very draw is ``mean_s``."""
    sigma = math.sqrt(math.log1p(relative_deviation**2))
    costs_s = np.random.default_rng(seed).lognormal(0.0, sigma, count)
    scale = mean_s / costs_s.mean()
    return [float(scale * cost_s) for cost_s in costs_s]


def bimodal_costs_s(count: int, light_s: float, heavy_s: float, every: int) -> list[float]:
    """Make the last sample of every run of ``every`` samples a heavy one."""
    return [heavy_s if index % every == every - 1 else light_s for index in range(count)]
