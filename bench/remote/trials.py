"""How fast a loader is, and how evenly its batches come."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import minato
from bench.remote.store import COUNT, OBJECT_NBYTES, Objects, index_of
from minato.caching import DiskCache

_LEAST_BATCHES = 3
_LAST = 400
BATCH_SIZE = 10
WORKERS = 4
READS = 16
BUDGET_BYTES = 512 << 20
CACHED = 600
"""Objects of an epoch with a cache."""


def torch_loader(dataset: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, BATCH_SIZE, num_workers=WORKERS)


def ours(**arguments: Any) -> Callable[[Any], Any]:
    def make(dataset: Any) -> Any:
        given = {"memory_budget_bytes": BUDGET_BYTES, **arguments}
        return minato.DataLoader(dataset, BATCH_SIZE, num_workers=WORKERS, **given)

    return make


def hedging(reads: int) -> minato.Fetching:
    return minato.Fetching(reads, hedge_percentile=95)


Loaders = dict[str, Callable[[Any], Any]]
LOADERS: Loaders = {
    "torch": torch_loader,
    "minato, one read a worker": ours(order="arrival"),
    "minato, 16 reads, strict order": ours(fetch_concurrency=READS, order="strict"),
    "minato, 16 reads, arrival order": ours(fetch_concurrency=READS, order="arrival"),
    "the same, stragglers asked for again": ours(fetch_concurrency=hedging(READS), order="arrival"),
}
MANY_READS, LONG_LAG = 32, 256
UNEVEN: Loaders = {
    "torch": torch_loader,
    "minato, 32 reads, strict order": ours(fetch_concurrency=MANY_READS, order="strict"),
    "minato, 32 reads, arrival order": ours(fetch_concurrency=MANY_READS, order="arrival"),
    "the same, max_lag=256": ours(fetch_concurrency=MANY_READS, order="arrival", max_lag=LONG_LAG),
    "and stragglers asked for again": ours(
        fetch_concurrency=hedging(MANY_READS), order="arrival", max_lag=LONG_LAG
    ),
}
"""For connections that differ."""


@dataclass
class Rates:
    """What the runs of one loader gave.

    Attributes:
        samples_per_s: Of each run, the start of its workers included.
        first_s: Until the first batch of each run.
        gaps_ms: Between two batches, of all runs.
        p99_ms: Their 99th percentile in each run.
    """

    samples_per_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The median run."""
        return statistics.median(self.samples_per_s)

    @property
    def mb_per_s(self) -> float:
        """The same in 10**6 bytes per second."""
        return self.rate * OBJECT_NBYTES / 1e6

    def gap_ms(self, share: float) -> float:
        """A percentile of the gaps."""
        return percentile(self.gaps_ms, share)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def run(loader: Iterable[Any], into: Rates, longest_s: float) -> None:
    """Take batches for a while; each object must come once at most.

    The last objects of all are not waited for: nothing else could come in the place of one that is late.
    """
    seen: set[int] = set()
    times = [time.perf_counter()]
    for batch in loader:
        times.append(time.perf_counter())
        found = [index_of(sample) for sample in batch]
        if not seen.isdisjoint(found) or len(set(found)) != len(found):
            raise AssertionError("an object came twice")
        seen.update(found)
        if times[-1] - times[0] > longest_s and len(times) > _LEAST_BATCHES:
            break
        if len(seen) >= COUNT - _LAST:
            break
    into.first_s.append(times[1] - times[0])
    into.samples_per_s.append(BATCH_SIZE * (len(times) - 1) / (times[-1] - times[0]))
    into.gaps_ms += [1e3 * (b - a) for a, b in itertools.pairwise(times[1:])]


def compare(
    port: int, repeats: int, longest_s: float, loaders: Loaders = LOADERS
) -> dict[str, Rates]:
    """All loaders in turn, several times."""
    found = {name: Rates() for name in loaders}
    for _ in range(repeats):
        for name, rates in found.items():
            before = len(rates.gaps_ms)
            run(loaders[name](Objects(port)), rates, longest_s)
            rates.p99_ms.append(percentile(rates.gaps_ms[before:], 0.99))
    return found


def ramp(port: int, requests: Callable[[], int], slow_start: int | None) -> list[tuple[int, int]]:
    """Samples asked for and samples delivered, at each batch; ``requests`` counts the first."""
    fetching = minato.Fetching(READS, slow_start=slow_start)
    loader = ours(fetch_concurrency=fetching, order="arrival", prefetch_factor=8)(Objects(port))
    before = requests()
    found = []
    for k, _ in enumerate(loader):
        found.append((requests() - before, (k + 1) * BATCH_SIZE))
    return found


def epochs_with_cache(port: int, folder: Path, reads: int) -> tuple[list[float], float]:
    """Seconds that each of three epochs takes with a cache on disk that is empty at first, and its hit rate."""
    cache = DiskCache(folder, quota_bytes=1 << 30)
    dataset = Objects(port, CACHED)
    loader = ours(fetch_concurrency=reads, order="arrival", cache=cache)(dataset)
    taken_s = []
    for _ in range(3):
        started = time.perf_counter()
        found = sorted(index_of(sample) for batch in loader for sample in batch)
        taken_s.append(time.perf_counter() - started)
        if found != list(range(CACHED)):
            raise AssertionError("an object is missing, or came twice")
    hit_rate = cache.report().hit_rate
    cache.close()
    return taken_s, hit_rate
