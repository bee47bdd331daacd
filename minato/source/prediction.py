"""What a sample will probably cost, so that dear ones can be started first.

A prediction is a hint: it decides the order of execution and nothing else.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from minato.stats.ranks import rank_correlation

__all__ = [
    "CostByIndex",
    "CostByPlan",
    "CostBySize",
    "Predictor",
    "Quality",
    "quality_of",
]

_NEWEST = 0.5
"""Weight of a sample's latest cost against what was known of it."""
_MOST_INDICES = 1 << 25
"""Costs are kept for so many samples at most, in 4 bytes each."""
_MOST_DECISIONS = 256
"""Different decisions of one transform whose cost is kept apart."""
_SETTLED = 20.0
"""A decision that came so often is learned no more slowly later."""
_FORGETTING = 0.999
"""Weight of what was known of sizes when a sample is added: the last thousand count."""
_REMEMBERED = 512
"""Predictions that are compared with what came."""
_FEWEST = 16
"""So few of them say nothing."""
_USEFUL = 0.2
"""Rank correlation below which nothing is predicted."""


class Model(Protocol):
    """A way to foretell costs."""

    def predict(self, index: Any, size: float | None, plans: Sequence[Any]) -> float | None:
        """The cost in ns, None if nothing is known."""

    def observe(
        self,
        index: Any,
        size: float | None,
        plans: Sequence[Any],
        cost_ns: float,
    ) -> None:
        """Learn what a sample has cost."""


class CostByIndex:
    """What the same sample cost in earlier epochs: a moving average, 4 bytes for each index seen."""

    model = "index"

    def __init__(self) -> None:
        self._costs = array("f")  # 0: not seen; one by one, an array is quicker than NumPy's

    def predict(self, index: Any, size: float | None, plans: Sequence[Any]) -> float | None:
        """The average cost of this index."""
        if isinstance(index, int) and 0 <= index < len(self._costs):
            return self._costs[index] or None
        return None

    def observe(
        self,
        index: Any,
        size: float | None,
        plans: Sequence[Any],
        cost_ns: float,
    ) -> None:
        """Remember the cost of this index; keys that are no small integers are not remembered."""
        if not isinstance(index, int) or not 0 <= index < _MOST_INDICES:
            return
        if index >= len(self._costs):
            # By halves: 10 million indices in ascending order cost a few dozen copies.
            length = min(_MOST_INDICES, max(1024, index + 1 + index // 2))
            self._costs.frombytes(bytes(self._costs.itemsize * (length - len(self._costs))))
        known = self._costs[index]
        self._costs[index] = cost_ns if known == 0 else known + _NEWEST * (cost_ns - known)

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered."""
        return self._costs.itemsize * len(self._costs)


class CostBySize:
    """Cost as a straight line over size, fitted to the latest samples."""

    def __init__(self) -> None:
        self._weight = self._size = self._cost = self._size_size = self._size_cost = 0.0

    def predict(self, index: Any, size: float | None, plans: Sequence[Any]) -> float | None:
        """The cost on the line, not below 0."""
        if size is None or self._weight < _FEWEST:
            return None
        mean_size, mean_cost = self._size / self._weight, self._cost / self._weight
        variance = self._size_size / self._weight - mean_size**2
        if variance <= 1e-12 * mean_size**2:
            return None
        slope = (self._size_cost / self._weight - mean_size * mean_cost) / variance
        return max(mean_cost + slope * (size - mean_size), 0.0)

    def observe(
        self,
        index: Any,
        size: float | None,
        plans: Sequence[Any],
        cost_ns: float,
    ) -> None:
        """Add a point."""
        if size is None:
            return
        self._weight = _FORGETTING * self._weight + 1.0
        self._size = _FORGETTING * self._size + size
        self._cost = _FORGETTING * self._cost + cost_ns
        self._size_size = _FORGETTING * self._size_size + size * size
        self._size_cost = _FORGETTING * self._size_cost + size * cost_ns


class CostByPlan:
    """A mean, and what each decision of each transform adds to it, or takes away.

    Decisions that are equal count as alike; those that cannot be compared by equality and hash (arrays) count all as
    one. What a transform adds is learned from what samples cost as a whole, beyond what was expected of them: time that
    was measured for each transform would have to travel with each sample.
    """

    def __init__(self) -> None:
        self._count, self._mean_ns = 0.0, 0.0
        self._added: list[dict[Hashable, tuple[float, float]]] = []

    def predict(self, index: Any, size: float | None, plans: Sequence[Any]) -> float | None:
        """The sum; a decision that was never seen adds nothing."""
        if not self._count or all(plan is None for plan in plans):
            return None
        total_ns = self._mean_ns
        for added, plan in zip(self._added, plans, strict=False):
            total_ns += added.get(_comparable(plan), (0.0, 0.0))[1]
        return max(total_ns, 0.0)

    def observe(
        self,
        index: Any,
        size: float | None,
        plans: Sequence[Any],
        cost_ns: float,
    ) -> None:
        """Share out what the sample cost beyond what was expected."""
        if all(plan is None for plan in plans):
            return
        while len(self._added) < len(plans):
            self._added.append({})
        known = [
            (added, _comparable(plan))
            for added, plan in zip(self._added, plans, strict=False)
            if plan is not None
        ]
        beyond_ns = cost_ns - self._mean_ns
        beyond_ns -= sum(added.get(key, (0.0, 0.0))[1] for added, key in known)
        self._count = min(self._count + 1.0, float(_REMEMBERED))
        self._mean_ns += (cost_ns - self._mean_ns) / self._count
        for added, key in known:
            count, mean_ns = added.get(key, (0.0, 0.0))
            if not count and len(added) >= _MOST_DECISIONS:
                continue
            count = min(count + 1.0, _SETTLED)
            added[key] = count, mean_ns + beyond_ns / (count * len(known))


def _comparable(plan: Any) -> Hashable:
    kind = type(plan).__qualname__
    # A float is hardly ever drawn twice.
    if isinstance(plan, float) or not isinstance(plan, Hashable):
        return kind
    try:
        hash(plan)
    except TypeError:  # a tuple with a list in it, say
        return kind
    return plan


class Quality(NamedTuple):
    """How good the latest predictions were.

    Attributes:
        samples: How many there are.
        rank_correlation: Spearman's, from -1 to 1: whether dearer samples were predicted to be dearer.
        hit_rate: Share of the slow samples that were predicted to be slow.
        precision: Share of those predicted to be slow that were.
    """

    samples: int = 0
    rank_correlation: float = 0.0
    hit_rate: float = 0.0
    precision: float = 0.0


def quality_of(pairs: Collection[tuple[float, float]], threshold_ns: float) -> Quality:
    """How good predictions were, from pairs of what was foretold and what came, in ns.

    Args:
        threshold_ns: Cost above which a sample is slow; 0 leaves the rates at 0.
    """
    if not pairs:
        return Quality()
    foretold, came = np.array(pairs).T
    slow, flagged = came > threshold_ns, foretold > threshold_ns
    hits = float(np.sum(slow & flagged)) if threshold_ns > 0 else 0.0
    return Quality(
        len(pairs),
        rank_correlation(foretold, came),
        hits / max(float(np.sum(slow)), 1.0),
        hits / max(float(np.sum(flagged)), 1.0),
    )


class Predictor:
    """Foretells costs by whichever model foretold the latest samples best.

    Args:
        models: By name.
    """

    def __init__(self, models: Mapping[str, Model] | None = None) -> None:
        self._models = models or {
            "plan": CostByPlan(),
            "index": CostByIndex(),
            "size": CostBySize(),
        }
        self._pairs: dict[str, deque[tuple[float, float]]] = {
            name: deque(maxlen=_REMEMBERED) for name in self._models
        }
        self._since_choice = 0
        self.model: str | None = None
        """Name of the model in use; None: nothing foretells these costs."""

    def predict(
        self, index: Any, size: float | None = None, plans: Sequence[Any] = ()
    ) -> float | None:
        """What the sample will probably cost, in ns; None if nobody knows.

        Args:
            index: Its key in the dataset.
            size: A number that may say something about the cost (bytes, pixels), if there is one.
            plans: What each transform has planned, None for those that do not plan.
        """
        if self.model is None:
            return None
        return self._models[self.model].predict(index, size, plans)

    def observe(self, index: Any, size: float | None, plans: Sequence[Any], cost_ns: float) -> None:
        """Learn what a sample cost, and how well each model would have foretold it."""
        for name, model in self._models.items():
            foretold_ns = model.predict(index, size, plans)
            if foretold_ns is not None:
                self._pairs[name].append((foretold_ns, float(cost_ns)))
            model.observe(index, size, plans, cost_ns)
        self._since_choice += 1
        if self._since_choice >= _FEWEST:
            self._since_choice = 0
            self._choose()

    def quality(self, threshold_ns: float = 0.0) -> Quality:
        """How good the model in use was at its latest samples.

        Args:
            threshold_ns: Cost above which a sample is slow; 0 leaves the rates at 0.
        """
        return quality_of(() if self.model is None else self._pairs[self.model], threshold_ns)

    def _choose(self) -> None:
        """Use the model with the best rank correlation, if any is useful."""
        best, self.model = _USEFUL, None
        for name, pairs in self._pairs.items():
            if len(pairs) >= _FEWEST:
                foretold, came = np.array(pairs).T
                correlation = rank_correlation(foretold, came)
                if correlation > best:
                    best, self.model = correlation, name
