"""Measure a process before and after it has used many loaders or batches: ``growth.py CASE …``.

Writes a line of JSON for each case: what there was more of at its end.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable

import numpy as np
import psutil

from minato import DataLoader
from tests.datasets import Filled
from tests.isolated.shared import KINDS, measure, name_semaphores, settled

SOME_BYTES = 12 << 20
EXACT = tuple(measure())


def fail(index: int) -> int:
    raise ValueError(index)


def many_batches(**options: object) -> Callable[[int], None]:
    """Thousands of small batches from the same workers."""
    loader = DataLoader(Filled(2000, 16), 2, **options)

    def work(rounds: int) -> None:
        for _ in range(rounds):
            assert sum(len(batch) for batch in loader) == 2000

    return work


def many_epochs(**options: object) -> Callable[[int], None]:
    """Hundreds of short epochs from the same workers, some of them left early."""
    loader = DataLoader(Filled(8, 1000), 2, persistent_workers=True, **options)

    def work(rounds: int) -> None:
        for number in range(25 * rounds):
            for k, _ in enumerate(loader):
                if k == number % 7:
                    break

    return work


def many_loaders(**options: object) -> Callable[[int], None]:
    """Loaders that are made, used and dropped, some in mid-epoch, some failing."""

    def work(rounds: int) -> None:
        for _ in range(rounds):
            assert len(list(DataLoader(Filled(6, 1000), 2, **options))) == 3
            next(iter(DataLoader(Filled(20, 1000), 1, **options)))
            try:
                list(DataLoader(range(4), 2, transforms=[fail], **options))
            except ValueError:
                continue
            raise AssertionError("no error")

    return work


def collated(samples: list[np.ndarray]) -> dict[str, object]:
    return {"samples": samples, "text": "x" * 1000}


THREADS, PROCESSES = KINDS["threads"], KINDS["processes"]
KEPT = {"persistent_workers": True}
# How to work, and how many rounds before and between the two measurements.
CASES = {
    "batches-inline": (lambda: many_batches(), 3, 10),
    "batches-processes": (lambda: many_batches(**KEPT, **PROCESSES), 3, 10),
    "batches-threads": (lambda: many_batches(**KEPT, **THREADS), 3, 10),
    "batches-collated": (lambda: many_batches(collate_fn=collated, **KEPT, **PROCESSES), 3, 6),
    "batches-arrival": (lambda: many_batches(order="arrival", **KEPT, **PROCESSES), 3, 10),
    "epochs-processes": (lambda: many_epochs(**PROCESSES), 3, 12),
    "epochs-threads": (lambda: many_epochs(**THREADS), 3, 12),
    "epochs-arrival": (lambda: many_epochs(order="arrival", **THREADS), 3, 12),
    "loaders-inline": (lambda: many_loaders(num_workers=0), 20, 100),
    "loaders-processes": (lambda: many_loaders(**PROCESSES), 2, 6),
    "loaders-threads": (lambda: many_loaders(**THREADS), 20, 60),
}


name_semaphores()


def used() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    workers = process.children(recursive=True)
    return {
        **measure(),
        "native threads": process.num_threads(),
        "mappings": len(process.memory_maps(grouped=False)),
        "bytes": process.memory_info().rss,
        "bytes of workers": sum(worker.memory_info().rss for worker in workers),
    }


def settled_below(first: dict[str, int]) -> dict[str, int]:
    """What there is when there is no more than before of what is counted exactly."""
    return settled(used, lambda last: all(last[name] <= first[name] for name in EXACT))


def main(case: str) -> None:
    make, before, between = CASES[case]
    work = make()
    work(before)
    first = used()
    work(between)
    last = settled_below(first)
    if last["bytes of workers"] - first["bytes of workers"] > SOME_BYTES:
        # On a busy machine a worker may have its first sample late, and then reads much of the interpreter: once.
        first = last
        work(between)
        last = settled_below(first)
    print(json.dumps([case, {name: last[name] - first[name] for name in first}]))


if __name__ == "__main__":
    for case in sys.argv[1:]:
        main(case)
