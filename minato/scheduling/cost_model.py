"""The cost of each sample in earlier epochs, and the early start of slow samples.

An estimate is a hint: it only decides which sample a worker claims next.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from minato._core import ConsumerLedger
from minato._core.codes import NO_INTEGER
from minato._support.values import integer_of

__all__ = ["CostModel", "EarlyStart", "integers_of"]

_NEWEST = 0.5
"""Weight of a sample's latest cost against that of all earlier ones."""
_MAX_INDICES = 1 << 25
"""Larger indices are not recorded: 128 MiB of costs."""
_INT64 = 1 << 63
_MIN_MEAN_NS = 400_000
"""Recording a sample takes the training process some microseconds: at most a hundredth of the workers' time."""


def integers_of(indices: Sequence[object] | np.ndarray | torch.Tensor) -> list[int] | None:
    """The integer that each index equals, for costs and reports: ``NO_INTEGER`` for one without, None for all without.

    The dataset gets the index itself.
    """
    values = indices.tolist() if isinstance(indices, (np.ndarray, torch.Tensor)) else indices
    found = [integer_of(index) for index in values]
    if len(found) != len(indices) or all(number is None for number in found):
        return None
    return [
        NO_INTEGER if number is None or not -_INT64 <= number < _INT64 else number
        for number in found
    ]


class CostModel:
    """The cost of each index, averaged over the epochs so far; 4 bytes for each index up to the largest one seen."""

    def __init__(self) -> None:
        self._costs = array("f")  # 0: not seen; single elements are faster than NumPy's

    def predict(self, index: object) -> float | None:
        """The cost of a sample in ns; None if it is unknown."""
        number = integer_of(index)
        if number is not None and 0 <= number < len(self._costs):
            return self._costs[number] or None
        return None

    def observe(self, index: object, cost_ns: float) -> None:
        """Record the cost of a sample; only indices that are integers from 0 to 2**25 count."""
        number = integer_of(index)
        if number is None or not 0 <= number < _MAX_INDICES:
            return
        if number >= len(self._costs):
            # Grow by half: ten million indices in ascending order cost a few dozen copies.
            length = min(_MAX_INDICES, max(1024, number + 1 + number // 2))
            self._costs.frombytes(bytes(self._costs.itemsize * (length - len(self._costs))))
        known = self._costs[number]
        self._costs[number] = cost_ns if known == 0 else known + _NEWEST * (cost_ns - known)

    @property
    def nbytes(self) -> int:
        """Bytes that the costs take."""
        return self._costs.itemsize * len(self._costs)


class EarlyStart:
    """Starts samples that were slow in earlier epochs early, so that no epoch ends with one of them.

    A sample that costs as much as n others starts earlier, by the number of samples that all workers run in that time.
    So it ends about when n others would have ended in its place.

    Args:
        costs: Costs in earlier epochs; this class adds those of this engine.
        num_workers: Number of samples that run in parallel.

    Attributes:
        mean_ns: Mean cost of a sample; 0 while it is unknown.
    """

    def __init__(self, *, ledger: ConsumerLedger, costs: CostModel, num_workers: int) -> None:
        self._ledger = ledger
        self._costs = costs
        self._num_workers = max(num_workers, 1)
        self._epoch_slot = -1
        self._epoch_start = 0
        self.mean_ns = 0.0

    def resize(self, num_workers: int) -> None:
        """Change the number of workers."""
        self._num_workers = max(num_workers, 1)

    @property
    def _threshold_ns(self) -> float:
        """Samples that cost more start early; 0: none do."""
        slow_ns = self._ledger.slow_ns
        if slow_ns == 0 or self.mean_ns < _MIN_MEAN_NS * self._num_workers:
            return 0.0
        return max(slow_ns, self.mean_ns)

    def learn(self, batch: int) -> None:
        """Record the costs of a full batch."""
        if self._threshold_ns:
            for index, cost_ns in self._ledger.costs(batch):
                self._costs.observe(index, cost_ns)

    def hint(self, batch: int, indices: list[object]) -> None:
        """Let the slow samples of a newly opened batch start early, but none before its own epoch.

        Samples of earlier epochs are needed sooner.
        """
        record = self._ledger.describe(batch)
        if record.epoch_slot != self._epoch_slot:
            self._epoch_slot, self._epoch_start = record.epoch_slot, record.first
        threshold_ns = self._threshold_ns
        if threshold_ns == 0:
            return
        for position, index in enumerate(indices, record.first):
            cost_ns = self._costs.predict(index)
            if cost_ns is not None and cost_ns > threshold_ns:
                others = (cost_ns - self.mean_ns) / self.mean_ns
                ahead = min(math.ceil(others * self._num_workers), position - self._epoch_start)
                self._ledger.start_early(position, ahead)
