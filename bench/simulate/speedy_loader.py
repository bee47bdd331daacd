"""SpeedyLoader in virtual time: a pool of workers for samples that will be slow and one for the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from bench.simulate.clock import Clock
from bench.simulate.loader import Costs, Shop

_SHORT, _LONG = 0, 1


class SpeedyLoader(Shop):
    """Two queues of samples with a pool each; whole batches are handed out as they are complete.

    The prediction is perfect: a sample is long if it costs more than the mean. Each pool has the part of the workers
    that its samples have of all the work.

    Args:
        cap: Batches that are in flight at most, those that wait for the consumer included.
    """

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        batch_size: int,
        workers: int,
        batches: int,
        cap: int = 20,
    ) -> None:
        super().__init__(clock)
        self._totals_s = costs.totals_s
        self._batch_size = batch_size
        self._batches = batches
        self._cap = cap
        totals_s = np.array(costs.totals_s)
        self._is_long = (totals_s > costs.mean_s).tolist()
        share = float(totals_s[self._is_long].sum() / totals_s.sum())
        long_workers = min(max(round(share * workers), 1), workers - 1)
        self._idle = [workers - long_workers, long_workers]
        self._queues: tuple[deque[int], deque[int]] = (deque(), deque())
        self._opened = self._handed_out = 0
        self._missing: dict[int, int] = {}
        self._complete: deque[int] = deque()

    def start(self) -> None:
        """Open the first batches and let the workers begin."""
        self._refill()

    def ask(self, receive: Callable[[], None]) -> None:
        """The consumer wants a batch."""
        self.asked(receive)
        self._serve()

    def _refill(self) -> None:
        size = self._batch_size
        while self._opened < self._batches and self._opened - self._handed_out < self._cap:
            self._missing[self._opened] = size
            for position in range(self._opened * size, (self._opened + 1) * size):
                queue = self._is_long[position % len(self._totals_s)]
                self._queues[queue].append(position)
            self._opened += 1
        self._assign()

    def _assign(self) -> None:
        # Idle workers of the long pool take short samples, but not the other way round.
        for pool, queue in ((_SHORT, _SHORT), (_LONG, _LONG), (_LONG, _SHORT)):
            while self._idle[pool] and self._queues[queue]:
                self._idle[pool] -= 1
                position = self._queues[queue].popleft()
                work_s = self._totals_s[position % len(self._totals_s)]
                self.record.work_s += work_s
                batch = position // self._batch_size
                self.clock.after(work_s, self._finished, pool, batch)

    def _finished(self, pool: int, batch: int) -> None:
        self._idle[pool] += 1
        self._missing[batch] -= 1
        if not self._missing[batch]:
            del self._missing[batch]
            self._complete.append(batch)
            self._serve()
        self._assign()

    def _serve(self) -> None:
        if self.waiting and self._complete:
            batch = self._complete.popleft()
            lag = self._handed_out - batch
            self._handed_out += 1
            self._refill()
            self.hand_out(lag)
