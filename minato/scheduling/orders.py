"""The orders of batches: each class holds the rules of its order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

__all__ = ["ArrivalOrder", "BatchOrder", "FastFirstOrder", "Order", "StrictOrder", "make_order"]

_Batch = TypeVar("_Batch")


@dataclass(frozen=True)
class Order:
    """The rules that orders share: the oldest open batch comes next, and each sample keeps its place.

    Attributes:
        max_lag: Number of batches by which a sample may be late; only used where samples do not keep their places.
    """

    max_lag: int = 0

    in_order: ClassVar[bool] = False
    """Whether batches come in the order of the sampler, with the samples that the sampler put in them."""
    slow_to_newest: ClassVar[bool] = False
    """Whether a slow sample takes a place in the newest open batch."""

    @property
    def keeps_places(self) -> bool:
        """Whether each sample has its own place, in the batch that the sampler put it in.

        If so, the place of a skipped sample stays empty, and the batch is collated without it. If not, a sample takes
        the next free place, and later samples fill the places of skipped ones.
        """
        return True

    def next_ready(
        self, batches: deque[_Batch], is_ready: Callable[[_Batch], bool]
    ) -> _Batch | None:
        """Return the batch that comes next, of the open ones from old to new; None if it is not complete."""
        if batches and is_ready(batches[0]):
            return batches[0]
        return None

    def upcoming(
        self, batches: deque[_Batch], is_ready: Callable[[_Batch], bool], limit: int
    ) -> list[_Batch]:
        """Return at most ``limit`` complete batches that come next, and make sure that no other comes before them."""
        return [batch for batch in itertools.islice(batches, limit) if is_ready(batch)]


class StrictOrder(Order):
    """``"strict"``: batches as torch's, in torch's order."""

    in_order = True


class BatchOrder(Order):
    """``"batch"``: batches as torch's, each as soon as it is complete."""

    def next_ready(
        self, batches: deque[_Batch], is_ready: Callable[[_Batch], bool]
    ) -> _Batch | None:
        """Return the oldest complete batch."""
        return next(filter(is_ready, batches), None)

    def upcoming(
        self, batches: deque[_Batch], is_ready: Callable[[_Batch], bool], limit: int
    ) -> list[_Batch]:
        """Return the oldest complete batches, and move them to the front, so that they stay the next ones."""
        found = list(itertools.islice(filter(is_ready, batches), limit))
        for batch in reversed(found):
            batches.remove(batch)
            batches.appendleft(batch)
        return found


class ArrivalOrder(Order):
    """``"arrival"``: samples take the next free place in the oldest open batch, whichever is ready first.

    The oldest batch comes next: if another one overtook it, ``max_lag`` would not hold. A slow sample may be deferred,
    by at most ``max_lag`` batches; after that it keeps its place. At most ``max_lag`` batches are open.
    """

    @property
    def keeps_places(self) -> bool:
        """True if at most one batch is open: no sample can be late there."""
        return self.max_lag <= 1


class FastFirstOrder(ArrivalOrder):
    """``"fast_first"``: as ``"arrival"``, but slow samples take places in the newest open batch.

    While the training loop waits for a batch, they fill the oldest one instead.
    """

    slow_to_newest = True


def make_order(name: str, max_lag: int) -> Order:
    """Return the order of an option ``order=``."""
    match name:
        case "strict":
            return StrictOrder()
        case "batch":
            return BatchOrder()
        case "arrival":
            return ArrivalOrder(max_lag)
        case "fast_first":
            return FastFirstOrder(max_lag)
    raise ValueError(f"order must be 'strict', 'batch', 'arrival' or 'fast_first', not {name!r}")
