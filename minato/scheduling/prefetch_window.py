"""How many batches may be in flight."""

from __future__ import annotations

import weakref

from minato.errors import log, warn

_DEPTH = 2  # batches per worker at the start, as torch's default ``prefetch_factor``
_REFILL_SHARE, _MOST_REFILLED = 4, 16
"""The window is low when more than a quarter of it is empty, or more than this number of batches."""

_RUNS, _RUN_BYTES = 64, 4 << 20
"""Number of batches, and their memory, up to which the window grows only so that they are opened in larger runs."""

_sharing: weakref.WeakSet[PrefetchWindow] = weakref.WeakSet()
"""Windows in use that divide a budget among them; that of an engine which could not be made is gone with it."""


class PrefetchWindow:
    """Bounds the batches in flight: by a number that is ``fixed``, by their bytes otherwise.

    A window that is not fixed starts at two batches per worker. It grows when the training loop waits while every
    sample in flight is claimed: then a slow sample of the oldest batch holds back complete ones. It also grows where
    the loop uses up small batches so fast that opening them, and waking workers for them, would take most of the time.

    Args:
        budget_bytes: Limit of the batches in flight together, which all windows of this process that have ``shares``
            divide among them until ``release_budget``.
        max_batches: Number of batches that no window exceeds, or None.
        concurrent_batches: Batches whose samples the workers run concurrently. A window that is not fixed starts with
            at least this number and one per worker.
        slow_start: Returned batches per batch by which the window grows, from one on; None: it starts at full size.

    Attributes:
        limit: Largest number of batches in flight now, where the budget and the slow start allow it.
        batch_bytes: Estimated size of a batch: at least that of the latest, and falling slowly after a larger one.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        fixed: int | None,
        budget_bytes: int,
        max_batches: int | None = None,
        concurrent_batches: int = 0,
        slow_start: int | None = None,
        shares: bool = False,
    ) -> None:
        limit = fixed
        if limit is None:
            limit = max(_DEPTH * max(num_workers, 1), num_workers + concurrent_batches)
        self._max_batches = max_batches
        self.limit = self._bounded(limit)
        self._budget_bytes, self._shares = budget_bytes, shares
        if shares:
            _sharing.add(self)
        self._step = max(num_workers, 1)
        self._fixed = fixed is not None
        self.batch_bytes = 0.0
        self._may_warn = not self._fixed
        self._slow_start = slow_start
        self._returned = 0

    @property
    def budget_bytes(self) -> int:
        """Limit of the batches in flight together, now."""
        return self._budget_bytes // max(len(_sharing), 1) if self._shares else self._budget_bytes

    def release_budget(self) -> None:
        """Leave the budget to the other windows that share it; this one opens no more batches."""
        _sharing.discard(self)

    @property
    def held_by_budget(self) -> bool:
        """Whether the budget in bytes keeps the window from growing."""
        return not self._fixed and not self._fits(self.limit + 1)

    @property
    def most(self) -> int:
        """How many batches may be in flight now: at least one, if ``limit`` is not 0."""
        most = self.limit
        if not self._fixed and self.batch_bytes:
            most = min(most, int(self.budget_bytes // self.batch_bytes))
        return min(max(min(most, self._started), 1), self.limit)

    def is_low(self, in_flight: int) -> bool:
        """Whether batches are to be opened now. Several together take a third of the time that they take one by one.

        The first brings code and data into the processor's caches for the others; training displaces them in between.
        """
        empty = min(self.limit // _REFILL_SHARE, _MOST_REFILLED)
        return self._fixed or in_flight <= self.limit - empty

    def grow(self) -> bool:
        """Allow more batches, because workers idle while the training loop waits; False if the limit stays."""
        if self._fixed or self.limit == self._max_batches or not self._fits(self.limit + 1):
            return False
        if self.limit >= self._started:
            return False
        self.limit = self._bounded(self.limit + self._step)
        log("the prefetch window grows to %d batches", self.limit)
        return True

    def widen(self) -> None:
        """Allow more batches if they are small, because a few are used up as soon as they are opened."""
        if self.limit < _RUNS and 0 < (self.limit + self._step) * self.batch_bytes <= _RUN_BYTES:
            self.grow()

    def resize(self, num_workers: int) -> None:
        """Change the number of active workers. The limit never falls."""
        self._step = max(num_workers, 1)
        if not self._fixed:
            self.limit = self._bounded(max(self.limit, _DEPTH * self._step))

    def shrink(self) -> bool:
        """Halve the number of batches for good, because memory ran out; False if it cannot fall."""
        if self._fixed or self.most <= 1:
            return False
        self.limit = self._max_batches = self.most // 2
        return True

    def observe(self, batch_bytes: int) -> None:
        """Record the size of a returned batch."""
        self._returned += 1
        if self._may_warn and batch_bytes > self.budget_bytes:
            self._may_warn = False
            warn(
                f"one batch takes {batch_bytes} bytes, more than memory_budget={self.budget_bytes}: batches are loaded "
                "one at a time. Raise memory_budget to at least twice the size of a batch."
            )
        self.batch_bytes = max(float(batch_bytes), 0.9 * self.batch_bytes)

    def expect(self, batch_bytes: int) -> None:
        """Use the size of a batch in flight as the estimate: no batch has been returned yet."""
        self.batch_bytes = max(float(batch_bytes), self.batch_bytes)

    def _bounded(self, limit: int) -> int:
        return limit if self._max_batches is None else min(limit, self._max_batches)

    @property
    def _started(self) -> int:
        """How many batches the slow start allows; one more than the limit where there is none."""
        return self._returned // self._slow_start + 1 if self._slow_start else self.limit + 1

    def _fits(self, batches: int) -> bool:
        return self._fixed or batches * self.batch_bytes <= self.budget_bytes
