"""Samples that will probably take long begin before their turn."""

from __future__ import annotations

import math
from typing import Any, Protocol

from minato._core.ledger import Ledger

__all__ = ["CostModel", "Foresight"]

_WORTH_LEARNING_NS = 500_000
"""What is learned of a sample takes the consumer about ten microseconds, so its workers must not be faster."""


class CostModel(Protocol):
    """What foretells costs (the source's predictor)."""

    def predict(self, index: Any) -> float | None:
        """What the sample with this key will probably cost, in ns; None if nobody knows."""

    def observe(self, index: Any, cost_ns: float) -> None:
        """Learn what it cost."""


class Foresight:
    """Marks slow samples when they are published, so that they are under way when their batch is wanted.

    A sample that takes as long as n others begins so much earlier that it ends about when it would if it took as long
    as those: n samples for each worker. It delays the samples that would have been run then by as little; at the end
    of an epoch, nobody is left waiting for one long sample.

    Args:
        model: Foretells costs and learns from what came.
        num_workers: How many run samples side by side.
    """

    def __init__(self, ledger: Ledger, model: CostModel, num_workers: int) -> None:
        self._ledger = ledger
        self._model = model
        self._num_workers = max(num_workers, 1)
        self.mean_ns = 0.0
        """Mean cost of a sample; 0: not known."""

    def resize(self, num_workers: int) -> None:
        """There are so many workers now."""
        self._num_workers = max(num_workers, 1)

    @property
    def _is_worthwhile(self) -> bool:
        return self._ledger.slow_ns > 0 and self.mean_ns >= _WORTH_LEARNING_NS * self._num_workers

    def learn(self, batch: int) -> None:
        """Learn what the samples of a full batch have cost."""
        if self._is_worthwhile:
            for key, cost_ns in self._ledger.costs(batch):
                self._model.observe(key, cost_ns)

    def published(self, first: int, keys: list[Any]) -> None:
        """Mark the slow ones among the samples that were just published at ``first`` and after."""
        if not self._is_worthwhile:
            return
        slow_ns = max(self._ledger.slow_ns, self.mean_ns)
        for position, key in enumerate(keys, first):
            cost_ns = self._model.predict(key)
            if cost_ns is not None and cost_ns > slow_ns:
                others = (cost_ns - self.mean_ns) / self.mean_ns
                self._ledger.start_early(position, math.ceil(others * self._num_workers))
