"""How many batches may be in flight."""

from __future__ import annotations

import warnings

from minato.errors import MinatoWarning

__all__ = ["PrefetchWindow"]

_DEPTH = 2
"""Batches per worker to start with, as torch's default ``prefetch_factor``."""
_REFILL_SHARE = 8
"""What part of the window may be empty before batches are opened again."""

_sharing: set[PrefetchWindow] = set()
"""Windows in use that divide a budget among them."""


class PrefetchWindow:
    """Bounds the batches in flight: by a fixed number if one is asked for, by their bytes otherwise.

    Unless fixed, the window starts at two batches per worker and grows when the consumer waits while every sample in
    flight is taken: that is when a straggler at the head keeps finished batches back.

    Args:
        num_workers: Workers that need something to do.
        fixed: Number of batches, or None.
        budget_bytes: What the batches in flight may take together.
        most: Number of batches that even a growing or a fixed window never exceeds, or None.
        at_once: Number of batches whose samples the workers run at once; a window that is not fixed starts with so many
            besides one per worker, at least.
        slow_start: Deliveries for each batch that the window grows by, from one on; None: it begins as it is.
        shares: Whether ``budget_bytes`` is divided among all windows of this process that share theirs, until ``end``.
    """

    def __init__(
        self,
        num_workers: int,
        fixed: int | None,
        budget_bytes: int,
        most: int | None = None,
        at_once: int = 0,
        slow_start: int | None = None,
        shares: bool = False,
    ) -> None:
        limit = max(_DEPTH * max(num_workers, 1), num_workers + at_once) if fixed is None else fixed
        self.limit = limit if most is None else min(limit, most)
        self._budget_bytes = budget_bytes
        self._shares = shares
        if shares:
            _sharing.add(self)
        self._most = most
        self._step = max(num_workers, 1)
        self._fixed = fixed is not None
        self._batch_bytes = 0.0
        self._warned = False
        self._slow_start = slow_start
        self._delivered = 0

    @property
    def budget_bytes(self) -> int:
        """What the batches in flight may take together now."""
        return self._budget_bytes // max(len(_sharing), 1) if self._shares else self._budget_bytes

    def end(self) -> None:
        """Open no more batches: the budget is for the others."""
        _sharing.discard(self)

    @property
    def batch_bytes(self) -> float:
        """What a batch takes, as far as is known: never less than those of late."""
        return self._batch_bytes

    @property
    def held_by_budget(self) -> bool:
        """Whether the budget in bytes keeps the window from growing."""
        return not self._fixed and not self._fits(self.limit + 1)

    def has_room(self, in_flight: int) -> bool:
        """Whether another batch may be opened; the first always may."""
        if in_flight >= self.limit:
            return False
        return not in_flight or (self._has_started(in_flight) and self._fits(in_flight + 1))

    def is_low(self, in_flight: int) -> bool:
        """Whether batches are to be opened again. Several at once take a third of the time that they take one by one.

        What one needs in the processor's caches is there for the next, while training displaces it in between.
        """
        return self._fixed or in_flight <= self.limit - self.limit // _REFILL_SHARE

    def grow(self) -> bool:
        """Allow more batches, because workers have nothing to do while the consumer waits."""
        if self._fixed or self.limit == self._most or not self._fits(self.limit + 1):
            return False
        if not self._has_started(self.limit):
            return False
        self.limit += self._step
        if self._most is not None:
            self.limit = min(self.limit, self._most)
        return True

    def resize(self, num_workers: int) -> None:
        """There are so many workers now: each needs its batches, but what was allowed stays allowed."""
        self._step = max(num_workers, 1)
        if not self._fixed:
            self.limit = max(self.limit, _DEPTH * self._step)
            if self._most is not None:
                self.limit = min(self.limit, self._most)

    def shrink(self) -> bool:
        """Allow half as many batches, and never more again, because memory ran out; False if it cannot be less."""
        if self._fixed or self.limit <= 1:
            return False
        self.limit = self._most = self.limit // 2
        return True

    def observe(self, batch_bytes: int) -> None:
        """Learn the size of a delivered batch."""
        self._delivered += 1
        if batch_bytes > self.budget_bytes and not self._warned and not self._fixed:
            self._warned = True
            warnings.warn(
                f"one batch takes {batch_bytes} bytes, more than memory_budget="
                f"{self.budget_bytes}: batches are loaded one at a time. Raise memory_budget to at "
                "least twice the size of a batch.",
                MinatoWarning,
                stacklevel=2,
            )
        self._batch_bytes = max(float(batch_bytes), 0.9 * self._batch_bytes)

    def _has_started(self, in_flight: int) -> bool:
        """Whether the slow start allows more than so many."""
        return self._slow_start is None or in_flight <= self._delivered // self._slow_start

    def _fits(self, batches: int) -> bool:
        return self._fixed or batches * self._batch_bytes <= self.budget_bytes
