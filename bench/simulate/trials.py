"""One loader over one workload, and the figures of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.simulate.clock import Clock
from bench.simulate.loader import Costs, Loader, Training
from bench.simulate.printed import PrintedLoader
from bench.simulate.sample_loader import SampleLoader
from bench.simulate.torch_loader import TorchLoader
from bench.simulate.workloads import Workload
from minato.options import DEFAULT_MAX_LAG
from minato.scheduler.in_flight import Order

Make = Callable[[Clock, Costs, int, int, int], Loader]
"""``(clock, costs, batch size, workers, batches)`` to a loader."""


def _torch(in_order: bool) -> Make:
    def make(clock: Clock, costs: Costs, batch_size: int, workers: int, batches: int) -> Loader:
        return TorchLoader(clock, costs, batch_size, workers, batches, in_order)

    return make


def _printed(slow_workers: float, repeats: bool) -> Make:
    def make(clock: Clock, costs: Costs, batch_size: int, workers: int, batches: int) -> Loader:
        slow = max(1, round(slow_workers * workers))
        return PrintedLoader(clock, costs, batch_size, workers, batches, slow, repeats)

    return make


def _minato(name: str, defers: bool) -> Make:
    def make(clock: Clock, costs: Costs, batch_size: int, workers: int, batches: int) -> Loader:
        order = Order(name, DEFAULT_MAX_LAG)
        return SampleLoader(clock, costs, batch_size, workers, batches, order, defers)

    return make


CONTENDERS: dict[str, Make] = {
    "torch": _torch(in_order=True),
    "torch, in_order=False": _torch(in_order=False),
    "Algorithm 1 as printed": _printed(0.25, repeats=True),
    "Algorithm 1, next index": _printed(0.25, repeats=False),
    "minato strict": _minato("strict", defers=False),
    "minato batch": _minato("batch", defers=False),
    "minato arrival": _minato("arrival", defers=False),
    "minato arrival, deferral": _minato("arrival", defers=True),
    "minato fast_first": _minato("fast_first", defers=False),
    "minato fast_first, deferral": _minato("fast_first", defers=True),
}
"""In strict and batch order samples run to their end."""


@dataclass(frozen=True)
class Result:
    """Figures of one run.

    Attributes:
        batches_per_s: Per rank, after the first quarter.
        bound: The most that so many workers, or the consumer, allow.
        first_batch_s: Time to the first batch.
        p99_gap_s: Between two batches, after the first quarter.
        waited_share: Part of the time after the first quarter in which the consumer waited.
        worst_lag: Batches by which a sample came late at most.
        repeated_share: Part of the work that had been done before.
    """

    batches_per_s: float
    bound: float
    first_batch_s: float
    p99_gap_s: float
    waited_share: float
    worst_lag: int
    repeated_share: float
    samples: int
    duration_s: float


def bound(workload: Workload, costs: Costs, workers: int) -> float:
    """Batches per second that ``workers`` can make, or the consumer can take."""
    return min(workers / (costs.mean_s * workload.batch_size), 1.0 / workload.step_s)


def run_trial(
    make: Make, workload: Workload, workers: int, batches: int, seed: int = 0, ranks: int = 1
) -> Result:
    """Train with ``ranks`` loaders of ``workers`` each, for ``batches`` steps."""
    clock = Clock()
    size = workload.batch_size
    count = 5 * min(
        2000, -(-batches * size // 5)
    )  # each of their costs occurs as often as every other
    all_costs = [Costs.of(workload, count, seed + rank) for rank in range(ranks)]
    loaders = [make(clock, costs, size, workers, batches) for costs in all_costs]
    Training(clock, loaders, workload.step_s, batches).run()
    record = loaders[0].record
    times_s = np.array(record.delivered_s)
    settled = batches // 4
    gaps_s = np.diff(times_s[settled:])
    return Result(
        batches_per_s=len(gaps_s) / float(gaps_s.sum()),
        bound=bound(workload, all_costs[0], workers),
        first_batch_s=record.delivered_s[0],
        p99_gap_s=float(np.quantile(gaps_s, 0.99)),
        waited_share=float(np.sum(record.waited_s[settled + 1 :]) / gaps_s.sum()),
        worst_lag=max(loader.record.worst_lag for loader in loaders),
        repeated_share=record.repeated_s / record.work_s,
        samples=ranks * batches * size,
        duration_s=record.delivered_s[-1],
    )
