"""Samples that will probably take long begin before their turn."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from minato._core.ledger import Ledger
from minato._postponed import not_the_end

__all__ = ["CostModel", "Foresight", "Record"]

_WORTH_LEARNING_NS = 400_000
"""What is learned of a sample takes the consumer some microseconds: a hundredth of the workers' time at most."""
_WORTH_PLANNING_NS = 1_000_000
"""The same where plans are drawn and several models are compared, which takes some tens of microseconds."""
_REMEMBERED = 512
"""So many slow or wrongly expected samples count; then what was before them counts by half."""
_FEWEST, _LEAST_PRECISION = 16, 0.3
"""Expectations are not acted on once so many were counted and no more than this share of them came true."""


class CostModel(Protocol):
    """What foretells costs (one of the source's models)."""

    @property
    def model(self) -> str | None:
        """What it goes by: ``index``, ``plan`` or ``size``; None while nothing foretells these costs."""

    def predict(self, index: Any, size: float | None, plans: Sequence[Any]) -> float | None:
        """What the sample with this key will probably cost, in ns; None if nobody knows."""

    def observe(self, index: Any, size: float | None, plans: Sequence[Any], cost_ns: float) -> None:
        """Learn what it cost."""


@dataclass
class Record:
    """How good expectations were: how often a sample that was expected to be slow was slow.

    Attributes:
        slow: Samples that were slow and of which something was known before.
        expected: Samples that were expected to be slow.
        both: Those that were both.
        pairs: What the latest samples were expected to cost and what they cost, in ns.
    """

    slow: float = 0.0
    expected: float = 0.0
    both: float = 0.0
    pairs: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @property
    def hit_rate(self) -> float:
        """Share of the slow samples that were expected to be; 0 while there are none."""
        return self.both / self.slow if self.slow else 0.0

    @property
    def precision(self) -> float:
        """Share of the expected samples that came slow; 0 while there are none."""
        return self.both / self.expected if self.expected else 0.0

    @property
    def is_bad(self) -> bool:
        """Whether expectations are not worth acting on."""
        return self.expected >= _FEWEST and self.precision < _LEAST_PRECISION

    def note(self, expected_ns: float, cost_ns: float, threshold_ns: float) -> None:
        """Count a sample."""
        self.pairs.append((expected_ns, cost_ns))
        expected, slow = expected_ns > threshold_ns, cost_ns > threshold_ns
        self.expected += expected
        self.slow += slow
        self.both += expected and slow
        if self.expected + self.slow > 2 * _REMEMBERED:
            self.expected, self.slow, self.both = self.expected / 2, self.slow / 2, self.both / 2


class Foresight:
    """Marks slow samples when they are published, so that they are under way when their batch is wanted.

    A sample that takes as long as n others begins so much earlier that it ends about when it would if it took as long
    as those: n samples for each worker. It delays the samples that would have been run then by as little; at the end
    of an epoch, nobody is left waiting for one long sample.

    Args:
        model: Foretells costs and learns from what came.
        record: How good that was so far.
        num_workers: How many run samples side by side.
        plans_of: ``(seed, epoch, key, occurrence)`` -> what the transforms of a sample will decide; None: they do not
            plan.
        size_of: ``key`` -> a number that may say something about the cost of a sample; None: there is none.
    """

    def __init__(
        self,
        ledger: Ledger,
        model: CostModel,
        record: Record,
        num_workers: int,
        plans_of: Callable[[int, int, Any, int], Sequence[Any]] | None = None,
        size_of: Callable[[Any], float] | None = None,
    ) -> None:
        self._ledger = ledger
        self._plans_of = plans_of or _no_plans
        self._size_of: Callable[[Any], float | None] = size_of or _no_size
        plain = plans_of is None and size_of is None
        self._worth_ns = _WORTH_LEARNING_NS if plain else _WORTH_PLANNING_NS
        self._model = model
        self._record = record
        self._num_workers = max(num_workers, 1)
        self._pass_index = -1
        self._pass_first = 0
        self.mean_ns = 0.0
        """Mean cost of a sample; 0: not known."""

    def resize(self, num_workers: int) -> None:
        """There are so many workers now."""
        self._num_workers = max(num_workers, 1)

    @property
    def _threshold_ns(self) -> float:
        """From which cost on a sample is worth starting early; 0 while nothing is worth the effort."""
        slow_ns = self._ledger.slow_ns
        if slow_ns == 0 or self.mean_ns < self._worth_ns * self._num_workers:
            return 0.0
        return max(slow_ns, self.mean_ns)

    def learn(self, batch: int) -> None:
        """Learn what the samples of a full batch have cost."""
        threshold_ns = self._threshold_ns
        if threshold_ns == 0:
            return
        model, plans_of, size_of = self._model, self._plans_of, self._size_of
        _, _, _, _, epoch, seed, *_ = self._ledger.describe(batch)
        for position, key, cost_ns, _ in self._ledger.samples(batch):
            (occurrence,) = self._ledger.occurrences(position, 1) or (0,)
            try:
                plans, size = plans_of(seed, epoch, key, occurrence), size_of(key)
            except StopIteration as stop:
                raise not_the_end("the dataset's size_of()", stop) from stop
            expected_ns = model.predict(key, size, plans)
            if expected_ns is not None:
                self._record.note(expected_ns, cost_ns, threshold_ns)
            model.observe(key, size, plans, cost_ns)

    def published(self, batch: int, keys: list[Any]) -> None:
        """Mark the slow ones among the samples of a batch that was just published.

        None begins before all samples of earlier passes: those are wanted sooner.
        """
        _, first, _, _, epoch, seed, _, pickled, pass_index = self._ledger.describe(batch)
        if pass_index != self._pass_index:
            self._pass_index, self._pass_first = pass_index, first
        threshold_ns = self._threshold_ns
        if threshold_ns == 0 or self._record.is_bad or pickled:
            return
        occurrences = self._ledger.occurrences(first, len(keys)) or [0] * len(keys)
        for position, (key, occurrence) in enumerate(zip(keys, occurrences, strict=True), first):
            try:
                plans, size = self._plans_of(seed, epoch, key, occurrence), self._size_of(key)
            except StopIteration as stop:
                raise not_the_end("the dataset's size_of()", stop) from stop
            cost_ns = self._model.predict(key, size, plans)
            if cost_ns is not None and cost_ns > threshold_ns:
                others = (cost_ns - self.mean_ns) / self.mean_ns
                ahead = min(math.ceil(others * self._num_workers), position - self._pass_first)
                self._ledger.start_early(position, ahead)


def _no_plans(seed: int, epoch: int, key: Any, occurrence: int) -> Sequence[Any]:
    return ()


def _no_size(key: Any) -> None:
    return None
