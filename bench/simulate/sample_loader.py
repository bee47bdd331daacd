"""minato in virtual time: single samples, with the window, the timeout policy and the orders of the engine."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from bench.simulate.clock import Clock
from bench.simulate.loader import Costs, Shop
from minato._core.histogram import Histogram
from minato.scheduler.in_flight import Order
from minato.scheduler.policy import TimeoutPolicy
from minato.scheduler.window import Window


class SampleLoader(Shop):
    """Workers claim samples one by one; the order decides which place a sample takes.

    Dispatch, copies and collation cost nothing here.

    Args:
        workers: How many work at first; ``set_workers`` changes it.
        defers: Whether a worker defers a slow sample between two transforms while the consumer waits.
        timeouts: The policy that says which samples are slow.
        cores: How many there are. A sample that begins when more are needed takes so much longer.
        on_core: Part of a sample's time that needs a core.
    """

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        batch_size: int,
        workers: int,
        batches: int,
        order: Order,
        defers: bool,
        timeouts: TimeoutPolicy | None = None,
        cores: float = 1.0,
        on_core: float = 0.0,
    ) -> None:
        super().__init__(clock)
        self.cores = cores
        self.on_core = on_core
        self._costs = costs
        self._batch_size = batch_size
        self._batches = batches
        self._order = order
        self._fast_first = order.name == "fast_first"
        self._defers = defers
        self.timeouts = timeouts or TimeoutPolicy()
        self.times = Histogram()
        self.workers = workers
        self.window = Window(workers, None, 1 << 62, None if order.bound else order.max_lag)
        self._idle: list[int] = []
        self._resting: set[int] = set()
        self._deferred: list[tuple[int, int] | None] = []
        """Of each worker the deferred sample: its position, and its latest transform."""
        self._head = self._tail = 0  # samples claimed, samples published
        self._opened = self._handed_out = 0
        self._oldest = 0  # batch that may have an open place
        self._open_places: list[int] = []
        self._unfilled: list[int] = []
        self._lags: list[int] = []
        self._complete: list[int] = []  # heap
        self._placed = bytearray(0 if order.bound else batches * batch_size)
        self._bound: dict[int, int] = {}
        self.busy_s = 0.0
        self._running = 0
        self._since_s = 0.0

    # ---- the consumer -----------------------------------------------------------------------

    def start(self) -> None:
        """Open the first batches and let the workers begin."""
        self._refill()
        self.set_workers(self.workers)

    def ask(self, receive: Callable[[], None]) -> None:
        """The consumer wants a batch."""
        self.asked(receive)
        self._serve()
        self._grow()

    @property
    def ready(self) -> int:
        """Complete batches that wait for the consumer."""
        return len(self._complete)

    def set_workers(self, count: int) -> None:
        """Have so many workers from now on; those that leave finish what they have begun."""
        self.workers = count
        self.window.resize(count)
        while len(self._deferred) < count:
            self._deferred.append(None)
            self._look(len(self._deferred) - 1)
        for worker in sorted(self._resting):
            if worker < count:
                self._resting.remove(worker)
                self._look(worker)
        self._refill()

    def busy_until_now_s(self) -> float:
        """Time that workers have spent on samples, all together."""
        self._count_busy(0)
        return self.busy_s

    def _serve(self) -> None:
        complete = self._complete
        if not self.waiting or not complete:
            return
        if self._order.name != "batch" and complete[0] != self._handed_out:
            return
        batch = heappop(complete)
        lag = max(self._lags[batch], self._handed_out - batch)
        self._handed_out += 1
        self.timeouts.observe(self.times, self.clock.now_s)
        self._refill()
        self.hand_out(lag)

    def _refill(self) -> None:
        while self._opened < self._batches and self.window.has_room(
            self._opened - self._handed_out
        ):
            self._open()
        while self._idle and self._head < self._tail:
            self._look(self._idle.pop())

    def _open(self) -> None:
        size, batch = self._batch_size, self._opened
        self._opened += 1
        self._tail += size
        self._unfilled.append(size)
        self._open_places.append(0 if self._order.bound else size)
        self._lags.append(0)
        overdue = batch - self._order.max_lag
        if not self._order.bound and overdue >= 0:
            for position in range(overdue * size, (overdue + 1) * size):
                if not self._placed[position] and position not in self._bound:
                    place = batch if self._open_places[batch] else self._oldest_open()
                    self._bound[position] = place
                    self._open_places[place] -= 1

    def _grow(self) -> None:
        """As the dispatcher: more batches while the consumer waits and nothing is left to claim."""
        while (
            self.waiting
            and self._head == self._tail
            and self._opened < self._batches
            and self.window.grow()
        ):
            self._refill()

    # ---- the workers ------------------------------------------------------------------------

    def _look(self, worker: int) -> None:
        """A worker is free: what does it do next?"""
        deferred = self._deferred[worker]
        resting = worker >= self.workers
        # One is resumed as well where nothing is left to claim: then it is due.
        if deferred is not None and (resting or self._is_due(deferred[0])):
            self._deferred[worker] = None
            self._run(worker, *deferred)
        elif resting:
            self._resting.add(worker)
        elif self._head < self._tail:
            self._head += 1
            self._run(worker, self._head - 1, -1)
        else:
            self._idle.append(worker)
            self._grow()

    def _is_due(self, position: int) -> bool:
        """Whether a deferred sample goes before those that no worker has begun, as ``Deferral.is_due``."""
        return not self.waiting or not self._others_have_work() or position in self._bound

    def _others_have_work(self) -> bool:
        return self._tail - self._head > self.workers

    def _run(self, worker: int, position: int, step: int) -> None:
        """Run a sample after transform ``step``, to its end or to the next point where it may be deferred."""
        costs = self._costs
        number = position % len(costs.totals_s)
        total_s = costs.totals_s[number]
        factor = 1.0 if costs.factor is None else costs.factor(position)
        ends_s = costs.ends_s[number]
        done_s = ends_s[step] if step >= 0 else 0.0
        threshold_s = self.timeouts.decision.threshold_ns / 1e9
        self._count_busy(+1)
        factor *= max(1.0, self._running * self.on_core / self.cores)
        left_s = (total_s - done_s) * factor
        if self._defers and 0 < threshold_s < total_s * factor:
            for k in range(step + 1, len(ends_s) - 1):
                if ends_s[k] * factor > threshold_s:
                    work_s = (ends_s[k] - done_s) * factor
                    self.clock.after(work_s, self._between, worker, position, k)
                    return
        self.clock.after(left_s, self._finished, worker, position, factor)

    def _between(self, worker: int, position: int, step: int) -> None:
        """Time is up after a transform."""
        self._count_busy(-1)
        if (
            self._deferred[worker] is None
            and self.waiting
            and self._others_have_work()
            and position not in self._bound
        ):
            self._deferred[worker] = position, step
            self._look(worker)
        else:
            self._run(worker, position, step)

    def _finished(self, worker: int, position: int, factor: float) -> None:
        self._count_busy(-1)
        totals_s = self._costs.totals_s
        cost_s = factor * totals_s[position % len(totals_s)]
        self.record.work_s += cost_s
        cost_ns = int(1e9 * cost_s)
        self.times.record(cost_ns)
        batch = self._place(position, cost_ns > self.timeouts.decision.threshold_ns > 0)
        self._unfilled[batch] -= 1
        if not self._unfilled[batch]:
            heappush(self._complete, batch)
            self._serve()
        self._look(worker)

    def _place(self, position: int, slow: bool) -> int:
        """The batch that a finished sample goes to."""
        own = position // self._batch_size
        if self._order.bound:
            return own
        self._placed[position] = 1
        batch = self._bound.pop(position, -1)
        if batch < 0:
            newest = slow and self._fast_first and not self.waiting
            batch = self._newest_open() if newest else self._oldest_open()
            self._open_places[batch] -= 1
        if batch - own > self._lags[batch]:
            self._lags[batch] = batch - own
        return batch

    def _oldest_open(self) -> int:
        while not self._open_places[self._oldest]:
            self._oldest += 1
        return self._oldest

    def _newest_open(self) -> int:
        batch = self._opened - 1
        while not self._open_places[batch]:
            batch -= 1
        return batch

    def _count_busy(self, change: int) -> None:
        now_s = self.clock.now_s
        self.busy_s += self._running * (now_s - self._since_s)
        self._since_s = now_s
        self._running += change
