"""What no loader can beat on a row: the work itself, or one copy of the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from bench.macro.rows import Row
from bench.macro.work import SleepingWork, StoredTensors, Work

ROUNDS = 3


@dataclass(frozen=True)
class Bound:
    """The shortest possible epoch of a row.

    Args:
        epoch_s: its time in seconds.
        call_s: for rows whose cost is per sample: what one ``dataset[i]`` takes, in seconds.
    """

    epoch_s: float
    call_s: float | None = None


def bound_of(row: Row, work: Work) -> Bound:
    """Work out or measure the bound of ``row`` on this machine, now.

    Sleeping work: all sleep split evenly over the workers, or the consumer's own sleep if longer.
    Tensors: a copy of every sample to its place in one recycled, warm batch, by one process.
    All others, such as table rows: the calls of ``dataset[i]`` alone, split over the workers.
    """
    if isinstance(work, SleepingWork):
        batches = -(-len(work) // row.batch_size)
        return Bound(max(work.total_s / row.workers, row.pause_s * batches))
    if isinstance(work, StoredTensors):
        return Bound(_memcpy_epoch_s(row, work))
    call_s = _call_s(work)
    return Bound(call_s * len(work) / max(row.workers, 1), call_s)


def _memcpy_epoch_s(row: Row, work: StoredTensors) -> float:
    sources = [sample.numpy() for sample in work.pool]
    batch = np.zeros((row.batch_size, *sources[0].shape), dtype=sources[0].dtype)
    rounds_s = []
    for _ in range(ROUNDS):
        begun = perf_counter()
        for index in range(len(work)):
            np.copyto(batch[index % row.batch_size], sources[index % len(sources)])
        rounds_s.append(perf_counter() - begun)
    return min(rounds_s)


def _call_s(work: Work) -> float:
    rounds_s = []
    for _ in range(ROUNDS):
        begun = perf_counter()
        for index in range(len(work)):
            work[index]
        rounds_s.append(perf_counter() - begun)
    return min(rounds_s) / len(work)
