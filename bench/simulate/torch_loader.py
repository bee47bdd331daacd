"""torch's loader in virtual time: a batch is one worker's, and is assigned when another one is taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from bench.simulate.clock import Clock
from bench.simulate.loader import Costs, Shop

_PREFETCH = 2


class TorchLoader(Shop):
    """Whole batches, round robin, two per worker in flight.

    Args:
        in_order: torch's argument; if not, a batch counts as taken when it comes, and goes to a worker that has room.
    """

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        batch_size: int,
        workers: int,
        batches: int,
        in_order: bool,
    ) -> None:
        super().__init__(clock)
        self._costs = costs
        self._batch_size = batch_size
        self._batches = batches
        self._in_order = in_order
        self._tasks: list[deque[int]] = [deque() for _ in range(workers)]
        self._held = [0] * workers
        self._busy = [False] * workers
        self._owner: dict[int, int] = {}
        self._turn = 0
        self._assigned = 0
        self._results: deque[int] = deque()  # the queue between workers and consumer
        self._kept: set[int] = set()  # came before their turn
        self._next = 0

    def start(self) -> None:
        """Assign the first batches."""
        for _ in range(_PREFETCH * len(self._tasks)):
            self._assign()

    def ask(self, receive: Callable[[], None]) -> None:
        """The consumer wants a batch."""
        self.asked(receive)
        self._serve()

    def _assign(self) -> None:
        if self._assigned == self._batches:
            return
        for _ in self._tasks:
            worker = self._turn
            self._turn = (worker + 1) % len(self._tasks)
            if self._in_order or self._held[worker] < _PREFETCH:
                break
        else:
            return
        self._held[worker] += 1
        self._owner[self._assigned] = worker
        self._tasks[worker].append(self._assigned)
        self._assigned += 1
        self._work(worker)

    def _work(self, worker: int) -> None:
        if self._busy[worker] or not self._tasks[worker]:
            return
        self._busy[worker] = True
        batch, costs = self._tasks[worker].popleft(), self._costs
        count, totals_s = len(costs.totals_s), costs.totals_s
        first = batch * self._batch_size
        work_s = sum(totals_s[i % count] for i in range(first, first + self._batch_size))
        if costs.factor is not None:
            work_s *= costs.factor(first)
        self.record.work_s += work_s
        self.clock.after(work_s, self._finished, worker, batch)

    def _finished(self, worker: int, batch: int) -> None:
        self._busy[worker] = False
        self._results.append(batch)
        self._work(worker)
        if self.waiting:
            self._serve()

    def _serve(self) -> None:
        if self._next in self._kept:
            self._kept.remove(self._next)
            self._hand_out(self._next)
            return
        while self._results:
            batch = self._results.popleft()
            if batch == self._next or not self._in_order:
                self._hand_out(batch)
                return
            self._kept.add(batch)

    def _hand_out(self, batch: int) -> None:
        lag = self._next - batch
        self._next += 1
        self._held[self._owner.pop(batch)] -= 1
        self._assign()
        self.hand_out(lag)
