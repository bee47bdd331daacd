"""Which batch comes next, and which worker it is for: each class holds the rules of its order, or of its assignment."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from minato._support.items import item_of
from minato.sampling.resume import DatasetStates

_Batch = TypeVar("_Batch")


@dataclass(frozen=True)
class Order:
    """The oldest open batch comes next, and each sample keeps its place, or may be late by ``max_lag`` batches."""

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
        return batches[0] if batches and is_ready(batches[0]) else None

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


_ORDERS: dict[str, type[Order]] = {
    "strict": StrictOrder,
    "batch": BatchOrder,
    "arrival": ArrivalOrder,
    "fast_first": FastFirstOrder,
}


def make_order(name: str, max_lag: int) -> Order:
    """Return the order of an option ``order=``."""
    return _ORDERS[name](max_lag)


# ---- which worker ----


class Assignment:
    """Decides which worker runs the samples of a batch: its number + 1, or 0 for any, the first that is free."""

    runs_cancelled = False
    """Whether cancelled batches still run to their end, because the content of later ones depends on it."""

    def reset(self) -> None:
        """Begin an epoch."""

    def choose(self, indices: Sequence[int], held: Callable[[int], int]) -> int | None:
        """The owner of the next batch, by its indices and the open ones of an owner; None: no worker can take it."""
        return 0

    def opened(self, owner: int) -> None:
        """Record that the next batch was opened for this owner."""

    def returns(self, owner: int) -> Callable[[], None] | None:
        """The function that records that a batch of this owner was returned, if there is something to record."""
        return None


@dataclass(frozen=True)
class Hosts(Assignment):
    """A batch of an iterable dataset is for the host of its reader: the i-th of a rank, i modulo ``count``.

    With ``count`` 0 that is none of the workers, with a number after theirs. ``ranks`` share the readers.
    """

    runs_cancelled = True

    count: int
    num_workers: int
    ranks: int = 1

    def choose(self, indices: Sequence[int], held: Callable[[int], int]) -> int | None:
        place = item_of(indices[0]).reader // self.ranks
        return (place % self.count if self.count else self.num_workers) + 1


@dataclass(eq=False)
class RoundRobin(Assignment):
    """torch's assignment: batch k is for worker k mod n.

    If batches are not returned in order, a worker holds at most its share of ``capacity``, of all batches together. The
    states of the workers' datasets decide where an epoch begins; without these, at worker 0.
    """

    runs_cancelled = True

    num_workers: int
    in_order: bool
    capacity: int
    dataset_states: DatasetStates | None = None
    _next: int = field(default=0, init=False)

    def reset(self) -> None:
        # At worker 0, or where the resumed state was taken.
        self._next = 0
        if self.dataset_states is not None:
            self.dataset_states.begin()
            self._next = self.dataset_states.next_worker

    def choose(self, indices: Sequence[int], held: Callable[[int], int]) -> int | None:
        for i in range(self.num_workers):
            worker = (self._next + i) % self.num_workers
            if self.in_order or held(worker + 1) < self.capacity // self.num_workers:
                return worker + 1
        return None

    def opened(self, owner: int) -> None:
        self._next = owner % self.num_workers

    def returns(self, owner: int) -> Callable[[], None] | None:
        states = self.dataset_states
        return None if states is None else functools.partial(states.returned, owner - 1)
