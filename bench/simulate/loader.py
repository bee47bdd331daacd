"""What all simulated loaders share: the costs of their samples, and the consumer's end of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bench.simulate.clock import Clock
from bench.simulate.workloads import Workload


@dataclass(frozen=True)
class Costs:
    """The costs of a dataset's samples, which are used again and again in the same order.

    Args:
        totals_s: Time of each sample.
        ends_s: When each of its transforms ends, counted in its own time.
        factor: ``position -> factor`` of all times, for costs that drift; None: 1.
    """

    totals_s: Sequence[float]
    ends_s: Sequence[Sequence[float]]
    factor: Callable[[int], float] | None = None

    @classmethod
    def of(
        cls, workload: Workload, count: int, seed: int, factor: Callable[[int], float] | None = None
    ) -> Costs:
        """Costs of ``count`` samples of a workload."""
        totals_s = workload.costs_s(count, np.random.default_rng(seed))
        return cls(totals_s.tolist(), workload.boundaries_s(totals_s).tolist(), factor)

    @property
    def mean_s(self) -> float:
        """Mean time of a sample, without drift."""
        return float(np.mean(self.totals_s))


@dataclass
class Record:
    """What happened.

    Attributes:
        delivered_s: When each batch was delivered.
        waited_s: How long the consumer waited for each.
        worst_lag: The most batches by which a sample came late.
        work_s: All the work that was done.
        repeated_s: The part of it that had been done before.
    """

    delivered_s: list[float]
    waited_s: list[float]
    worst_lag: int = 0
    work_s: float = 0.0
    repeated_s: float = 0.0


class Loader(Protocol):
    """A loader in virtual time."""

    record: Record

    def start(self) -> None:
        """Let the workers begin."""

    def ask(self, receive: Callable[[], None]) -> None:
        """Call ``receive`` as soon as the next batch is there."""


class Shop:
    """The consumer's end: who asked for a batch, since when, and what was handed out."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.record = Record([], [])
        self._receive: Callable[[], None] | None = None
        self._asked_s = 0.0

    @property
    def waiting(self) -> bool:
        """Whether the consumer waits."""
        return self._receive is not None

    @property
    def waiting_for_s(self) -> float:
        """For how long it has been waiting now."""
        return self.clock.now_s - self._asked_s if self.waiting else 0.0

    def asked(self, receive: Callable[[], None]) -> None:
        """Note that the consumer wants a batch."""
        self._receive, self._asked_s = receive, self.clock.now_s

    def hand_out(self, lag: int) -> None:
        """Give the consumer its batch; the latest sample in it is so many batches late."""
        assert self._receive is not None
        receive, self._receive = self._receive, None
        record = self.record
        record.delivered_s.append(self.clock.now_s)
        record.waited_s.append(self.clock.now_s - self._asked_s)
        record.worst_lag = max(record.worst_lag, lag)
        receive()


class Training:
    """Consumers, one per loader, that take a step together when each has its batch.

    Args:
        step_s: Time of a step; a function of the time for one that changes.
        steps: How many.
    """

    def __init__(
        self,
        clock: Clock,
        loaders: Sequence[Loader],
        step_s: float | Callable[[float], float],
        steps: int,
    ) -> None:
        self._clock = clock
        self._loaders = loaders
        self._step_s = step_s
        self._left = steps
        self._missing = 0

    def run(self) -> None:
        """Train."""
        for loader in self._loaders:
            loader.start()
        self._ask()
        self._clock.run()

    def _ask(self) -> None:
        if not self._left:
            return
        self._left -= 1
        self._missing = len(self._loaders)
        for loader in self._loaders:
            loader.ask(self._received)

    def _received(self) -> None:
        self._missing -= 1
        if not self._missing:
            step_s = self._step_s
            taken_s = step_s(self._clock.now_s) if callable(step_s) else step_s
            self._clock.after(taken_s, self._ask)
