"""Algorithm 1 of the MinatoLoader paper as it is printed, for comparison."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.simulate.clock import Clock
from bench.simulate.loader import Costs, Shop

_QUEUE = 100
_BATCH_QUEUE = 2


class PrintedLoader(Shop):
    """Fast workers that give up at the timeout, slow workers that go on, a builder that takes fast samples first.

    Args:
        slow_workers: How many of the workers do nothing but go on with slow samples.
        repeats: As printed: the transform during which time was up is run again; if not, the next one is.
        percentile: Of all costs; the timeout. The profile is taken to be known.
    """

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        batch_size: int,
        workers: int,
        batches: int,
        slow_workers: int,
        repeats: bool = True,
        percentile: float = 0.75,
    ) -> None:
        super().__init__(clock)
        self._costs = costs
        self._batch_size = batch_size
        self._samples = batches * batch_size
        self._repeats = repeats
        self._timeout_s = float(np.quantile(costs.totals_s, percentile))
        self._idle_fast = workers - slow_workers
        self._idle_slow = slow_workers
        self._begun = 0
        self._fast: deque[int] = deque()
        self._slow: deque[int] = deque()
        self._temp: deque[tuple[int, int]] = deque()
        # Workers whose queue is full, with what they want to put there.
        self._blocked: dict[int, deque[Any]] = {id(q): deque() for q in self._queues()}
        self._filling: list[int] = []
        self._ready: deque[int] = deque()  # lag of each batch
        self._built = 0

    def _queues(self) -> tuple[deque[Any], ...]:
        return self._fast, self._slow, self._temp

    def start(self) -> None:
        """Let the workers begin."""
        self._pump()

    def ask(self, receive: Callable[[], None]) -> None:
        """The consumer wants a batch."""
        self.asked(receive)
        self._pump()

    def _put(self, queue: deque[Any], item: Any, kind: str) -> None:
        """A worker of this kind puts something into a queue, and is free once it fits."""
        if len(queue) < _QUEUE:
            queue.append(item)
            self._free(kind)
        else:
            self._blocked[id(queue)].append((item, kind))

    def _free(self, kind: str) -> None:
        if kind == "fast":
            self._idle_fast += 1
        else:
            self._idle_slow += 1

    def _take(self, queue: deque[Any]) -> Any:
        item = queue.popleft()
        blocked = self._blocked[id(queue)]
        if blocked:
            waiting, kind = blocked.popleft()
            queue.append(waiting)
            self._free(kind)
        return item

    def _pump(self) -> None:
        """Whatever can happen now."""
        while self._idle_slow and self._temp:
            self._idle_slow -= 1
            position, step = self._take(self._temp)
            self._go_on(position, step)
        while len(self._ready) < _BATCH_QUEUE and (self._fast or self._slow):
            self._filling.append(self._take(self._fast or self._slow))
            if len(self._filling) == self._batch_size:
                oldest = min(self._filling) // self._batch_size
                self._ready.append(self._built - oldest)
                self._built += 1
                self._filling.clear()
        while self._idle_fast and self._begun < self._samples:
            self._idle_fast -= 1
            self._begin(self._begun)
            self._begun += 1
        if self.waiting and self._ready:
            self.hand_out(self._ready.popleft())

    def _begin(self, position: int) -> None:
        ends_s = self._costs.ends_s[position % len(self._costs.ends_s)]
        late = next((k for k, end_s in enumerate(ends_s) if end_s > self._timeout_s), None)
        if late is None or (not self._repeats and late == len(ends_s) - 1):
            self._work(ends_s[-1], self._fast, position, "fast")
        else:
            self._work(ends_s[late], self._temp, (position, late), "fast")

    def _go_on(self, position: int, step: int) -> None:
        ends_s = self._costs.ends_s[position % len(self._costs.ends_s)]
        done_s = ends_s[step]
        if self._repeats:
            done_s = ends_s[step - 1] if step else 0.0
            self.record.repeated_s += ends_s[step] - done_s
        self._work(ends_s[-1] - done_s, self._slow, position, "slow")

    def _work(self, work_s: float, queue: deque[Any], item: Any, kind: str) -> None:
        self.record.work_s += work_s
        self.clock.after(work_s, self._finished, queue, item, kind)

    def _finished(self, queue: deque[Any], item: Any, kind: str) -> None:
        self._put(queue, item, kind)
        self._pump()
