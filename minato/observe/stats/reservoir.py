"""Some of the samples that were delivered, drawn at random, in a bounded amount of memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Arrived", "Reservoir"]

_KEPT = 4096
_PER_BATCH = 8


class Arrived(NamedTuple):
    """A sample that was delivered.

    Attributes:
        key: What the dataset was asked for.
        lag: By how many batches it came later than in the sampler's order; negative: earlier.
        cost_ns: What it cost.
        nbytes: What it took in shared memory; 0 if nobody knows, which is so where all have the same layout.
    """

    key: int
    lag: int
    cost_ns: int
    nbytes: int


class Reservoir:
    """As likely to hold one delivered sample as another, where batches have the same size (Vitter's algorithm R).

    Attributes:
        rows: What it holds.
    """

    def __init__(self) -> None:
        self.rows: list[Arrived] = []
        self._offered = 0
        self._random = random.Random(0)  # the program's own generators are none of its business

    def offer(
        self,
        samples: Callable[[], Sequence[tuple[int, int, int, int]]],
        lag_of: Callable[[int], int],
    ) -> None:
        """Take some samples of a batch, or none.

        Args:
            samples: Gives ``(position, key, cost in ns, bytes)`` of each; asked only if one is taken.
            lag_of: Tells by how many batches the sample at a position is late.
        """
        slots = self._slots()
        if not slots:
            return
        there = samples()
        # None twice: a small batch must not count for more than it holds.
        chosen = self._random.sample(there, min(len(slots), len(there)))
        for slot, (position, key, cost_ns, nbytes) in zip(slots, chosen, strict=False):
            row = Arrived(key, lag_of(position), cost_ns, nbytes)
            if slot < len(self.rows):
                self.rows[slot] = row
            else:
                self.rows.append(row)

    def _slots(self) -> list[int]:
        """Where samples of the next batch go."""
        taken = []
        for _ in range(_PER_BATCH):
            self._offered += 1
            slot = self._random.randrange(self._offered) if self._offered > _KEPT else _KEPT
            if slot < _KEPT or self._offered <= _KEPT:
                taken.append(slot)
        return taken
